"""Token data as a pure function: `data.batch(step, shard)` gives the same tensors for the same arguments, always.

In: a flat stream of token ids (the bytes of files, or a memory-mapped `.bin`), a global batch size, a length, a seed.
Out: `{"tokens", "targets"}`, both int64[batch_size / shard.count, seq_len]; targets are the tokens one place further.
Where documents are known, `documents` besides.
Guarantees: the batches of the shards of a step, one after the other, are the batch of one shard, whatever the count;
the place of a row in the stream depends on (seed, global row number) alone. So no mesh sees other data than any other,
and a resumed run needs nothing but its step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from fsharding.apps.data.documents import open_documents
from fsharding.apps.data.packed import Packed, packed, write_tokens
from fsharding.apps.data.text_files import StrPath, python_stdlib_files, read_files
from fsharding.base.calls import named
from fsharding.base.errors import DataError, message
from fsharding.base.local_paths import check_local
from fsharding.base.untrusted import open_plain, read_json
from fsharding.train.shard import WHOLE, Data, Shard

__all__ = [
    "Data",
    "Packed",
    "Shard",
    "Tokens",
    "from_files",
    "from_tokens",
    "open_data",
    "open_documents",
    "packed",
    "python_stdlib_files",
    "write_tokens",
]

Stream: TypeAlias = npt.NDArray[np.integer[Any]]

_ITEM = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
_CHUNK = 1 << 22
_SIDECAR = 1 << 20
_SAMPLES = 64
_SAMPLE = 4096


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """Rows of `seq_len` tokens from random places of one flat stream.

    Row `r` of step `s` is row `n = s * batch_size + r` of the run and starts at word 0 of block n of the counter-based
    generator Philox4x64-10 with key `seed`, modulo the number of starts (Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", SC11). Any row is thus computed on its own; there are no epochs and there is no state.

    Attributes:
        stream: integer[N], N > seq_len; may be a memory map, of which only the rows asked for are read.
        batch_size: rows of the global batch.
        seq_len: tokens of a row.
        seed: key of the generator, 0 <= seed < 2**128.
        vocab_size: every id is below it; checked on each batch.
        source: where the stream came from, for messages.
        begins: where documents begin in the stream (int64, ascending), if batches are to say it: then they have
            `documents` too, and a token whose target is in another document has the target -100, which does not count.

    Raises:
        DataError: a size is not positive, the seed is out of range, or the stream is not one dimension of at least
            `seq_len + 1` integers.

    Example:
        >>> import numpy as np
        >>> data = fs.data.Tokens(stream=np.arange(100), batch_size=4, seq_len=8)
        >>> whole, second = data.batch(5), data.batch(5, fs.data.Shard(1, 2))
        >>> torch.equal(whole["tokens"][2:], second["tokens"]), torch.equal(whole["tokens"] + 1, whole["targets"])
        (True, True)
    """

    stream: Stream = dataclasses.field(repr=False)
    batch_size: int
    seq_len: int
    seed: int = 0
    vocab_size: int = 256
    source: str = "an array"
    begins: npt.NDArray[np.int64] | None = dataclasses.field(default=None, repr=False)

    @named("Tokens")
    def __post_init__(self) -> None:
        sizes = {"batch_size": self.batch_size, "seq_len": self.seq_len, "vocab_size": self.vocab_size}
        rows = [f"{name} is {size}: not positive." for name, size in sizes.items() if size < 1]
        if not 0 <= self.seed < 2**128:
            rows.append(f"seed is {self.seed}: not in [0, 2**128).")
        if rows:
            mend = "Give positive sizes and a seed >= 0."
            raise DataError(message("got arguments out of range.", rows, mend))
        kind = self.stream.dtype
        dims = self.stream.ndim
        if kind.kind not in "iu" or dims != 1:
            rule = f"cannot read a stream of {kind} with {dims} dimensions from {self.source}."
            raise DataError(message(rule, mend="Give a flat array of integer token ids."))
        if self.stream.size <= self.seq_len:
            size = self.stream.size
            need = self.seq_len + 1
            rule = f"cannot cut a row of seq_len {self.seq_len} and its targets out of {self.source}."
            row = f"It holds {size} tokens; one row takes {need}."
            mend = "Give more data" + (f", or seq_len {size - 1} or less." if size > 1 else ".")
            raise DataError(message(rule, [row], mend))

    @property
    def global_batch_size(self) -> int:
        """Rows of one step over all data-parallel ranks."""
        return self.batch_size

    def starts(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Where rows [first, first + count) of the run begin in the stream: int64[count]."""
        words = np.random.Philox(key=self.seed, counter=first).random_raw(4 * count)[::4]
        return (words % np.uint64(self.stream.size - self.seq_len)).astype(np.int64)

    @named("Tokens.batch")
    def batch(self, step: int, shard: Shard = WHOLE) -> dict[str, torch.Tensor]:
        """The rows of `shard` at `step`; only these are read.

        Args:
            step: number of the step, from 0.
            shard: which part of the global batch.

        Returns:
            `{"tokens", "targets"}`, each int64[batch_size / shard.count, seq_len], new memory at every call; with
            `begins` also `documents`, of the same kind: numbers that ascend within a row.

        Raises:
            DataError: `step` is negative, the batch cannot be divided, or an id is not in [0, vocab_size).
        """
        if step < 0:
            raise DataError(message(f"got step {step}.", mend="Steps count from 0."))
        rows = shard.rows(self.batch_size)
        first = step * self.batch_size + rows.start
        starts = self.starts(first, len(rows))
        window_BT = np.empty((len(rows), self.seq_len + 1), np.int64)
        for row, start in enumerate(starts.tolist()):
            window_BT[row] = self.stream[start : start + self.seq_len + 1]
        if window_BT.min() < 0 or window_BT.max() >= self.vocab_size:
            self._refuse_ids(window_BT, starts)
        parts = {"tokens": window_BT[:, :-1], "targets": window_BT[:, 1:]}
        if self.begins is not None:
            places_BT = starts[:, None] + np.arange(self.seq_len + 1)
            number_BT = np.searchsorted(self.begins, places_BT, side="right").astype(np.int64)
            parts["documents"] = number_BT[:, :-1]
            parts["targets"] = np.where(number_BT[:, 1:] == number_BT[:, :-1], parts["targets"], -100)
        return {name: torch.as_tensor(part.copy()) for name, part in parts.items()}

    def _refuse_ids(self, window_BT: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> None:
        bad = (window_BT < 0) | (window_BT >= self.vocab_size)
        rows = [
            f"position {int(starts[row]) + int(bad[row].argmax())} is {int(window_BT[row, bad[row].argmax()])}"
            for row in np.flatnonzero(bad.any(axis=1)).tolist()
        ]
        rule = f"read ids outside [0, {self.vocab_size}) in {len(rows)} rows of {self.source}. The first of each row:"
        mend = "Give the vocab_size of the tokenizer that wrote the data."
        raise DataError(message(rule, rows, mend))

    def fingerprint(self) -> str:
        """16 hex digits over sizes, dtype, seed, samples of the stream and documents: shows a resume on other data.

        Up to 64 * 4096 tokens are all hashed; of a longer stream 64 runs of 4096, evenly spaced, both ends included.
        """
        size = self.stream.size
        head = ["fsharding-tokens-1", size, self.stream.dtype.str, self.batch_size, self.seq_len, self.seed]
        digest = hashlib.sha256(json.dumps(head).encode())
        whole = size <= _SAMPLES * _SAMPLE
        for i in range(_SAMPLES):
            start = i * _SAMPLE if whole else i * (size - _SAMPLE) // (_SAMPLES - 1)
            digest.update(self.stream[start : start + _SAMPLE].tobytes())
        if self.begins is not None:
            digest.update(self.begins.tobytes())
        return digest.hexdigest()[:16]


@named("from_files")
def from_files(
    paths: StrPath | Iterable[StrPath], *, batch_size: int, seq_len: int, seed: int = 0, documents: bool = False
) -> Tokens:
    """The bytes of files, one after the other, as tokens of a vocabulary of 256.

    Args:
        paths: a file, a directory, or several of them. Of a directory all files below it are read, in the order of
            their relative paths, without hidden ones. The order of `paths` has no effect; a file counts once.
        batch_size: rows of the global batch.
        seq_len: tokens of a row.
        seed: key of the generator that places the rows.
        documents: each file is a document: batches say which tokens are of one.

    Raises:
        DataError: a path is missing or cannot be read, there are no files, all are empty, or they hold too few bytes.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.txt").write_text("to be or not to be")
        ...     data = fs.data.from_files(folder, batch_size=2, seq_len=4)
        >>> data.batch(0)["tokens"].shape, bytes(data.stream[:5])
        (torch.Size([2, 4]), b'to be')
    """
    buffer, begins, source = read_files(paths)
    stream = np.frombuffer(buffer, np.uint8)
    stream.flags.writeable = False
    at = np.array(begins, np.int64) if documents else None
    return Tokens(stream=stream, batch_size=batch_size, seq_len=seq_len, seed=seed, source=source, begins=at)


@named("from_tokens")
def from_tokens(
    path: StrPath,
    *,
    dtype: str = "uint16",
    vocab_size: int | None = None,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    separator: int | None = None,
) -> Tokens:
    """A file of little-endian token ids, memory-mapped: never read whole.

    Args:
        path: the file; it must not change while it is in use.
        dtype: "uint8", "uint16" or "uint32".
        vocab_size: ids are below it; without it, the largest id of the file and one (one pass in pieces of 4 Mi ids).
        batch_size: rows of the global batch.
        seq_len: tokens of a row.
        seed: key of the generator that places the rows.
        separator: the id that ends a document (one pass in pieces of 4 Mi ids): batches say which tokens are of one.

    Raises:
        DataError: the file is missing, empty, too short, not a whole number of ids, or `dtype` is none of these.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> with TemporaryDirectory() as folder:
        ...     np.arange(100, dtype="<u2").tofile(f"{folder}/tokens.bin")
        ...     data = fs.data.from_tokens(f"{folder}/tokens.bin", batch_size=2, seq_len=4)
        >>> data.vocab_size, data.batch(0)["tokens"].shape
        (100, torch.Size([2, 4]))
    """
    check_local(path)
    if dtype not in _ITEM:
        rule = f"cannot read dtype {dtype!r} from {path}."
        raise DataError(message(rule, mend=f"Give one of {', '.join(_ITEM)}."))
    item = np.dtype(_ITEM[dtype])
    try:
        with open_plain(os.path.realpath(path)) as file:
            size = os.fstat(file.fileno()).st_size
            count = size // item.itemsize
            stream = cast("Stream", np.memmap(file, item, "r", shape=(count,)) if count else np.empty(0, item))
    except (OSError, ValueError) as error:
        rule = f"cannot open {path}: {getattr(error, 'strerror', None) or error}."
        raise DataError(message(rule, mend="Give the path of a file of token ids.")) from error
    if size % item.itemsize:
        rule = f"cannot read {path} as {dtype}: its {size} bytes are no multiple of {item.itemsize}."
        mend = "The file is cut short or has another dtype: pass dtype, or write it in the sidecar file."
        raise DataError(message(rule, mend=mend))
    if vocab_size is None:
        vocab_size = 1 + max((int(stream[at : at + _CHUNK].max()) for at in range(0, stream.size, _CHUNK)), default=0)
    return Tokens(
        stream=stream,
        batch_size=batch_size,
        seq_len=seq_len,
        seed=seed,
        vocab_size=vocab_size,
        source=str(path),
        begins=None if separator is None else _after(stream, separator),
    )


def _after(stream: Stream, separator: int) -> npt.NDArray[np.int64]:
    """Where documents begin that end with a separator."""
    pieces = (at + 1 + np.flatnonzero(stream[at : at + _CHUNK] == separator) for at in range(0, stream.size, _CHUNK))
    return np.concatenate([np.zeros(1, np.int64), *pieces])


@named("open_data")
def open_data(spec: str, *, batch_size: int, seq_len: int, seed: int = 0, documents: bool = False) -> Tokens:
    """Opens the data that a command line names.

    Args:
        spec: "default" is the standard library of this Python; "*.bin" is a token file, whose dtype and vocabulary
            may stand beside it in `PATH.json` as `{"dtype": "uint16", "vocab_size": N}`; else a file or a directory.
            The id that ends a document may stand there as `"separator"`.
        batch_size: rows of the global batch.
        seq_len: tokens of a row.
        seed: key of the generator that places the rows.
        documents: batches say which tokens are of one document: a file, or what a separator ends.

    Raises:
        DataError: as `from_files`, `from_tokens` and `python_stdlib_files`; or the sidecar file is not as above.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.bin").write_bytes(bytes(400))
        ...     _ = Path(folder, "a.bin.json").write_text('{"dtype": "uint32", "vocab_size": 50257}')
        ...     data = fs.data.open_data(f"{folder}/a.bin", batch_size=2, seq_len=4)
        >>> data.stream.size, data.vocab_size
        (100, 50257)
    """
    check_local(spec)
    if spec == "default":
        files = python_stdlib_files()
        data = from_files(files, batch_size=batch_size, seq_len=seq_len, seed=seed, documents=documents)
        return dataclasses.replace(data, source="the Python standard library")
    if not spec.endswith(".bin"):
        return from_files(spec, batch_size=batch_size, seq_len=seq_len, seed=seed, documents=documents)
    dtype, vocab_size, separator = _sidecar(Path(f"{spec}.json"))
    if documents and separator is None:
        mend = f'Say the id that ends a document in {spec}.json, such as {{"separator": 0}}.'
        raise DataError(message(f"cannot tell the documents of {spec}.", mend=mend))
    return from_tokens(
        spec, dtype=dtype, vocab_size=vocab_size, batch_size=batch_size, seq_len=seq_len, seed=seed,
        separator=separator if documents else None,
    )  # fmt: skip


def _sidecar(path: Path) -> tuple[str, int | None, int | None]:
    said: Any
    try:
        said = read_json(os.path.realpath(path), most=_SIDECAR)
    except FileNotFoundError:
        return "uint16", None, None
    except (OSError, ValueError) as error:
        said = error
    if isinstance(said, dict):
        table = cast("dict[str, Any]", said)
        dtype = table.get("dtype", "uint16")
        numbers = [table.get(name) for name in ("vocab_size", "separator")]
        least = (1, 0)
        fits = (n is None or (type(n) is int and n >= low) for n, low in zip(numbers, least, strict=True))
        if isinstance(dtype, str) and all(fits):
            return dtype, numbers[0], numbers[1]
    rule = f"cannot use the sidecar file {path}."
    mend = 'It holds one JSON object such as {"dtype": "uint16", "vocab_size": 50257}.'
    raise DataError(message(rule, [f"It reads: {said}"], mend))
