"""Documents and tokenizer of `fsharding train --tokenizer`, read by the packages datasets and tokenizers."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsharding.apps.data import files_below, stdlib_files
from fsharding.base.errors import ConfigError, DataError, message
from fsharding.base.untrusted import read_json

__all__ = ["Encoder", "is_table", "open_documents", "open_encoder", "read_tokenizer", "require"]

_TABLES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}  # readers of datasets
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")  # in published tokenizers


class Encoder(NamedTuple):
    """Encode text to ids without special tokens. A class, not a closure: it is pickled."""

    tokenizer: Any
    vocab_size: int
    eos: int
    digest: str

    def __call__(self, text: str) -> Sequence[int]:
        """Encode a text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def require(packages: Sequence[str], extra: str) -> None:
    """Refuse to continue without packages that an extra installs."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        rule = f"needs packages that are not installed: {', '.join(missing)}."
        raise ConfigError(message(rule, mend=f"Install them with: pip install 'fsharding[{extra}]'"))


def read_tokenizer(path: Path) -> tuple[Any, Path]:
    """Read tokenizer.json, or that file of a directory; return the tokenizer and its file."""
    require(["tokenizers"], "text")
    from tokenizers import Tokenizer  # lazy: an extra

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(os.path.realpath(file)), file
    except Exception as error:  # the package raises Exception itself
        rule = f"cannot read {file} as a tokenizer: {error}."
        mend = "Pass a tokenizer.json, or a directory with one, as written by tokenizers or save_pretrained."
        raise DataError(message(rule, mend=mend)) from error


def open_encoder(path: Path, eos: str) -> Encoder:
    """Read a tokenizer; `eos` is its end-of-document token, as text or id, "" to find it."""
    tokenizer, file = read_tokenizer(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if eos.isdecimal():
        end = int(eos)
    else:
        named = [eos] if eos else [name for name in (_own_end(file),) if name in vocab]
        ends = [vocab[name] for name in named or _ENDS if name in vocab]
        if len(ends) != 1:
            special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
            rows = [f"{name!r} has the id {vocab[name]}" for name in special]
            what = f"got --eos {eos!r}, which isn't a token of" if eos else "cannot find the end-of-document token of"
            raise DataError(message(f"{what} {file}.", rows, "Pass one of its tokens, or an id, such as --eos 0."))
        end = ends[0]
    digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16]
    return Encoder(tokenizer, max(vocab.values(), default=-1) + 1, end, digest)


def _own_end(file: Path) -> Any:
    """Return the `eos_token` of a tokenizer's config, or None."""
    try:
        config = read_json(os.path.realpath(file.with_name("tokenizer_config.json")), most=64 << 20)
    except (OSError, ValueError):
        return None
    end = config.get("eos_token") if isinstance(config, dict) else None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def is_table(path: Path) -> bool:
    """Return whether a path is a binary data set."""
    return path.suffix in (".parquet", ".arrow") or _is_saved(path)


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json", "dataset_info.json"))


def open_documents(source: str, column: str) -> Any:
    """Read a saved data set, files of rows, or files that are one document each."""
    path = Path(source)
    files = stdlib_files() if source == "default" else files_below(path)
    kinds = sorted({file.suffix for file in files})
    saved = _is_saved(path)
    if has_rows := saved or any(kind in _TABLES for kind in kinds):
        require(["datasets"], "text")
    try:
        if not has_rows:
            return [file.read_text(encoding="utf-8") for file in files]
        import datasets  # lazy: an extra, and slow to load

        if saved:
            rows = datasets.load_from_disk(source)
            rows = rows["train"] if isinstance(rows, datasets.DatasetDict) else rows
        elif len(kinds) > 1:
            raise ValueError(f"it has files of {len(kinds)} kinds, {', '.join(kinds)}")
        else:
            rows = datasets.load_dataset(_TABLES[kinds[0]], data_files=[str(file) for file in files], split="train")
    except Exception as error:  # readers raise many kinds of errors
        rule = f"cannot read {source}: {error.__cause__ or error}."
        mend = "Pass UTF-8 text, a split written by save_to_disk, or files of one kind with a document per row."
        raise DataError(message(rule, mend=mend)) from error
    if column not in rows.column_names:
        mend = f"Give one of {', '.join(map(repr, rows.column_names))}."
        raise DataError(message(f"finds no column {column!r} in {source}.", mend=mend))
    return rows.select_columns([column])
