"""`fsharding generate`: continue a prompt with the model of a checkpoint, and stream the text."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fsharding as fs
from fsharding.apps.cli.config import PRECISIONS
from fsharding.apps.cli.documents import read_tokenizer
from fsharding.apps.cli.options import GenerateConfig
from fsharding.apps.cli.resume import notes
from fsharding.base.calls import call_as
from fsharding.base.errors import CheckpointError, ConfigError, DataError, message
from fsharding.checkpoint.manifest import MANIFEST
from fsharding.mesh.abstract_mesh import make_shape, parse_axes
from fsharding.mesh.device_mesh import own_rank

__all__ = ["BYTES", "Codec", "check_generate", "generate"]


def check_generate(config: GenerateConfig, world: int) -> None:
    """Refuse options, a checkpoint or a prompt that would fail on `world` ranks."""
    sizes, codec, _ = _open(config)
    axes = {"tp": -1, **parse_axes(config.mesh)}
    shape = call_as(f"fsharding generate --mesh {config.mesh or 'tp=-1'}", make_shape, axes, world=world)
    model = fs.models.decoder(sizes)
    if (stages := shape.axis_size("pp")) > 1:
        mend = "Use tp or dp: a checkpoint of any mesh is loaded into the mesh that generates."
        raise ConfigError(message(f"cannot generate in stages: --mesh has pp={stages}.", mend=mend))
    if model.check is not None:
        model.check(shape, fs.DEFAULT_RULES)
    ids = codec.encode(config.prompt)
    vocab = sizes.vocab_size
    if not ids:
        mend = "Pass --prompt with at least one character, such as a line break."
        raise DataError(message("got a prompt without tokens.", mend=mend))
    if outside := [i for i in ids if i >= vocab]:
        pieces = ", ".join(f"{codec.decode([i])!r} is {i}" for i in dict.fromkeys(outside[:5]))
        mend = "Remove them, or pass the tokenizer of this model."
        rule = f"got a prompt with {len(outside)} tokens outside the vocabulary of {vocab}."
        raise DataError(message(rule, [pieces], mend))


def generate(config: GenerateConfig) -> int:
    """Generate on this process, or the ranks that a launcher started; return the exit status."""
    try:
        _generate(config)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _generate(config: GenerateConfig) -> None:
    sizes, codec, path = _open(config)
    axes: dict[str, Any] = {"tp": -1, **parse_axes(config.mesh)}
    mesh = fs.make_mesh(timeout=timedelta(seconds=config.timeout), **axes)
    model = fs.models.decoder(sizes)
    prompt = codec.encode(config.prompt)
    # zero0: leaves sharded over data axes would be gathered at every token.
    layout = fs.plan_layout(model, mesh, strategy=fs.zero(0))
    if os.path.lexists(path / MANIFEST):
        leaves = fs.checkpoint.load_leaves(path, "params", layout, cast=True)
        params = fs.tree.unflatten(layout.structure, [leaves[leaf.path_in("params")] for leaf in layout.leaves])
    else:
        params = fs.hf.load(path, layout)
    shown = _Shown(codec, prompt, config.eos, quiet=config.json or own_rank() != 0)
    shown.print(config.prompt)
    began = time.perf_counter()
    fs.models.generate(
        model, params, [prompt], config.tokens, key=fs.random.key(config.seed), temperature=config.temperature,
        top_k=config.top_k, top_p=config.top_p, eos=config.eos, precision=PRECISIONS[config.dtype], stream=shown.add,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    shown.show("\n")
    if config.json and own_rank() == 0:
        row = {"prompt": config.prompt, "text": shown.text, "tokens": shown.tokens, "seconds": round(seconds, 3)}
        print(json.dumps(row), flush=True)


# --------------------------------------------------------------------------------------------- the model and its text
class Codec(NamedTuple):
    """Functions from text to tokens, and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


# A token is a byte of UTF-8, as `fsharding train` reads text without a tokenizer; a part of a character is U+FFFD.
BYTES = Codec(
    lambda text: [*text.encode("utf-8", "surrogateescape")],
    lambda tokens: bytes(token if token < 256 else 0xFF for token in tokens).decode("utf-8", "replace"),
)


def _tokenizer(path: Path) -> Codec:
    """Read a `tokenizer.json`, or that file of a directory."""
    inner, _ = read_tokenizer(path)
    return Codec(lambda text: inner.encode(text, add_special_tokens=False).ids, lambda tokens: inner.decode([*tokens]))


