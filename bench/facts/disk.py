"""Leaves on disk: buffered and direct I/O by threads, checksums, and freed memory that the C library keeps."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import torch

PIECE, PIECES = 8 << 20, 256


def rates(direct: bool, threads: int) -> tuple[float, float]:
    """GB/s of writing and reading 2 GB, in pieces as extents are."""
    with tempfile.TemporaryDirectory() as folder:
        fd = os.open(f"{folder}/file", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0))
        os.posix_fallocate(fd, 0, PIECE * PIECES)
        buffers = [mmap.mmap(-1, PIECE) for _ in range(threads)]
        for buffer in buffers:
            buffer.write(os.urandom(PIECE))
        seconds: list[float] = []
        with ThreadPoolExecutor(threads) as pool:
            for operation in (os.pwritev, os.preadv):
                begun = time.perf_counter()
                list(pool.map(lambda i: operation(fd, [buffers[i % threads]], i * PIECE), range(PIECES)))  # noqa: B023
                seconds.append(time.perf_counter() - begun)
        os.close(fd)
        return PIECE * PIECES / seconds[0] / 1e9, PIECE * PIECES / seconds[1] / 1e9


_KEPT = """
import ctypes, threading, torch
if {mapped}: ctypes.CDLL(None).mallopt(-3, 1 << 20)
kept, small = [], []
for i in range(200):
    large = torch.zeros(int(9e6) // 4 + i)
    small.append(torch.zeros(50_000))
    kept = [*kept[-3:], large]
del kept, large
print(int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20)
"""


def main() -> None:
    """Prints all rows."""
    for direct in (False, True):
        for threads in (1, 2):
            written, read = rates(direct, threads)
            print(f"{'direct' if direct else 'buffered'}, {threads} threads: write {written:.1f}, read {read:.1f} GB/s")
    x = torch.randn(PIECE)
    begun = time.perf_counter()
    for _ in range(10):
        zlib.crc32(x.numpy())
    print(f"crc32: {10 * x.nbytes / (time.perf_counter() - begun) / 1e9:.1f} GB/s")
    for mapped in (False, True):
        run = subprocess.run(
            [sys.executable, "-c", _KEPT.format(mapped=mapped)], capture_output=True, text=True, check=True
        )
        print(
            f"resident after large tensors were freed, {'mapped' if mapped else 'by default'}: {run.stdout.strip()} MB"
        )


if __name__ == "__main__":
    main()
