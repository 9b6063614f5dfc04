"""Documents joined end to end and cut into rows: batches of text, with a position that a checkpoint keeps.

In: documents of any lengths, a tokenizer, and the token that ends a document. Out: global batches `{"tokens",
"targets"}`, int64[batch_size, seq_len]; targets are the tokens one place further. With `boundaries` also `documents`.
Row n of an epoch-spanning stream begins at its token n * seq_len, so each token is a target once.
Guarantees: a batch depends on its number alone, so no mesh sees other data than any other; and a position is a place
among the documents, so that to go on from one costs the tokenizing of one document, whatever was before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from fsharding.apps.data.documents import Source, check_column, source_of
from fsharding.apps.data.text_files import StrPath
from fsharding.apps.data.tokenizer import Encoder, open_encoder
from fsharding.base.calls import call_as, named, public_name
from fsharding.base.errors import DataError, message, report
from fsharding.base.local_paths import check_local
from fsharding.base.public import kind_of
from fsharding.train.shard import WHOLE, Shard

__all__ = ["Packed", "packed", "write_tokens"]

_NAME = "fs.data.packed"
_IGNORED = -100
_SMALL = 1 << 16


class _Place(NamedTuple):
    """Where a batch begins.

    Attributes:
        step: its number.
        epoch: passes over all documents before it.
        mark: of the chunk of documents, as the source gives it.
        document: number of the document in that chunk.
        offset: of the batch's first token in that document.
    """

    step: int
    epoch: int
    mark: Any
    document: int
    offset: int


class _Tokenized(NamedTuple):
    """A document that some batch needs: where it is, and its ids with the end's."""

    epoch: int
    mark: Any
    document: int
    ids: npt.NDArray[np.int64]


class _Documents:
    """Documents as ids, read from any place on.

    Args:
        column: of documents that are rows.
    """

    def __init__(self, source: Source, encoder: Encoder, column: str) -> None:
        self.function = public_name()
        self.source = source
        self.encoder = encoder
        self.column = column

    def of_epoch(self, epoch: int, mark: Any, skipped: int) -> Iterator[_Tokenized]:
        """The documents of an epoch from the chunk of a mark on, without the first `skipped` of that chunk."""
        for at, chunk in self.source.chunks(epoch, mark):
            for number, document in enumerate(chunk):
                if number >= skipped and (ids := self.ids(document)).size:
                    yield _Tokenized(epoch, at, number, ids)
            skipped = 0

    def ids(self, document: Any) -> npt.NDArray[np.int64]:
        """The ids of a document; none where it is empty."""
        encoder = self.encoder
        if isinstance(document, Mapping):
            call_as(self.function, check_column, document.keys(), self.column)
            document = document[self.column]
        if isinstance(document, str):
            if encoder.encode is None:
                mend = "Give tokenizer='tokenizer.json', or documents that are lists of ids."
                raise DataError(report(f"{self.function} got text without a tokenizer.", mend=mend))
            document = encoder.encode(document)
        try:
            ids = np.asarray(document)
        except (TypeError, ValueError):
            ids = np.empty((), object)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            mend = f"Give texts, lists of token ids, or rows that have one in the column {self.column!r}."
            raise DataError(report(f"{self.function} got a document that is {kind_of(document)}.", mend=mend))
        if not ids.size:
            return np.empty(0, np.int64)
        ids = ids.astype(np.int64)
        if ids.min() < 0 or (encoder.vocab_size is not None and ids.max() >= encoder.vocab_size):
            bad = ids.min() if ids.min() < 0 else ids.max()
            rule = f"got a document with the id {bad}, outside [0, {encoder.vocab_size})."
            mend = "Give the vocab_size of the model that the tokenizer belongs to."
            raise DataError(report(f"{self.function} {rule}", mend=mend))
        return ids if encoder.eos is None else np.append(ids, encoder.eos)


