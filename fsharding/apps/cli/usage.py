"""Check options, names, paths and numbers without importing torch."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsharding.base.calls import call_as
from fsharding.base.errors import ConfigError, MeshError, did_you_mean, report
from fsharding.base.local_paths import URL_MEND, is_url
from fsharding.mesh.abstract_mesh import AXES, parse_axes, unknown_axis
from fsharding.sharding.strategy_names import STRATEGY_NAMES, meant_strategy

__all__ = ["OPTIMIZERS", "check_options", "check_values", "option", "parse_trackers"]

DTYPES = ("float32", "bfloat16", "float16", "fp8", "fp8-block", "mxfp8", "nvfp4")
OPTIMIZERS = {"adamw": 1.0, "lion": 0.2, "muon": 1.0, "adafactor": 10.0}  # peak rates as multiples of AdamW's
POLICIES = (
    "save_except_gathered", "nothing_saveable", "dots_saveable", "everything_saveable", "offload", "offload_inputs"
)  # fmt: skip
PRESETS = (
    "tiny", "tiny-moe", "bench-1b", "bench-34m", "bench-deep", "bench-wide", "bench-moe",
    "llama3_8b", "llama3_70b", "llama3_405b", "qwen2_5_72b", "mixtral_8x7b", "deepseek_v3",
    "tiny_llama3", "tiny_qwen2_5", "tiny_mixtral", "tiny_deepseek_v3",
)  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")
TRACKERS = ("tensorboard", "wandb", "json")

_NAMES = {"dtype": DTYPES, "policy": POLICIES, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}
# What a number has to be, in words and as a test, and the options with it.
_NUMBERS = (
    ("at least 1", lambda x: x > 0, "steps microbatches batch seq stages_per_rank keep val_batches trace tokens top_k"),
    ("at least 0", lambda x: x >= 0, "save_every decay_steps check_replicas_every val_every log_every"),
    ("above 0", lambda x: x > 0, "lr clip timeout grace peak_tflops"),
    ("finite", lambda x: x != math.inf, "lr peak_tflops"),
    ("at most 10,000,000", lambda x: not x > 10_000_000, "timeout"),
    ("0 to 255", lambda x: 0 <= x <= 255, "preempt_status"),
    ("0 to 2**64 - 1", lambda x: 0 <= x < 2**64, "seed"),
    ("at least 0", lambda x: 0 <= x < math.inf, "temperature"),
    ("above 0, at most 1", lambda x: 0 < x <= 1, "top_p"),
    ("the id of a token", lambda x: isinstance(x, str) or x >= 0, "eos"),  # text in `train`
)
_ARGUMENTS = ("path", "source")  # positional checkpoints
_TEXT_PATHS = ("data", "val_data", "resume")  # a path, or another word
_READ = (*_ARGUMENTS, "data", "val_data", "tokenizer", "model", "names")


def check_options(command: str, options: type[Any], args: Sequence[str]) -> None:
    """Refuse options that a command does not have, and suggest the most similar one for each."""
    known = ["--help"]
    for field in dataclasses.fields(options):
        if "Positional[" not in str(field.type):
            name = option(field.name)
            known += [name, f"--no-{name[2:]}"] if field.type == "bool" else [name]
    unknown = [arg for arg in (one.partition("=")[0] for one in args) if arg[:2] == "--" != arg]
    unknown = [arg for arg in dict.fromkeys(unknown) if arg.replace("_", "-") not in known]
    mend = f"{command} --help lists its options."
    if len(unknown) == 1:
        raise ConfigError(report(f"{command} has no {unknown[0]}.", mend=mend + did_you_mean(unknown[0], known)))
    if unknown:
        rows = [f"{arg}:{did_you_mean(arg, known) or ' unknown'}" for arg in unknown]
        raise ConfigError(report(f"{command} does not have {len(unknown)} of these options.", rows, mend))


def option(name: str) -> str:
    """Return the option of a field, as typed."""
    return f"--{name.replace('_', '-')}"


def parse_trackers(given: Iterable[str]) -> tuple[str, ...]:
    """Return the names in the values of `--log`, each once."""
    names = [name.strip() for text in given for name in text.split(",")]
    return tuple(dict.fromkeys(filter(None, names)))


def check_values(command: str, config: Any) -> None:
    """Refuse unknown names and axes, URLs, paths where nothing is, and numbers out of range."""
    values = {name: value for name, value in vars(config).items() if value is not None}
    for name, known in _NAMES.items():
        if name in values:
            _check_name(command, option(name), values[name], known)
    for name in parse_trackers(values.get("log", ())):
        _check_name(command, "--log", name, TRACKERS)
    if values.get("preset") and _plain(values["preset"]) not in map(_plain, PRESETS):
        _check_name(command, "preset", values["preset"], PRESETS)
    if "strategy" in values:
        _check_name(command, "strategy", values["strategy"], STRATEGY_NAMES)
    for axis in call_as(command, parse_axes, values.get("mesh", "")):
        if axis not in AXES:
            raise MeshError(report(f"{command} --mesh {values['mesh']} {unknown_axis(axis)}"))
    layers = values.get("stage_layers", "")
    if not all(part.strip().isdecimal() for part in layers.split(",") if part):
        mend = "Write the layers of each stage, such as 3,5."
        raise ConfigError(report(f"{command} cannot read --stage-layers {layers!r}.", mend=mend))
    _check_paths(command, values)
    wrong = [
        f"{option(name)} {values[name]}: {rule}"
        for rule, holds, names in _NUMBERS
        for name in names.split()
        if name in values and not holds(values[name])
    ]
    if wrong:
        raise ConfigError(report(f"{command} got numbers out of range.", wrong))


def _check_paths(command: str, values: Mapping[str, Any]) -> None:
    given = {name: value for name, value in values.items() if name in _TEXT_PATHS or isinstance(value, Path)}
    if urls := [_typed(name, path) for name, path in given.items() if is_url(path)]:
        raise ConfigError(report(f"{command} takes paths of files and directories; got URLs.", urls, URL_MEND))
    # `default` is data that comes with Python.
    paths = {name: values[name] for name in _READ if values.get(name) not in (None, "", "default")}
    if rows := [_typed(name, path) for name, path in paths.items() if not os.path.lexists(path)]:
        mend = f"Correct them; relative ones begin at {os.getcwd()}, and fsharding downloads nothing."
        raise ConfigError(report(f"{command} finds nothing at {len(rows)} of its paths.", rows, mend))


def _typed(name: str, path: Any) -> str:
    """Return a path with its option, as typed."""
    return str(path) if name in (*_ARGUMENTS, "target") else f"{option(name)} {path}"


def _check_name(command: str, what: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        near = meant_strategy(value) if what == "strategy" else did_you_mean(value, known)
        mend = f"Use one of {', '.join(known)}.{near}"
        raise ConfigError(report(f"{command} knows no {what} {value!r}.", mend=mend))


def _plain(preset: str) -> str:
    """Normalize `-` and `.` in a preset's name to `_`."""
    return preset.replace("-", "_").replace(".", "_")
