"""The verb `generate`: text after a prompt, from a checkpoint, printed as it comes.

In: a checkpoint of `fsharding train`, one whose run says its model, or a directory of Hugging Face. Out: on rank 0 the
prompt and what follows, or with `--json` one JSON object. By default ranks cut the model over `tp`.
Guarantee: whatever can be wrong with the options, the checkpoint and the prompt is found before a rank starts; equal
options give the same text on any number of ranks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

import fsharding as fs
from fsharding import checkpoint, hf
from fsharding.apps.cli.codec import Bytes, Codec, Tokenizer
from fsharding.apps.cli.config import PRECISIONS
from fsharding.apps.cli.options import GenerateConfig
from fsharding.apps.cli.usage import check_values
from fsharding.base.calls import call_as, named
from fsharding.base.errors import CheckpointError, ConfigError, DataError, message
from fsharding.base.tree import Tree
from fsharding.checkpoint.manifest import MANIFEST, Manifest
from fsharding.mesh.abstract_mesh import make_shape, parse_axes
from fsharding.mesh.device_mesh import make_mesh, own_rank
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.models.presets import recipe
from fsharding.sharding.layout import Layout, plan_layout
from fsharding.sharding.partition_spec import DEFAULT_RULES

__all__ = ["check_generate", "generate"]

_FUNCTION = "fsharding generate"


@named(_FUNCTION)
def check_generate(config: GenerateConfig, world: int) -> None:
    """Refuses whatever could go wrong later.

    Args:
        world: number of ranks that will run.

    Raises:
        ConfigError: a number out of range, a mesh that cannot cut the model, or nothing that says the model or how its
            text was encoded.
        CheckpointError: there is no checkpoint, or one of another model than `--preset` or `--model` says.
        DataError: the prompt has no tokens, or some that the model does not know.
        MeshError: the mesh does not fit the number of ranks.
    """
    check_values(_FUNCTION, config)
    least = {"--tokens": config.tokens, "--top-k": config.top_k}
    wrong = [f"{name} {value}: at least 1" for name, value in least.items() if value is not None and value < 1]
    wrong += [] if 0 <= config.temperature < float("inf") else [f"--temperature {config.temperature}: at least 0"]
    wrong += [] if config.top_p is None or 0 < config.top_p <= 1 else [f"--top-p {config.top_p}: above 0, at most 1"]
    wrong += [] if config.eos is None or config.eos >= 0 else [f"--eos {config.eos}: the id of a token"]
    wrong += [] if 0 <= config.seed < 2**64 else [f"--seed {config.seed}: 0 to 2**64 - 1"]
    wrong += [] if config.timeout > 0 else [f"--timeout {config.timeout}: above 0"]
    if wrong:
        raise ConfigError(message("got numbers out of range.", wrong))
    source = _open(config)
    shape = call_as(f"{_FUNCTION} --mesh {config.mesh or 'tp=-1'}", make_shape, _axes(config), world=world)
    model = decoder(source.config)
    if (stages := shape.axis_size("pp")) > 1:
        mend = "Use tp or dp: a checkpoint of any mesh is loaded into the mesh that generates."
        raise ConfigError(message(f"cannot generate in stages: --mesh has pp={stages}.", mend=mend))
    if model.check is not None:
        model.check(shape, DEFAULT_RULES)
    ids = source.text.encode(config.prompt)
    vocab = source.config.vocab_size
    if not ids:
        mend = "Give --prompt at least one character; a text may begin after a line break."
        raise DataError(message("got a prompt without tokens.", mend=mend))
    if outside := [i for i in ids if i >= vocab]:
        pieces = ", ".join(f"{source.text.decode([i])!r} is {i}" for i in dict.fromkeys(outside[:5]))
        mend = "Leave them out, or take the tokenizer of this model."
        rule = f"got a prompt with {len(outside)} tokens outside of the vocabulary of {vocab}."
        raise DataError(message(rule, [pieces], mend))


@named(_FUNCTION)
def generate(config: GenerateConfig) -> int:
    """Generates on the ranks that are there: this process alone, or those that a launcher started.

    Returns:
        The exit status.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        NonFiniteError: its parameters are not finite.
        RankError: a rank is lost.
    """
    try:
        _generate(config)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _generate(config: GenerateConfig) -> None:
    """Generates, and leaves the process group to the caller."""
    source = _open(config)
    mesh = make_mesh(timeout=timedelta(seconds=config.timeout), **cast(Any, _axes(config)))
    model = decoder(source.config)
    prompt = source.text.encode(config.prompt)
    # What is cut over data axes would be gathered at once.
    params = source.load(plan_layout(model, mesh, strategy=fs.zero(0)))
    shown = _Shown(source.text, prompt, config.eos, quiet=config.json or own_rank() != 0)
    shown.begin(config.prompt)
    began = time.perf_counter()
    fs.models.generate(
        model, params, [prompt], config.tokens, key=fs.random.key(config.seed), temperature=config.temperature,
        top_k=config.top_k, top_p=config.top_p, eos=config.eos, precision=PRECISIONS[config.dtype], stream=shown.add,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    shown.end()
    if config.json and own_rank() == 0:
        row = {"prompt": config.prompt, "text": shown.text, "tokens": shown.tokens, "seconds": round(seconds, 3)}
        print(json.dumps(row), flush=True)


def _axes(config: GenerateConfig) -> dict[str, int]:
    """Sizes by axis: what the options do not name goes to `tp`."""
    return {"tp": -1, **parse_axes(config.mesh)}


# ---------------------------------------------------------------------------------------------------- where it is from
class _Source(NamedTuple):
    """A model with its text, and how its parameters are read."""

    config: DecoderConfig
    text: Codec
    load: Callable[[Layout], Tree]


def _open(config: GenerateConfig) -> _Source:
    """Looks at a path, and reads no parameters yet."""
    if (config.path / "config.json").is_file() and not os.path.lexists(config.path / MANIFEST):
        text = Tokenizer(config.tokenizer or config.path)
        return _Source(hf.config_of(config.path), text, lambda layout: hf.load(config.path, layout))
    path = _newest(config.path)
    manifest = checkpoint.metadata(path)
    notes: dict[str, Any] = manifest.extra if isinstance(manifest.extra, dict) else {}
    sizes = _model(config, notes, path)
    _check_leaves(path, manifest, sizes)

    def load(layout: Layout) -> Tree:
        leaves = checkpoint.load_leaves(path, "params", layout, cast=True)
        return fs.tree.unflatten(layout.structure, [leaves[leaf.path_in("params")] for leaf in layout.leaves])

    return _Source(sizes, _text(config, notes, sizes, path), load)


def _newest(path: Path) -> Path:
    """The checkpoint at a path, or the newest complete one of a run there."""
    if os.path.lexists(path / MANIFEST):
        return path
    return checkpoint.latest(path) or checkpoint.latest(path / "ckpt") or path


def _model(config: GenerateConfig, notes: dict[str, Any], path: Path) -> DecoderConfig:
    """The sizes of the model: as the options say, or as the run has noted."""
    preset = config.preset or notes.get("preset")
    entries = notes.get("model")
    if config.model is not None:
        return hf.config_of(config.model)
    if isinstance(preset, str):
        return recipe(preset).config
    if isinstance(entries, dict):
        return hf.config_of(cast("dict[str, Any]", entries))
    mend = 'Give --preset NAME or --model config.json; or save with extra={"model": fs.hf.config_json(config)}.'
    raise ConfigError(message(f"cannot tell which model {path} is of.", mend=mend))


def _check_leaves(path: Path, manifest: Manifest, sizes: DecoderConfig) -> None:
    """Refuses a checkpoint of other parameters than the model's."""
    draws = fs.tree.named_leaves(decoder(sizes).init(torch.zeros(2, dtype=torch.int64)))
    want = {f"params.{name}": list(draw.shape) for name, draw in draws.items()}
    have = {name: list(leaf.shape) for name, leaf in manifest.tree.items() if name.startswith("params.")}
    rows = [
        f"{name} is {have.get(name, 'not there')}, and {want.get(name, 'not there')} in the model"
        for name in sorted({*want, *have})
        if have.get(name) != want.get(name)
    ]
    if rows:
        mend = "Give --preset or --model of the run that saved it."
        raise CheckpointError(message(f"finds other parameters in {path} than the model's.", rows, mend))