class Packed(IterableDataset[dict[str, torch.Tensor]]):
    """Batches of packed documents; `packed` makes one.

    `batch(step)` is a pure function, as for every data set here. As an iterator it gives one global batch after the
    other, from the position on that `state_dict` gives and `load_state_dict` takes. The position of the last batch and
    the one after it are known; for a step further on, the documents between are tokenized, and for an earlier one all
    before it.

    Attributes:
        batch_size: rows of the global batch.
        seq_len: tokens of a row.
        vocab_size: every id is below it; None where that is not known.
        eos: the id that ends a document.

    Example:
        >>> data = fs.data.packed([[1, 2, 3], [4, 5]], batch_size=2, seq_len=3, eos=0, seed=None)
        >>> next(data)["tokens"]
        tensor([[1, 2, 3],
                [0, 4, 5]])
        >>> again = fs.data.packed([[1, 2, 3], [4, 5]], batch_size=2, seq_len=3, eos=0, seed=None)
        >>> again.load_state_dict(data.state_dict())
        >>> torch.equal(next(again)["tokens"], data.batch(1)["tokens"])
        True
    """

    # Invariant: `_next` is the place of the batch that the iterator gives next. `_ahead` are the documents from
    # `_from` on that have been tokenized, and `_reading` gives those after them; both are only a cache of what follows
    # from `_from`, which `_forget` empties.

    def __init__(
        self,
        documents: _Documents,
        batch_size: int,
        seq_len: int,
        seed: int | None,
        epochs: int | None,
        boundaries: bool,
    ) -> None:
        self.batch_size = batch_size
        self.seq_len = seq_len
        self._documents = documents
        self._seed = seed
        self._epochs = epochs
        self._boundaries = boundaries
        self._digest: str | None = None
        self._start = self._next = _Place(0, 0, documents.source.first, 0, 0)
        self._places = [self._start]
        self._forget()

    def _forget(self) -> None:
        self._from: _Place | None = None
        self._ahead: list[_Tokenized] = []
        self._reading: Iterator[_Tokenized] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_from", "_ahead", "_reading")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __repr__(self) -> str:
        return f"Packed(batch_size={self.batch_size}, seq_len={self.seq_len}, next=batch {self._next.step})"

    @property
    def global_batch_size(self) -> int:
        """Rows of one step over all data-parallel ranks."""
        return self.batch_size

    @property
    def vocab_size(self) -> int | None:
        """Every id is below it; None where that is not known."""
        return self._documents.encoder.vocab_size

    @property
    def eos(self) -> int | None:
        """The id that ends a document; None where documents are taken as they are."""
        return self._documents.encoder.eos

    @named(_NAME)
    def __iter__(self) -> Self:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            mend = "Give the loader num_workers=1: one worker is enough to tokenize beside the training."
            rule = f"cannot divide its rows among {worker.num_workers} workers of a loader."
            raise DataError(message(rule, mend=mend))
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next global batch.

        Raises:
            StopIteration: all `epochs` are over.
            DataError: as `batch`.
        """
        if (result := self._read(self._next, WHOLE)) is None:
            raise StopIteration
        batch, self._next = result
        return batch

    @named("Packed.batch")
    def batch(self, step: int, shard: Shard = WHOLE) -> dict[str, torch.Tensor]:
        """The rows of `shard` at `step`; the position is then the one after that step.

        Args:
            step: number of the step, from 0.
            shard: which part of the global batch.

        Returns:
            `{"tokens", "targets"}`, each int64[batch_size / shard.count, seq_len], new memory at every call; with
            `boundaries` also `documents`, of the same kind: numbers that ascend within a row, from 0.

        Raises:
            DataError: `step` is negative or after the end, the batch cannot be divided, a document cannot be used, or
                all of them together are shorter than a row.
        """
        if step < 0:
            raise DataError(message(f"got step {step}.", mend="Steps count from 0."))
        shard.rows(self.batch_size)
        place = max((place for place in self._places if place.step <= step), key=lambda place: place.step)
        while (result := self._read(place, shard if place.step == step else None)) is not None:
            batch, after = result
            if place.step == step:
                self._next = after
                return batch
            place = after
        rule = f"has no batch {step}: {self._epochs} epochs end after {place.step} batches."
        raise DataError(message(rule, mend="Give more epochs, or epochs=None to go on for ever."))

    # ------------------------------------------------------------------------------------------------------- position
    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, for a checkpoint: a few numbers, and the state of a stream that has one."""
        return {**self._next._asdict(), "data": self._facts()}

    @named("Packed.load_state_dict")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position of the same data.

        Args:
            state: what `state_dict` gave, of this data set or another one of the same documents and sizes.

        Raises:
            DataError: it is no position, or one of other data; what differs is listed.
        """
        table = dict(state) if isinstance(state, Mapping) else {}
        before = table.pop("data", None)
        place = None
        with suppress(TypeError):  # names that are missing, or others
            place = _Place(**table)
        if not isinstance(before, Mapping) or place is None or not self._is_place(place):
            mend = "Give what state_dict() of such data gave."
            raise DataError(message("got no position of packed documents.", mend=mend))
        now = self._facts()
        if rows := [f"{k}: {before.get(k)} in the position, {v} now" for k, v in now.items() if before.get(k) != v]:
            mend = "Give the documents, tokenizer and sizes that the position is of; or begin the data anew."
            raise DataError(message("got a position in other data.", rows, mend))
        self._next = place
        self._places = [self._start, self._next]
        self._forget()

    def _is_place(self, place: _Place) -> bool:
        """Whether its numbers are such; the mark of a stream with a state of its own is that stream's to look at."""
        numbers = [place.step, place.epoch, place.document, place.offset]
        first = self._documents.source.first
        numbers += [place.mark] if isinstance(first, int) else []
        return all(type(number) is int and number >= 0 for number in numbers)

    def _facts(self) -> dict[str, Any]:
        """Everything that the rows of a position depend on."""
        if self._digest is None:
            self._digest = self._documents.source.digest()
        encoder = self._documents.encoder
        facts = {"documents": self._digest, "tokenizer": encoder.digest, "eos": encoder.eos, "seed": self._seed}
        return facts | {"batch_size": self.batch_size, "seq_len": self.seq_len}

    def fingerprint(self) -> str:
        """16 hex digits over documents (some of them, where they have numbers), tokenizer and sizes."""
        facts = {**self._facts(), "boundaries": self._boundaries}
        return hashlib.sha256(json.dumps(["fsharding-packed-1", facts]).encode()).hexdigest()[:16]

    # ---------------------------------------------------------------------------------------------------------- rows
    def _read(self, place: _Place, shard: Shard | None) -> tuple[dict[str, torch.Tensor], _Place] | None:
        """The rows of a batch, and the place of the next one; None where there are too few tokens up to the end.

        Args:
            place: of the batch.
            shard: which rows; None for none at all.
        """
        if self._from is not place:
            self._forget()
            self._from, self._reading = place, self._from_place(place)
        size = self.batch_size * self.seq_len
        count = sum(len(part.ids) for part in self._ahead) - place.offset
        try:
            while count <= size:
                part = next(self._reading, None)
                if part is None:
                    if place.step == 0:
                        raise self._too_short(count, size + 1, "a batch")
                    self._forget()
                    return None
                self._ahead.append(part)
                count += len(part.ids)
        except BaseException:
            self._forget()
            raise
        # Of a long document only what the batch takes is copied.
        pieces = list[npt.NDArray[np.int64]]()
        at = place.offset
        left = size + 1
        for part in self._ahead:
            pieces.append(part.ids[at : at + left])
            at = 0
            left = left - len(pieces[-1])
        window = np.concatenate(pieces)
        owners = np.repeat(np.arange(len(pieces)), [*map(len, pieces)])
        first = int(owners[size])  # the document of the token that the next batch begins with
        part, offset = self._ahead[first], place.offset + size - sum(len(part.ids) for part in self._ahead[:first])
        after = _Place(place.step + 1, part.epoch, part.mark, part.document, offset)
        self._from, self._ahead = after, self._ahead[first:]
        self._places = [self._start, place, after]
        return ({} if shard is None else self._rows(window, owners, shard)), after

    def _rows(
        self, window: npt.NDArray[np.int64], owners: npt.NDArray[np.int64], shard: Shard
    ) -> dict[str, torch.Tensor]:
        rows = shard.rows(self.batch_size)
        span = slice(rows.start * self.seq_len, rows.stop * self.seq_len)
        after = slice(span.start + 1, span.stop + 1)
        shape = len(rows), self.seq_len
        parts = {"tokens": window[span].reshape(shape), "targets": window[after].reshape(shape)}
        if self._boundaries:
            owner_BT = owners[span].reshape(shape)
            crosses = owners[after].reshape(shape) != owner_BT
            parts["targets"] = np.where(crosses, _IGNORED, parts["targets"])
            parts["documents"] = owner_BT - owner_BT[:, :1]
        return {name: torch.from_numpy(part.astype(np.int64, copy=True)) for name, part in parts.items()}

    def _from_place(self, place: _Place) -> Iterator[_Tokenized]:
        """All documents from a place on, epoch after epoch."""
        epoch = place.epoch
        mark = place.mark
        skipped = place.document
        whole = place is self._start
        while self._epochs is None or epoch < self._epochs:
            count = 0
            for part in self._documents.of_epoch(epoch, mark, skipped):
                count += len(part.ids)
                yield part
            if whole and count <= self.seq_len:
                raise self._too_short(count, self.seq_len + 1, "a row")
            epoch = epoch + 1
            mark = self._documents.source.first
            skipped = 0
            whole = True

    @named(_NAME)
    def _too_short(self, count: int, need: int, unit: str) -> DataError:
        if count == 0:
            mend = "Give documents that have text."
            return DataError(message("got no tokens: every document is empty.", mend=mend))
        rule = f"got {count} tokens in all documents; {unit} takes {need}."
        less = f", or seq_len {count - 1} or less" if unit == "a row" and count > 1 else ""
        mend = (
            f"Give more documents{less}." if unit == "a row" else "Give more documents, more epochs, or smaller sizes."
        )
        return DataError(message(rule, mend=mend))


