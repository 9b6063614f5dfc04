"""Text as tokens, and tokens as text: bytes, or a `tokenizer.json`.

In: what a user typed, or what a model wrote. Out: the tokens that its training saw, or text to show.
Guarantee: `decode(encode(text)) == text` for bytes; special tokens are neither added nor shown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fsharding.base.errors import ConfigError, message

__all__ = ["Bytes", "Codec", "Tokenizer"]


class Codec(Protocol):
    """Text as a model was given it."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special ones."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no text yet, as half of a character, is U+FFFD."""
        ...


class Bytes:
    """A token is a byte of UTF-8, as `fsharding train` reads text without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """See `Codec`."""
        return [*text.encode("utf-8", "surrogateescape")]

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Codec`."""
        return bytes(token if token < 256 else 0xFF for token in tokens).decode("utf-8", "replace")


class Tokenizer:
    """A `tokenizer.json`.

    Args:
        path: the file, or a directory that has it.

    Raises:
        ConfigError: the package is not installed, or the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer  # lazy: an extra
        except ImportError as error:
            mend = "Install it with: pip install 'fsharding[text]'"
            raise ConfigError(message("needs the package tokenizers.", mend=mend)) from error
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._inner: Any = Tokenizer.from_file(os.path.realpath(file))
        except Exception as error:  # the package raises Exception itself
            mend = "Give a tokenizer.json, or a directory that has one, as save_pretrained writes it."
            raise ConfigError(message(f"cannot read the tokenizer {file}: {error}.", mend=mend)) from error

    def encode(self, text: str) -> list[int]:
        """See `Codec`."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Codec`."""
        return self._inner.decode([*tokens])
