"""Token data whose batches depend only on their number: rows at random places of a stream, and packed documents."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from fsharding.base.errors import DataError, message, report
from fsharding.base.local_paths import check_local
from fsharding.base.public import kind_of, public
from fsharding.base.untrusted import open_plain, read_json, read_plain
from fsharding.train.shard import WHOLE, Data, Shard

__all__ = ["packed", "Data", "Packed", "Shard", "Tokens", "open_data"]

Stream: TypeAlias = npt.NDArray[np.integer[Any]]
Ids: TypeAlias = npt.NDArray[np.int64]

_ITEM = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
_PIECE = 1 << 22
_SAMPLES, _SAMPLE = 64, 4096
_MACHINES_OWN = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")
_NO_TRAINING_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_CHUNK = _SAMPLED = 16


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """Rows of `seq_len` tokens at random places of a flat stream; stateless, without epochs.

    Row `r` of step `s` is row `n = s * batch_size + r` of the run. It starts at word 0 of block n of the counter-based
    generator Philox4x64-10 with key `seed`, modulo the number of possible starts (Salmon et al., SC11).

    Attributes:
        stream: Token ids, integer[N] with N > seq_len; of a memory map only the requested rows are read.
        batch_size, global_batch_size: Rows of the global batch.
        seq_len: Tokens in a row.
        seed: Key of the generator, in [0, 2**128).
        vocab_size: Upper bound of the ids, checked for each batch.
        source: Name of the stream in messages.
        begins: First positions of the documents in the stream (int64, ascending), or None. With them, batches have
            `documents`, and a target in the next document is -100, which no loss counts.

    Raises:
        DataError: a size or the seed is out of range, or the stream isn't 1-d with at least `seq_len + 1` integers.

    Example:
        >>> data = fs.data.Tokens(stream=torch.arange(100).numpy(), batch_size=4, seq_len=8)
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
    begins: Ids | None = dataclasses.field(default=None, repr=False)

    @public
    def __post_init__(self) -> None:
        _check_sizes(self.seed, batch_size=self.batch_size, seq_len=self.seq_len, vocab_size=self.vocab_size)
        if self.stream.dtype.kind not in "iu" or self.stream.ndim != 1:
            rule = f"cannot read a stream of {self.stream.dtype} with {self.stream.ndim} dimensions from {self.source}."
            raise DataError(message(rule, mend="Give a flat array of integer token ids."))
        if (size := self.stream.size) <= self.seq_len:
            mend = "Give more data" + (f", or seq_len {size - 1} or less." if size > 1 else ".")
            rule = f"cannot take a row of {self.seq_len + 1} tokens from the {size} of {self.source}."
            raise DataError(message(rule, mend=mend))

    @property
    def global_batch_size(self) -> int:
        """Rows of one step on all data ranks."""
        return self.batch_size

    def starts(self, first: int, count: int) -> Ids:
        """Return the positions in the stream at which rows [first, first + count) of the run begin: int64[count]."""
        words = np.random.Philox(key=self.seed, counter=first).random_raw(4 * count)[::4]
        return (words % np.uint64(self.stream.size - self.seq_len)).astype(np.int64)

    @public
    def batch(self, step: int, shard: Shard = WHOLE) -> dict[str, torch.Tensor]:
        """Read the rows of `shard` at `step`, which counts from 0.

        Returns:
            `{"tokens", "targets"}`, each int64[batch_size / shard.count, seq_len] in new memory; with `begins` also
            `documents`, of the same shape and dtype, ascending within a row.

        Raises:
            DataError: `step` is negative, the batch cannot be divided, or an id is not in [0, vocab_size).
        """
        if step < 0:
            raise DataError(message(f"got step {step}.", mend="Steps count from 0."))
        rows = shard.rows(self.batch_size)
        starts = self.starts(step * self.batch_size + rows.start, len(rows))
        places_BT = starts[:, None] + np.arange(self.seq_len + 1)
        window_BT = self.stream[places_BT].astype(np.int64)
        if (bad := (window_BT < 0) | (window_BT >= self.vocab_size)).any():
            wrong = window_BT[bad][0]
            mend = "Give the vocab_size of the tokenizer that wrote the data."
            rule = f"read the id {wrong} at {places_BT[bad][0]} of {self.source}, outside [0, {self.vocab_size})."
            raise DataError(message(rule, mend=mend))
        return _split(window_BT, None if self.begins is None else np.searchsorted(self.begins, places_BT, "right"))

    def fingerprint(self) -> str:
        """Return 16 hex digits: a hash of sizes, dtype, seed, documents and the stream, or samples of a long stream."""
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