@named(_NAME)
def packed(
    documents: Any,
    *,
    batch_size: int,
    seq_len: int,
    tokenizer: Any = None,
    eos: int | str | None = None,
    column: str | None = None,
    vocab_size: int | None = None,
    seed: int | None = 0,
    epochs: int | None = None,
    boundaries: bool = False,
) -> Packed:
    """Global batches of documents that are joined end to end and cut into rows of one length.

    Every rank gives the same arguments, and takes its rows out of each batch with `fs.local_batch`: the batches are the
    same for every mesh. Each rank tokenizes all documents; where that takes longer than a step, write the tokens to a
    file first with `write_tokens`, or read ahead in a worker: `StatefulDataLoader(data, batch_size=None,
    num_workers=1)`.

    Args:
        documents: texts, lists of token ids, or rows that have one in `column`: in a list or a data set that is asked
            by number, such as `datasets.Dataset`; or in an iterable that begins anew with each `iter`, such as
            `datasets.IterableDataset`. The position of an iterable is its own `state_dict` where it has one; otherwise
            the documents before are passed over, without being tokenized.
        batch_size: rows of the global batch.
        seq_len: tokens of a row.
        tokenizer: a tokenizer.json or a directory that has one, a tokenizer of `tokenizers` or `transformers`, or a
            function from text to ids. Left out where documents are ids.
        eos: the token that ends a document, by its text or its id. Left out, the tokenizer's own; for documents of ids
            and functions none is added.
        column: of rows; by default "text" with a tokenizer and "input_ids" without.
        vocab_size: the model's, which a tokenizer must not exceed; by default the tokenizer's.
        seed: of the order of documents that are asked by number, another one in each epoch; None keeps their order.
        epochs: passes over the documents; None to go on for ever. What is left of the last batch is dropped.
        boundaries: batches say which tokens are of one document, as `documents`: attention of `fs.models`, and
            `fs.ops.attention`, then stays inside a document, positions begin at 0 in each, and a token whose target is
            in another document has the target -100, which does not count.

    Returns:
        An iterator of batches with `state_dict` and `load_state_dict`, which is a data set with `batch(step, shard)`
        too. `fs.checkpoint.Checkpointer(directory, data=...)` keeps its position.

    Raises:
        DataError: sizes below 1; documents that are empty, cannot be read again or lack the column; a tokenizer that
            cannot be read, is larger than `vocab_size`, or does not say what ends a document.
        ConfigError: a package is needed that is not installed.

    Example:
        >>> documents = ["to be", "or not", "to be"]
        >>> data = fs.data.packed(documents, batch_size=2, seq_len=4, tokenizer=lambda text: list(text.encode()), eos=0)
        >>> batch = next(data)  # of all ranks; fs.local_batch(batch, mesh) is this rank's part
        >>> {name: x.shape for name, x in batch.items()}, data.state_dict()["step"]
        ({'tokens': torch.Size([2, 4]), 'targets': torch.Size([2, 4])}, 1)
    """
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "epochs": epochs, "vocab_size": vocab_size}
    rows = [f"{name} is {size}: not positive." for name, size in sizes.items() if size is not None and size < 1]
    if seed is not None and not 0 <= seed < 2**128:
        rows.append(f"seed is {seed}: not in [0, 2**128).")
    if rows:
        mend = "Give positive sizes and a seed >= 0."
        raise DataError(message("got arguments out of range.", rows, mend))
    reader = _open(documents, tokenizer, eos, column, vocab_size, seed)
    return Packed(reader, batch_size, seq_len, seed, epochs, boundaries)


