"""Refuses arguments of a command that are wrong by themselves: options, names and paths that there are not.

In: arguments, or the options that the parser has made of them. Out: one error with all that is wrong.
The names that options take stand here apart from what they stand for; tests compare the two.
Guarantee: no torch is imported here, so that a mistyped option, name or path is answered at once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsharding.base.calls import call_as
from fsharding.base.errors import ConfigError, MeshError, did_you_mean, report
from fsharding.base.local_paths import URL_MEND, is_url
from fsharding.mesh.abstract_mesh import AXES, parse_axes, unknown_axis
from fsharding.sharding.strategy_names import STRATEGY_NAMES, meant_strategy

__all__ = ["DTYPES", "OPTIMIZERS", "POLICIES", "PRESETS", "SCHEDULES", "TRACKERS", "check_options", "check_values"]

DTYPES = ("float32", "bfloat16", "float16", "fp8", "fp8-block", "mxfp8", "nvfp4")
OPTIMIZERS = ("adamw", "lion", "muon", "adafactor")
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
"""Names that `--log` takes."""

_NAMES = {"dtype": DTYPES, "policy": POLICIES, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}
_ARGUMENTS = ("path", "source")
"""Checkpoints, which stand on the command line without a name."""
_TEXT_PATHS = ("data", "val_data", "resume")
"""Options that may hold a path, and other words too."""
_READ = (*_ARGUMENTS, "data", "val_data", "tokenizer", "model", "names")
"""Files and directories that a command reads; `default` is data that comes with Python."""


def check_options(command: str, options: type[Any], args: Sequence[str]) -> None:
    """Refuses options that a command does not have; each is answered with the one that is most like it.

    Raises:
        ConfigError: unknown options.
    """
    known = ["--help", *_options(options)]
    unknown = [arg for arg in (one.partition("=")[0] for one in args) if arg[:2] == "--" != arg]
    unknown = [arg for arg in dict.fromkeys(unknown) if arg.replace("_", "-") not in known]
    mend = f"{command} --help lists its options."
    if len(unknown) == 1:
        raise ConfigError(report(f"{command} has no {unknown[0]}.", mend=mend + did_you_mean(unknown[0], known)))
    if unknown:
        rows = [f"{arg}:{did_you_mean(arg, known) or ' unknown'}" for arg in unknown]
        raise ConfigError(report(f"{command} does not have {len(unknown)} of these options.", rows, mend))


def _options(options: type[Any]) -> list[str]:
    """The options of a dataclass as they are typed; arguments without a name are none."""
    result: list[str] = []
    for field in dataclasses.fields(options):
        name = field.name.replace("_", "-")
        if "Positional[" not in str(field.type):
            result += [f"--{name}", f"--no-{name}"] if field.type == "bool" else [f"--{name}"]
    return result


def check_values(command: str, config: Any) -> None:
    """Refuses names that options do not take, and axes and paths that there are not.

    Raises:
        ConfigError: an unknown name, a URL, or nothing at a path.
        MeshError: an unknown axis.
    """
    values = vars(config)
    for option, known in _NAMES.items():
        if option in values and values[option] not in known:
            _refuse(command, f"--{option}", values[option], known)
    if values.get("preset") and _plain(values["preset"]) not in map(_plain, PRESETS):
        known = f"Presets are {', '.join(PRESETS)}.{did_you_mean(values['preset'], PRESETS)}"
        raise ConfigError(report(f"{command} knows no preset {values['preset']!r}.", mend=known))
    if values.get("strategy") is not None and values["strategy"] not in STRATEGY_NAMES:
        known = f"Strategies are {', '.join(STRATEGY_NAMES)}.{meant_strategy(values['strategy'])}"
        raise ConfigError(report(f"{command} knows no strategy {values['strategy']!r}.", mend=known))
    for name in (name.strip() for text in values.get("log", ()) for name in text.split(",")):
        if name and name not in TRACKERS:
            _refuse(command, "--log", name, TRACKERS)
    for axis in call_as(command, parse_axes, values.get("mesh", "")):
        if axis not in AXES:
            raise MeshError(report(f"{command} --mesh {values['mesh']} {unknown_axis(axis)}"))
    _check_paths(command, values)


def _check_paths(command: str, values: Mapping[str, Any]) -> None:
    """Refuses URLs, and paths to read where nothing is."""
    given = {name: value for name, value in values.items() if name in _TEXT_PATHS or isinstance(value, Path)}
    if urls := [_typed(name, path) for name, path in given.items() if is_url(path)]:
        raise ConfigError(report(f"{command} takes paths of files and directories; got URLs.", urls, URL_MEND))
    paths = {name: values.get(name) for name in _READ}
    lost = [(name, path) for name, path in paths.items() if path and path != "default" and not os.path.lexists(path)]
    if lost:
        rows = [_typed(name, path) for name, path in lost]
        mend = f"Correct them; relative ones begin at {os.getcwd()}, and fsharding downloads nothing."
        raise ConfigError(report(f"{command} finds nothing at {len(rows)} of its paths.", rows, mend))


def _typed(name: str, path: Any) -> str:
    """Return a path as it stands on the command line."""
    return str(path) if name in (*_ARGUMENTS, "target") else f"--{name.replace('_', '-')} {path}"


def _refuse(command: str, option: str, value: str, known: Iterable[str]) -> None:
    mend = f"Use one of {', '.join(known)}.{did_you_mean(value, known)}"
    raise ConfigError(report(f"{command} knows no {option} {value!r}.", mend=mend))


def _plain(preset: str) -> str:
    """A preset without its signs: `-` and `.` are as good as `_`."""
    return preset.replace("-", "_").replace(".", "_")