def _open(config: GenerateConfig) -> tuple[fs.models.DecoderConfig, Codec, Path]:
    """Find the model at a path: its sizes, the encoding of its text, and the directory of its parameters."""
    path = config.path
    if not os.path.lexists(path / MANIFEST):
        if (path / "config.json").is_file():
            return fs.hf.config_of(path), _tokenizer(config.tokenizer or path), path
        path = fs.checkpoint.latest(path) or fs.checkpoint.latest(path / "ckpt") or path
    manifest = fs.checkpoint.metadata(path)
    noted = notes(manifest)
    sizes = _model(config, noted, path)
    _check_leaves(path, manifest, sizes)
    return sizes, _text(config, noted["config"], sizes, path), path


def _model(config: GenerateConfig, noted: dict[str, Any], path: Path) -> fs.models.DecoderConfig:
    if config.model is not None:
        return fs.hf.config_of(config.model)
    preset = config.preset or noted.get("preset")
    if isinstance(preset, str):
        return fs.models.presets.recipe(preset).config
    if isinstance(noted.get("model"), dict):
        return fs.hf.config_of(noted["model"])
    mend = 'Give --preset NAME or --model config.json; or save with extra={"model": fs.hf.config_json(config)}.'
    raise ConfigError(message(f"cannot find the model of {path}.", mend=mend))


def _check_leaves(path: Path, manifest: fs.checkpoint.Manifest, sizes: fs.models.DecoderConfig) -> None:
    """Refuse a checkpoint whose parameters aren't the model's."""
    draws = fs.tree.named_leaves(fs.models.decoder(sizes).init(torch.zeros(2, dtype=torch.int64)))
    want = {f"params.{name}": list(draw.shape) for name, draw in draws.items()}
    have = {name: list(leaf.shape) for name, leaf in manifest.tree.items() if name.startswith("params.")}
    rows = [
        f"{name} is {have.get(name, 'not there')}, and {want.get(name, 'not there')} in the model"
        for name in sorted({*want, *have})
        if have.get(name) != want.get(name)
    ]
    if rows:
        mend = "Pass --preset or --model of the run that saved it."
        raise CheckpointError(message(f"finds different parameters in {path} than in the model.", rows, mend))


def _text(config: GenerateConfig, options: dict[str, Any], sizes: fs.models.DecoderConfig, path: Path) -> Codec:
    """Return the encoding of the run's text: a tokenizer, or bytes."""
    noted = options.get("tokenizer")
    if config.tokenizer is not None or (isinstance(noted, str) and noted not in ("", "None")):
        return _tokenizer(config.tokenizer or Path(str(noted)))
    data = options.get("data")
    if (isinstance(data, str) and data.endswith(".bin")) or (data is None and sizes.vocab_size != 256):
        mend = "Pass the one that encoded its text: --tokenizer tokenizer.json."
        raise ConfigError(message(f"cannot find the tokenizer of {path}.", mend=mend))
    return BYTES


# ---------------------------------------------------------------------------------------------------------- the screen
@dataclass
class _Shown:
    """Print text as tokens arrive, in full characters."""

    codec: Codec
    prompt: Sequence[int]
    eos: int | None
    quiet: bool
    tokens: int = 0
    ids: list[int] = field(default_factory=list)  # without the end token
    text: str = ""
    printed: int = 0  # characters of `text`

    def add(self, new: Tensor) -> None:
        """Take the next token of the only row."""
        token = int(new[0])
        self.tokens += 1
        if token == self.eos:
            return
        self.ids.append(token)
        # Decode with the prompt: alone, some tokenizers drop the space before a word.
        before = self.codec.decode(self.prompt)
        whole = self.codec.decode([*self.prompt, *self.ids])
        self.text = whole[len(before) :] if whole.startswith(before) else self.codec.decode(self.ids)
        if not self.text.endswith("\ufffd"):
            self.show()

    def show(self, end: str = "") -> None:
        """Print the rest of the text."""
        self.print(self.text[self.printed :] + end)
        self.printed = len(self.text)

    def print(self, text: str) -> None:
        """Print a text on rank 0, with control characters escaped: a terminal would act on them."""
        if not self.quiet:
            safe = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
            print(safe, end="", flush=True)
