"""Compares _StridedShard with nested ceil-chunks, and looks at timeouts and costs of groups, on two and four ranks."""

import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fsharding as fs
from fsharding.sharding import boxes


def disagreements():
    for major, minor in ((2, 2), (2, 3), (3, 2)):
        for size in range(14):
            for a in range(major):
                for b in range(minor):
                    strided = _StridedShard(0, split_factor=major)
                    parts, _ = strided._split_tensor(torch.arange(size), minor, with_padding=False, contiguous=False)
                    mine = Shard(0)._split_tensor(parts[b], major, with_padding=False, contiguous=False)[0][a]
                    ours = range(*boxes.nested_chunk(size, [(major, a), (minor, b)]))
                    if mine.tolist() != list(ours):
                        yield f"size {size} on {major}x{minor} at ({a}, {b}): {mine.tolist()} or {list(ours)}"


def timeouts():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    groups = [dist.group.WORLD, *mesh.get_all_groups()]
    return [str(group._get_backend(torch.device("cpu")).options._timeout) for group in groups]


def new_groups():
    medians = []
    for lazy in ("0", "1"):
        os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
        times = []
        for _ in range(5):
            dist.barrier()
            began = time.perf_counter()
            dist.new_group(list(range(dist.get_world_size())))
            times.append(1e3 * (time.perf_counter() - began))
        medians.append(round(statistics.median(times), 1))
    return medians


if __name__ == "__main__":
    print(*disagreements(), sep="\n")
    print("timeouts of the default group, and of two mesh dims:", fs.run_ranks(timeouts, 2)[0])
    print("ms to make a group of 4 ranks, eager and lazy:", fs.run_ranks(new_groups, 4)[0])
    one = fs.NamedSharding(fs.make_mesh(dp=-1), fs.P("dp")).to_dtensor(torch.arange(3.0), (3,))
    print("no process group:", not dist.is_initialized(), one.full_tensor())