def _split(ids_BT: Ids, document_BT: Ids | None = None) -> dict[str, torch.Tensor]:
    """Split rows of `seq_len + 1` ids into tokens and targets; a target in the next document is -100."""
    parts = {"tokens": ids_BT[:, :-1], "targets": ids_BT[:, 1:]}
    if document_BT is not None:
        parts["documents"] = document_BT[:, :-1]
        parts["targets"] = np.where(document_BT[:, 1:] == document_BT[:, :-1], parts["targets"], -100)
    return {name: torch.from_numpy(part.astype(np.int64)) for name, part in parts.items()}


def _check_sizes(seed: int | None, **sizes: int | None) -> None:
    rows = [f"{name} is {size}: not positive." for name, size in sizes.items() if size is not None and size < 1]
    if seed is not None and not 0 <= seed < 2**128:
        rows.append(f"seed is {seed}: not in [0, 2**128).")
    if rows:
        raise DataError(message("got arguments out of range.", rows, "Give positive sizes and a seed >= 0."))


@public
def open_data(spec: str, *, batch_size: int, seq_len: int, seed: int = 0, documents: bool = False) -> Tokens:
    """Open bytes or token ids as `fsharding train --data` does.

    Args:
        spec: "default" (source of the Python standard library), or a path. A `*.bin` file has little-endian token ids
            and is memory-mapped; `PATH.json` may set its dtype ("uint8", "uint16", "uint32"), vocabulary and
            end-of-document id, as `{"dtype": "uint16", "vocab_size": N, "separator": 0}`. Any other file, or all files
            of a directory that aren't hidden, sorted by relative path, are read as bytes.
        batch_size: Rows of the global batch.
        seq_len: Tokens in a row.
        seed: Key of the generator that places the rows.
        documents: Whether batches have `documents`: a file, or the tokens up to a separator, is one.

    Returns:
        The `Tokens`.

    Raises:
        DataError: no file is found, one can't be read, they are too short, or the sidecar file is malformed.

    Example:
        >>> data = fs.data.open_data("default", batch_size=2, seq_len=4)
        >>> data.batch(0)["tokens"].shape, data.vocab_size
        (torch.Size([2, 4]), 256)
    """
    check_local(spec)
    path = Path(spec)
    source = "the Python standard library" if spec == "default" else str(path)
    if spec.endswith(".bin"):
        stream, vocab_size, begins = _read_ids(path, documents)
    else:
        stream, vocab_size, begins = _read_bytes(stdlib_files() if spec == "default" else files_below(path))
    return Tokens(
        stream=stream, batch_size=batch_size, seq_len=seq_len, seed=seed, vocab_size=vocab_size, source=source,
        begins=begins if documents else None,
    )  # fmt: skip


def _read_ids(path: Path, documents: bool) -> tuple[Stream, int, Ids]:
    """Memory-map a file of ids; also return the size of its vocabulary and the starts of documents."""
    said: Any = {}
    try:
        said = read_json(os.path.realpath(f"{path}.json"), most=1 << 20)
    except (OSError, ValueError) as error:
        said = {} if isinstance(error, FileNotFoundError) else error
    table: dict[str, Any] = said if isinstance(said, dict) else {"dtype": None}
    dtype, vocab_size, separator = table.get("dtype", "uint16"), table.get("vocab_size"), table.get("separator")
    numbers = [n for n in (vocab_size, separator) if n is not None]
    if dtype not in [*_ITEM] or vocab_size == 0 or not all(type(n) is int and n >= 0 for n in numbers):
        mend = 'It holds one JSON object such as {"dtype": "uint16", "vocab_size": 50257}, or uint8, or uint32.'
        raise DataError(message(f"cannot use the sidecar file {path}.json.", [f"It reads: {said}"], mend))
    if documents and separator is None:
        mend = f'Write the id that ends a document to {path}.json, such as {{"separator": 0}}.'
        raise DataError(message(f"cannot tell the documents of {path}.", mend=mend))
    item = np.dtype(_ITEM[dtype])
    try:
        with open_plain(os.path.realpath(path)) as file:
            count, rest = divmod(os.fstat(file.fileno()).st_size, item.itemsize)
            if rest:
                raise ValueError(f"its size isn't a multiple of the {item.itemsize} bytes of {dtype}")
            stream = cast("Stream", np.memmap(file, item, "r", shape=(count,)) if count else np.empty(0, item))
    except (OSError, ValueError) as error:
        rule = f"cannot open {path}: {getattr(error, 'strerror', None) or error}."
        mend = f"Give the path of a file of token ids, with another dtype than uint16 in {path}.json."
        raise DataError(message(rule, mend=mend)) from error
    # In chunks: the full file need not fit in memory.
    pieces = [(at, stream[at : at + _PIECE]) for at in range(0, stream.size, _PIECE)]
    if vocab_size is None:
        vocab_size = 1 + max((int(piece.max()) for _, piece in pieces), default=0)
    ends = [at + 1 + np.flatnonzero(piece == separator) for at, piece in pieces] if documents else []
    return stream, vocab_size, np.concatenate([np.zeros(1, np.int64), *ends])


