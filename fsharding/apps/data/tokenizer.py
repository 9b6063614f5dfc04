"""A tokenizer of any kind as one function from text to ids, with what has to be known of it besides.

In: a `tokenizer.json`, a directory that has one, a tokenizer of `tokenizers` or `transformers`, or a function. Out: an
`Encoder`: ids without special tokens, the end of a document, the size of the vocabulary, a digest.
Guarantee: the digest differs where the ids may differ.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fsharding.base.errors import ConfigError, DataError, message
from fsharding.base.local_paths import check_local
from fsharding.base.public import kind_of
from fsharding.base.untrusted import read_json

__all__ = ["Encoder", "open_encoder", "require_text_extra"]

_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")
"""Names under which published tokenizers have the token that ends a document."""

_LARGEST_JSON = 64 << 20


@dataclass(frozen=True)
class Encoder:
    """Text to token ids.

    Attributes:
        encode: ids of a text, without special tokens.
        vocab_size: every id is below it; None where that is not known.
        eos: the id that ends a document; None where documents are taken as they are.
        digest: a short text that differs where ids may differ.
    """

    encode: Callable[[str], Sequence[int]] | None
    vocab_size: int | None
    eos: int | None
    digest: str


def require_text_extra(package: str) -> None:
    """Refuses a call that needs a package of the extra `text` that is not installed.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        rule = f"needs the package {package}, which is not installed."
        raise ConfigError(message(rule, mend="Install it with: pip install 'fsharding[text]'"))


def open_encoder(tokenizer: Any, eos: int | str | None, vocab_size: int | None) -> Encoder:
    """Makes an encoder of what a user gave.

    Args:
        tokenizer: a path, an object, a function from text to ids, or None where documents are ids already.
        eos: the token that ends a document, by its id or its text; None for the tokenizer's own, and without a
            tokenizer for none.
        vocab_size: of the model; None for the tokenizer's.

    Raises:
        DataError: no tokenizer, or one without such a token; a vocabulary that is larger than the model's.
        ConfigError: the package `tokenizers` is not installed.
    """
    if tokenizer is None:
        if isinstance(eos, str):
            rule = f"cannot look up eos {eos!r} without a tokenizer."
            raise DataError(message(rule, mend="Give its id, or tokenizer='tokenizer.json'."))
        return Encoder(None, vocab_size, _fits(eos, vocab_size), "ids")
    own_eos: str | None = None
    if isinstance(tokenizer, str | os.PathLike):
        check_local(tokenizer)
        tokenizer, own_eos = _read(Path(tokenizer))
    # A fast tokenizer of transformers has one of `tokenizers` inside, and its own name of the end.
    inner = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    own_eos = own_eos or getattr(tokenizer, "eos_token", None)
    if hasattr(inner, "get_vocab") and hasattr(inner, "to_str"):
        return _of_tokenizers(inner, eos, own_eos, vocab_size)
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "get_vocab"):
        vocab = tokenizer.get_vocab()
        size = _size(vocab, vocab_size)
        digest = hashlib.sha256(repr(sorted(vocab.items())).encode()).hexdigest()[:16]
        end = _eos(vocab, [], eos, own_eos, size)
        return Encoder(functools.partial(_without_special, tokenizer), size, end, digest)
    if callable(tokenizer):
        if isinstance(eos, str):
            rule = f"cannot look up eos {eos!r} in a function."
            raise DataError(message(rule, mend="Give its id, such as eos=0."))
        name = f"{getattr(tokenizer, '__module__', '')}.{getattr(tokenizer, '__qualname__', kind_of(tokenizer))}"
        return Encoder(cast("Callable[[str], Sequence[int]]", tokenizer), vocab_size, _fits(eos, vocab_size), name)
    mend = "Give the path of a tokenizer.json, a tokenizer of tokenizers or transformers, or a function text -> ids."
    raise DataError(message(f"takes a tokenizer, got {kind_of(tokenizer)}.", mend=mend))


def _of_tokenizers(inner: Any, eos: int | str | None, own: str | None, size: int | None) -> Encoder:
    vocab = inner.get_vocab(with_added_tokens=True)
    special = [token.content for token in inner.get_added_tokens_decoder().values() if token.special]
    size = _size(vocab, size)
    digest = hashlib.sha256(inner.to_str().encode()).hexdigest()[:16]
    end = _eos(vocab, special, eos, own, size)
    return Encoder(functools.partial(_ids, inner), size, end, digest)


# No lambdas, so that data can be sent to a worker of a loader.
def _ids(tokenizer: Any, text: str) -> Sequence[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _without_special(tokenizer: Any, text: str) -> Sequence[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _read(path: Path) -> tuple[Any, str | None]:
    """The tokenizer of a file or directory, and the name that the file beside it gives to the end of a document."""
    require_text_extra("tokenizers")
    from tokenizers import Tokenizer  # lazy: an extra

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        where = f"{path} has no tokenizer.json." if path.is_dir() else f"there is no {path}."
        mend = "Give a tokenizer.json, or a directory that has one, as save_pretrained writes it."
        raise DataError(message(f"cannot read a tokenizer: {where}", mend=mend))
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises Exception itself
        rule = f"cannot read {file} as a tokenizer: {error}."
        mend = "Give a tokenizer.json, as the package tokenizers or save_pretrained writes it."
        raise DataError(message(rule, mend=mend)) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    try:
        beside = read_json(os.path.realpath(file.with_name("tokenizer_config.json")), most=_LARGEST_JSON)
    except (OSError, ValueError):
        beside = None
    named = beside.get("eos_token") if isinstance(beside, dict) else None
    named = named.get("content") if isinstance(named, dict) else named
    return tokenizer, named if isinstance(named, str) else None


def _size(vocab: dict[str, int], given: int | None) -> int:
    """The size of the vocabulary: the model's, if that is given."""
    own = max(vocab.values(), default=-1) + 1
    if given is not None and own > given:
        rule = f"got a tokenizer of {own} tokens for a model of vocab_size {given}."
        mend = f"Give the model a vocabulary of {own} or more, or a smaller tokenizer."
        raise DataError(message(rule, mend=mend))
    return own if given is None else given


def _eos(vocab: dict[str, int], special: list[str], eos: int | str | None, own: str | None, size: int) -> int:
    """The id of the token that ends a document."""
    if isinstance(eos, int):
        return _fits(eos, size) or 0
    if eos is None:
        names = [own] if own in vocab else [name for name in _ENDS if name in vocab]
        if len(names) == 1:
            return vocab[names[0]]
        rule = "cannot tell which token of the tokenizer ends a document."
    else:
        if eos in vocab:
            return vocab[eos]
        names = []
        rule = f"got eos {eos!r}, which is no token of the tokenizer."
    rows = [f"{name!r} has the id {vocab[name]}" for name in names or special]
    example = (names or special or ["<eos>"])[0]
    mend = f"Give one of its tokens, such as eos={example!r}, or its id." if rows else "Give the id, such as eos=0."
    raise DataError(message(rule, rows, mend))


def _fits(eos: int | None, vocab_size: int | None) -> int | None:
    if eos is not None and (eos < 0 or (vocab_size is not None and eos >= vocab_size)):
        below = "" if vocab_size is None else f", and below vocab_size {vocab_size}"
        raise DataError(message(f"got eos {eos}.", mend=f"Give an id of at least 0{below}."))
    return eos
