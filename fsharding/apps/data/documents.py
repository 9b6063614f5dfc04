"""Documents: what a path has of them, and how they are read from any place on.

In: a path of files or of a saved data set; or a list, a data set of Hugging Face, an iterable. Out: documents in an
order that depends on (seed, epoch) alone, in chunks, each with a mark from which it can be read again.
Guarantee: reading from a mark on gives what reading from the start gives from there on; only streams without
`state_dict` pass over what was before, and none of it is tokenized.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fsharding.apps.data.text_files import StrPath, files_below, python_stdlib_files
from fsharding.apps.data.tokenizer import require_text_extra
from fsharding.base.calls import named
from fsharding.base.errors import DataError, message
from fsharding.base.local_paths import check_local
from fsharding.base.public import kind_of

__all__ = ["Source", "check_column", "is_table", "open_documents", "sample", "source_of"]

_CHUNK = 16
_SAMPLES = 16

_TABLES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Files of many documents by their ending, and which reader of `datasets` takes them."""


class Source(Protocol):
    """Documents that can be read from any chunk on.

    Attributes:
        first: the mark of the first chunk of an epoch.
    """

    first: Any

    def chunks(self, epoch: int, mark: Any) -> Iterator[tuple[Any, list[Any]]]:
        """The chunks of an epoch from a mark on, each with its own mark."""
        ...

    def digest(self) -> str:
        """A short text that differs where documents or their order differ, as far as samples show it."""
        ...


@named("fs.data.open_documents")
def open_documents(path: StrPath, *, split: str = "train", streaming: bool = False) -> Any:
    """The documents of a file or directory, as a data set of Hugging Face or a list of texts.

    Args:
        path: a directory that `datasets` has saved; a .json, .jsonl, .parquet or .csv file, or a directory of files of
            one of these kinds; any other file or directory, of which each file is one document. "default" is the
            source of Python's standard library.
        split: of a saved `DatasetDict`.
        streaming: read the rows of files one after the other, instead of making a table of them first.

    Returns:
        What `packed` takes.

    Raises:
        DataError: nothing is there, files of several kinds, files that cannot be read, an unknown split.
        ConfigError: the package `datasets` is not installed.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     for name, text in (("a", "to be"), ("b", "or not")):
        ...         _ = Path(folder, f"{name}.txt").write_text(text)
        ...     fs.data.open_documents(folder)
        ['to be', 'or not']
    """
    check_local(path)
    if path == "default":
        return _texts(python_stdlib_files())
    path = Path(path)
    if not path.exists():
        mend = "Give a file or a directory that is on this machine; fsharding downloads nothing."
        raise DataError(message(f"cannot read {path}: it is not there.", mend=mend))
    if _is_saved(path):
        return _saved(path, split)
    files = files_below(path) if path.is_dir() else [path]
    kinds = sorted({file.suffix for file in files})
    if not any(kind in _TABLES for kind in kinds):
        return _texts(files)
    if len(kinds) > 1:
        mend = f"Give a directory of one kind, or one file, such as {files[0]}."
        raise DataError(message(f"finds files of {len(kinds)} kinds in {path}: {', '.join(kinds)}.", mend=mend))
    require_text_extra("datasets")
    import datasets  # lazy: an extra, and slow to load

    try:
        return datasets.load_dataset(
            _TABLES[kinds[0]], data_files=[str(file) for file in files], split="train", streaming=streaming
        )
    except Exception as error:  # what is wrong with a row of a file comes as many kinds of errors
        cause = error.__cause__ or error
        rule = f"cannot read {path}: {cause}"
        raise DataError(message(rule, mend="Give files with one row a document, all of the same columns.")) from error


def is_table(path: Path) -> bool:
    """Whether a path is a data set whose bytes are no text."""
    return path.suffix in (".parquet", ".arrow") or _is_saved(path)