def _read_bytes(files: list[Path]) -> tuple[Stream, int, Ids]:
    """Join the bytes of distinct files; also return the starts of those that aren't empty."""
    buffer = bytearray()
    begins: list[int] = []
    for real, file in {file.resolve(): file for file in files}.items():
        try:
            content = read_plain(real, 1 << 40)
        except (OSError, ValueError) as error:
            rule = f"cannot read {file}: {getattr(error, 'strerror', None) or error}."
            raise DataError(message(rule, mend="Correct or remove it.")) from error
        begins += [len(buffer)] if content else []
        buffer += content
    stream = np.frombuffer(buffer, np.uint8)
    stream.flags.writeable = False
    return stream, 256, np.array(begins, np.int64)


def files_below(root: Path, skip: Set[str] = frozenset()) -> list[Path]:
    """List a file, or those of a directory without hidden ones and folders to skip, by their relative paths."""
    failed: list[OSError] = []
    files = [] if root.is_dir() else [root]
    for folder, folders, names in os.walk(root, onerror=failed.append) if root.is_dir() else ():
        folders[:] = [name for name in folders if name[0] != "." and name not in skip]
        files += [path for name in names if name[0] != "." and (path := Path(folder, name)).is_file()]
    if failed:
        rule = f"cannot list {failed[0].filename}: {failed[0].strerror}."
        raise DataError(message(rule, mend="Make it readable."))
    if not files:
        raise DataError(message(f"found no files in {root}.", mend="Name files, or a directory that has some."))
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def stdlib_files(max_bytes: int = 1 << 24) -> list[Path]:
    """List `.py` files of this Python's standard library, without those that differ between machines of one version."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for file in files_below(root, _NO_TRAINING_TEXT):
        if file.suffix == ".py" and not any(part.startswith(_MACHINES_OWN) for part in file.relative_to(root).parts):
            max_bytes -= file.stat().st_size
            if max_bytes < 0:
                break
            files.append(file)
    return files


class _Place(NamedTuple):
    """The first token of a batch."""

    step: int
    epoch: int
    mark: int  # where a chunk of documents begins in the order of the epoch
    document: int  # its number in that chunk
    offset: int  # of the batch's first token in that document


_Part: TypeAlias = tuple[tuple[int, int, int], Ids]  # (epoch, mark, document) of a place, and its ids with `eos`


@dataclasses.dataclass(eq=False)
class Packed(IterableDataset[dict[str, torch.Tensor]]):
    """Global batches of documents, concatenated and split into rows of equal length.

    Pass the same arguments on every rank, and take a rank's rows of each batch with `fs.local_batch`. Iteration starts
    at the position, which `fs.checkpoint.Checkpointer(directory, data=...)` saves and restores. Each rank tokenizes all
    documents; `StatefulDataLoader(data, batch_size=None, num_workers=1)` reads ahead.

    Attributes:
        documents: Texts, lists of token ids, or rows with one column of either, in a list or a data set indexed by
            number, such as `datasets.Dataset`.
        batch_size, global_batch_size: Rows of the global batch.
        seq_len: Tokens in a row.
        tokenizer: Function from text to ids. Positions record its attribute `digest`, by default its name.
        eos: Id appended to each document. Default: none.
        vocab_size: Upper bound of the ids: the vocabulary of the model.
        seed: Key of the order of documents, which differs in each epoch; None keeps their order.
        boundaries: Whether batches have `documents`, to which the attention of `fs.models` is then confined; a target
            in the next document is -100, which no loss counts.

    Raises:
        DataError: a size is below 1, there are no documents, or they aren't indexed by number, or the tokenizer isn't
            a function.

    Example:
        >>> data = fs.data.packed([[1, 2, 3], [4, 5]], batch_size=2, seq_len=4, eos=0)
        >>> batch = next(data)  # of all ranks; fs.local_batch(batch, mesh) is this rank's part
        >>> {name: x.shape for name, x in batch.items()}, data.state_dict()["step"]
        ({'tokens': torch.Size([2, 4]), 'targets': torch.Size([2, 4])}, 1)
    """

    documents: Any = dataclasses.field(repr=False)
    _: dataclasses.KW_ONLY
    batch_size: int
    seq_len: int
    tokenizer: Callable[[str], Sequence[int]] | None = None
    eos: int | None = None
    vocab_size: int | None = None
    seed: int | None = 0
    boundaries: bool = False

    @public
    def __post_init__(self) -> None:
        _check_sizes(self.seed, batch_size=self.batch_size, seq_len=self.seq_len, vocab_size=self.vocab_size)
        if isinstance(self.documents, str | bytes | Mapping) or not hasattr(self.documents, "__getitem__"):
            names = f" of {', '.join(map(str, self.documents))}" if isinstance(self.documents, Mapping) else ""
            mend = "Give a list of texts or of ids, or a data set indexed by number, such as documents['train']."
            raise DataError(message(f"takes documents, got {kind_of(self.documents)}{names}.", mend=mend))
        if not len(self.documents):
            raise DataError(message("got no documents: the data set is empty.", mend="Give one with rows."))
        if self.tokenizer is not None and not callable(self.tokenizer):
            mend = "Give a function: lambda text: tokenizer.encode(text, add_special_tokens=False).ids."
            raise DataError(message(f"takes a tokenizer from text to ids, got {kind_of(self.tokenizer)}.", mend=mend))
        if self.eos is not None and (type(self.eos) is not int or self.eos not in range(self.vocab_size or 2**63)):
            raise DataError(message(f"got eos {self.eos!r} for vocab_size {self.vocab_size}.", mend="Give an id."))
        self.global_batch_size = self.batch_size
        self._start = self._next = _Place(0, 0, 0, 0, 0)
        self._places = [self._start]  # of batches; `_next` is that of the batch that the iterator gives next
        self._reading: dict[_Place, Iterator[tuple[Ids, Ids, _Place]]] = {}  # gives the batches from one place on

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reading": {}}

    @public
    def __iter__(self) -> Self:
        if (worker := get_worker_info()) is not None and worker.num_workers > 1:
            rule = f"cannot divide its rows among {worker.num_workers} workers of a loader."
            raise DataError(message(rule, mend="Pass num_workers=1, which tokenizes while the model trains."))
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        return self.batch(self._next.step)

    @public
    def batch(self, step: int, shard: Shard = WHOLE) -> dict[str, torch.Tensor]:
        """Return the rows of `shard` at `step`, as `Tokens.batch` does, and move the position to the next step.

        Raises:
            DataError: as in `Tokens.batch`; or a document is invalid, or all documents are shorter than a row.
        """
        if step < 0:
            raise DataError(message(f"got step {step}.", mend="Steps count from 0."))
        rows = shard.rows(self.batch_size)  # raises before anything is read
        place = max((place for place in self._places if place.step <= step), key=lambda place: place.step)
        while place.step < step:
            *_, place = self._read(place)
        window, owners, self._next = self._read(place)
        at_BT = np.arange(rows.start, rows.stop)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        owner_BT = owners[at_BT]
        return _split(window[at_BT], owner_BT - owner_BT[:, :1] if self.boundaries else None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, for a checkpoint: a few numbers, and a hash of their data."""
        return {**self._next._asdict(), "data": {**self._facts}}

    @public
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned for the same documents, tokenizer and sizes.

        Raises:
            DataError: the position is malformed, or belongs to different data; the differences are listed.
        """
        table = {} if not isinstance(state, Mapping) else {**state}
        before = table.pop("data", None)
        numbers = all(type(n) is int and n >= 0 for n in table.values())
        if not isinstance(before, Mapping) or {*table} != {*_Place._fields} or not numbers:
            mend = "Pass the result of state_dict()."
            raise DataError(message("got no position of packed documents.", mend=mend))
        facts = self._facts.items()
        if rows := [f"{k}: {before.get(k)} in the position, {v} now" for k, v in facts if before.get(k) != v]:
            mend = "Pass the documents, tokenizer and sizes of the position, or start the data again."
            raise DataError(message("got a position in other data.", rows, mend))
        self._next = _Place(**table)
        self._places = [self._start, self._next]

    @functools.cached_property
    def _facts(self) -> dict[str, Any]:
        """Everything that determines the rows at a position, with samples of the documents."""
        count = len(self.documents)
        rows = self._get(sorted({i * (count - 1) // (_SAMPLED - 1) for i in range(_SAMPLED)}))
        digest = hashlib.sha256(json.dumps(rows, sort_keys=True, default=repr).encode()).hexdigest()[:16]
        fn = self.tokenizer
        name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', kind_of(fn))}"
        return {
            "documents": f"{count} documents, {digest}",
            "tokenizer": "ids" if fn is None else getattr(fn, "digest", name),
            **{field: getattr(self, field) for field in ("eos", "seed", "batch_size", "seq_len")},
        }

    def fingerprint(self) -> str:
        """Return 16 hex digits: a hash of samples of the documents, the tokenizer and the sizes."""
        facts = {**self._facts, "boundaries": self.boundaries}
        return hashlib.sha256(json.dumps(["fsharding-packed-1", facts]).encode()).hexdigest()[:16]

    def _read(self, place: _Place) -> tuple[Ids, Ids, _Place]:
        """Return the ids of the batch at a place, the document of each id, and the place of the next batch."""
        reading = self._reading.pop(place, None) or self._batches(place)  # a generator that raised is finished
        window, owners, after = next(reading)
        self._reading = {after: reading}
        self._places = [self._start, place, after]
        return window, owners, after

    def _batches(self, place: _Place) -> Iterator[tuple[Ids, Ids, _Place]]:
        """Yield the ids of each batch from a place on, the document of each id, and the place of the next batch."""
        size = self.batch_size * self.seq_len
        reading = self._from_place(place)
        ahead: list[_Part] = []
        step, offset, count = place.step, place.offset, -place.offset
        while True:
            while count <= size:
                ahead.append(next(reading))
                count += len(ahead[-1][1])
            pieces: list[Ids] = []
            left = size + 1
            for _, ids in ahead:
                start = 0 if pieces else offset
                pieces.append(ids[start : start + left])  # copies only the part of a long document in this batch
                left -= len(pieces[-1])
            owners = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
            first = int(owners[size])  # the document of the token that the next batch begins with
            step, offset, count = step + 1, offset + size - sum(len(ids) for _, ids in ahead[:first]), count - size
            ahead = ahead[first:]
            yield np.concatenate(pieces), owners, _Place(step, *ahead[0][0], offset)

    def _from_place(self, place: _Place) -> Iterator[_Part]:
        """Yield all documents that are not empty from a place on, epoch after epoch."""
        epoch, mark, skipped = place.epoch, place.mark, place.document
        while True:
            count = 0
            order = np.arange(len(self.documents))
            if self.seed is not None:
                # Raw words, since numpy does not promise that its shuffles stay the same from version to version.
                words = np.random.Philox(key=self.seed, counter=epoch << 128).random_raw(len(order))
                order = np.argsort(words, kind="stable")
            for at in range(mark, len(order), _CHUNK):
                for number, document in enumerate(self._get(order[at : at + _CHUNK].tolist())):
                    if (number >= skipped or at > mark) and (ids := self._ids(document)).size:
                        count += len(ids)
                        yield (epoch, at, number), ids
            if count <= self.seq_len and (mark, skipped) == (0, 0):
                less = f", or seq_len {count - 1} or less" if count > 1 else ""
                rule = f"fs.data.packed got {count} tokens in all documents; a row takes {self.seq_len + 1}."
                raise DataError(report(rule, mend=f"Give more documents{less}."))
            epoch, mark, skipped = epoch + 1, 0, 0

    def _get(self, numbers: list[int]) -> list[Any]:
        many = getattr(self.documents, "__getitems__", None)
        return [*many(numbers)] if many is not None else [self.documents[number] for number in numbers]

    def _ids(self, document: Any) -> Ids:
        """Return the ids of a document with `eos`; an empty document has none."""
        if isinstance(document, Mapping) and len(document) == 1:
            (document,) = document.values()
        if isinstance(document, str) and self.tokenizer is not None:
            document = self.tokenizer(document)
        try:
            ids = np.asarray(document)
        except (TypeError, ValueError):
            ids = np.empty((), object)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            how = "with" if self.tokenizer else "without"
            rule = f"fs.data.packed got {kind_of(document)} as a document, {how} a tokenizer."
            mend = "Give texts and tokenizer=, or lists of ids; of rows one column, documents.select_columns(['text'])."
            raise DataError(report(rule, mend=mend))
        for bad in (int(ids.min()), int(ids.max())) if ids.size else ():
            if bad < 0 or (self.vocab_size is not None and bad >= self.vocab_size):
                mend = "Give the vocab_size of the model that the tokenizer belongs to."
                rule = f"fs.data.packed got a document with the id {bad}, outside [0, {self.vocab_size})."
                raise DataError(report(rule, mend=mend))
        ids = ids.astype(np.int64)
        return ids if self.eos is None or not ids.size else np.append(ids, self.eos)


packed = Packed  # the name that users call