def _text(config: GenerateConfig, notes: dict[str, Any], sizes: DecoderConfig, path: Path) -> Codec:
    """How the run has encoded its text: by a tokenizer, or byte by byte."""
    options = notes.get("config")
    options = cast("dict[str, Any]", options) if isinstance(options, dict) else {}
    noted = options.get("tokenizer")
    if config.tokenizer is not None or (isinstance(noted, str) and noted not in ("", "None")):
        return Tokenizer(config.tokenizer or Path(str(noted)))
    data = options.get("data")
    if (isinstance(data, str) and data.endswith(".bin")) or (data is None and sizes.vocab_size != 256):
        mend = "Give the one that encoded its text: --tokenizer tokenizer.json."
        raise ConfigError(message(f"cannot tell the tokenizer of {path}.", mend=mend))
    return Bytes()


# ---------------------------------------------------------------------------------------------------------- the screen
@dataclass
class _Shown:
    """Prints text as its tokens come: half a character waits for its other half.

    `printed` characters of `text` are on the screen; `text` is decoded from `tokens`, without the end token.
    """

    codec: Codec
    prompt: Sequence[int]
    eos: int | None
    quiet: bool
    tokens: int = 0
    text: str = ""
    printed: int = 0
    ids: list[int] = field(default_factory=list[int])

    def begin(self, prompt: str) -> None:
        """Prints the prompt."""
        self._print(prompt)

    def add(self, new: Tensor) -> None:
        """Takes the next token of the only row."""
        token = int(new[0])
        self.tokens += 1
        if token == self.eos:
            return
        self.ids.append(token)
        self.text = self._continuation()
        if not self.text.endswith("\ufffd"):
            self._show()

    def end(self) -> None:
        """Prints what is left, and ends the line."""
        self._show()
        self._print("\n")

    def _continuation(self) -> str:
        """The text of the tokens after the prompt's: some tokenizers decode a word without the space before it."""
        before = self.codec.decode(self.prompt)
        whole = self.codec.decode([*self.prompt, *self.ids])
        return whole[len(before) :] if whole.startswith(before) else self.codec.decode(self.ids)

    def _show(self) -> None:
        self._print(self.text[self.printed :])
        self.printed = len(self.text)

    def _print(self, text: str) -> None:
        if not self.quiet:
            # A model may have learnt what a terminal would act on.
            safe = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
            print(safe, end="", flush=True)