@named("fs.data.write_tokens")
def write_tokens(
    path: StrPath,
    documents: Any,
    *,
    tokenizer: Any = None,
    eos: int | str | None = None,
    column: str | None = None,
    vocab_size: int | None = None,
) -> int:
    """Tokenizes all documents into a file that `from_tokens` and `open_data` map into memory: once, before training.

    Call it in one process. Beside the file goes `PATH.json`, with dtype, vocabulary and the id that ends a document.

    Args:
        path: of the file; it ends with .bin.
        documents: as in `packed`, and so are the next ones.
        tokenizer: as there.
        eos: as there.
        column: as there.
        vocab_size: as there; needed where the tokenizer does not say it.

    Returns:
        How many tokens there are.

    Raises:
        DataError: as `packed`; a path that cannot be written or does not end with .bin; no vocabulary size.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     fs.data.write_tokens(f"{folder}/train.bin", [[1, 2, 3], [4, 5]], eos=0, vocab_size=8)
        ...     data = fs.data.open_data(f"{folder}/train.bin", batch_size=2, seq_len=4, documents=True)
        7
        >>> data.stream.tolist(), data.begins.tolist()
        ([1, 2, 3, 0, 4, 5, 0], [0, 4, 7])
    """
    check_local(path)
    path = Path(path)
    if path.suffix != ".bin":
        mend = f"Give {path.with_suffix('.bin').name!r}."
        raise DataError(message(f"cannot name a file of tokens {path.name!r}.", mend=mend))
    reader = _open(documents, tokenizer, eos, column, vocab_size, None)
    size = reader.encoder.vocab_size
    if size is None:
        raise DataError(message("does not know how large ids are.", mend="Give the vocab_size of the model."))
    dtype = "uint16" if size <= _SMALL else "uint32"
    part = path.with_name(f".{path.name}.partial")
    count = 0
    try:
        with part.open("wb") as file:
            for document in reader.of_epoch(0, reader.source.first, 0):
                file.write(document.ids.astype("<u2" if dtype == "uint16" else "<u4").tobytes())
                count += len(document.ids)
        if not count:
            mend = "Give documents that have text."
            raise DataError(message("got no tokens: every document is empty.", mend=mend))
        notes = {"dtype": dtype, "vocab_size": size}
        notes |= {"separator": reader.encoder.eos} if reader.encoder.eos is not None else {}
        path.with_name(f"{path.name}.json").write_text(json.dumps(notes) + "\n")
        part.replace(path)
    except OSError as error:
        mend = "Give a path in a directory that can be written."
        raise DataError(message(f"cannot write {path}: {error.strerror}.", mend=mend)) from error
    finally:
        part.unlink(missing_ok=True)
    return count


def _open(
    documents: Any,
    tokenizer: Any,
    eos: int | str | None,
    column: str | None,
    vocab_size: int | None,
    seed: int | None,
) -> _Documents:
    column = column or ("input_ids" if tokenizer is None else "text")
    source = source_of(documents, column, seed)
    return _Documents(source, open_encoder(tokenizer, eos, vocab_size), column)