def _is_saved(path: Path) -> bool:
    """Whether a directory is one that `datasets` has saved."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json", "dataset_info.json"))


def _saved(path: Path, split: str) -> Any:
    require_text_extra("datasets")
    import datasets  # lazy: an extra, and slow to load

    try:
        result = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        mend = "Give a directory that save_to_disk has written."
        raise DataError(message(f"cannot read {path}: {error}.", mend=mend)) from error
    if not isinstance(result, Mapping):
        return result
    if split not in result:
        mend = f"Give split={min(map(str, result), default='')!r}."
        raise DataError(message(f"finds no split {split!r} in {path}.", sorted(map(str, result)), mend))
    return result[split]


def _texts(files: list[Path]) -> list[str]:
    rows: list[str] = []
    texts: list[str] = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except OSError as error:
            rows.append(f"{file}: {error.strerror}")
        except UnicodeDecodeError as error:
            rows.append(f"{file}: no text in UTF-8, at byte {error.start}")
    if rows:
        raise DataError(message(f"cannot read {len(rows)} files.", rows, "Correct or remove them."))
    return texts


# ------------------------------------------------------------------------------------------------------------- sources
def source_of(documents: Any, column: str, seed: int | None) -> Source:
    """How documents are read.

    Args:
        documents: as a user gave them.
        column: of documents that are rows.
        seed: of the order, where there may be one; None to keep it.

    Raises:
        DataError: what cannot be read again, or nothing at all; a column that is missing.
    """
    if isinstance(documents, str | bytes | os.PathLike):
        mend = "Open it: fs.data.open_documents(path); or give a list of texts."
        raise DataError(message(f"takes documents, got {kind_of(documents)}.", mend=mend))
    if isinstance(documents, Mapping):
        keys = [str(key) for key in documents]
        mend = f"Choose one of its splits: documents[{keys[0]!r}]." if keys else "Give a list of texts."
        raise DataError(message(f"takes documents, got {kind_of(documents)} of {', '.join(keys)}.", mend=mend))
    columns = getattr(documents, "column_names", None)
    if columns is not None:
        check_column(columns, column)
        documents = documents.select_columns([column])
    if hasattr(documents, "__len__") and hasattr(documents, "__getitem__"):
        if not len(documents):
            raise DataError(message("got no documents: the data set is empty.", mend="Give one with rows."))
        return _Indexed(documents, seed)
    if not hasattr(documents, "__iter__"):
        mend = "Give a list of texts, a data set, or an object whose __iter__ begins anew."
        raise DataError(message(f"takes documents, got {kind_of(documents)}.", mend=mend))
    stream = _Stream(documents)
    if not stream.stateful and iter(documents) is documents:
        mend = "Give a list, or an object whose __iter__ begins anew, with state_dict and load_state_dict if it can."
        rule = f"cannot begin {kind_of(documents)} again: it can be read once."
        raise DataError(message(rule, mend=mend))
    return stream


def check_column(columns: Any, column: str) -> None:
    """Refuses rows without the column that is asked for.

    Raises:
        DataError: it is missing; those that are there are listed.
    """
    if column not in columns:
        names = [str(name) for name in columns]
        mend = f"Give one of {', '.join(map(repr, names))}." if names else "Give rows that have columns."
        raise DataError(message(f"finds no column {column!r} in the documents.", mend=mend))


class _Indexed:
    """Documents that are asked for by number. A mark is a place in the order of the epoch."""

    first = 0

    def __init__(self, documents: Any, seed: int | None) -> None:
        self._documents = documents
        self._seed = seed
        self._ordered: tuple[int, npt.NDArray[np.int64]] | None = None

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        count = len(self._documents)
        if self._seed is None:
            return np.arange(count)
        if self._ordered is None or self._ordered[0] != epoch:
            # Raw words, since numpy does not promise that its shuffles stay the same from version to version.
            words = np.random.Philox(key=self._seed, counter=epoch << 128).random_raw(count)
            self._ordered = epoch, np.argsort(words, kind="stable")
        return self._ordered[1]

    def chunks(self, epoch: int, mark: Any) -> Iterator[tuple[Any, list[Any]]]:
        order = self._order(epoch)
        for at in range(mark, len(order), _CHUNK):
            yield at, self._rows(order[at : at + _CHUNK].tolist())

    def _rows(self, numbers: list[int]) -> list[Any]:
        if hasattr(self._documents, "__getitems__"):
            return list(self._documents.__getitems__(numbers))
        return [self._documents[number] for number in numbers]

    def digest(self) -> str:
        count = len(self._documents)
        numbers = sorted({i * (count - 1) // max(1, _SAMPLES - 1) for i in range(_SAMPLES)})
        return f"{count} documents, {sample(self._rows(numbers))}"


class _Stream:
    """Documents that are read one after the other.

    A mark is the stream's own state where it has one, else how many documents are before it.
    """

    def __init__(self, documents: Any) -> None:
        self._documents = documents
        self.stateful = hasattr(documents, "state_dict") and hasattr(documents, "load_state_dict")
        self.first: Any = copy.deepcopy(documents.state_dict()) if self.stateful else 0

    def chunks(self, epoch: int, mark: Any) -> Iterator[tuple[Any, list[Any]]]:
        if hasattr(self._documents, "set_epoch"):
            self._documents.set_epoch(epoch)
        if self.stateful:
            self._documents.load_state_dict(copy.deepcopy(mark))
        documents = iter(self._documents)
        if not self.stateful:
            next(islice(documents, mark, mark), None)
        while chunk := [*islice(documents, _CHUNK)]:
            yield mark, chunk
            mark = copy.deepcopy(self._documents.state_dict()) if self.stateful else mark + len(chunk)

    def digest(self) -> str:
        return f"a stream of {kind_of(self._documents)}"


def sample(documents: list[Any]) -> str:
    """16 hex digits of some documents."""
    return hashlib.sha256(json.dumps(documents, sort_keys=True, default=repr).encode()).hexdigest()[:16]
