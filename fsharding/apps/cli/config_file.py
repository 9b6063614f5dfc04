"""`--config FILE`: options from a file of YAML or TOML; `--print-config` writes one."""

from __future__ import annotations

import dataclasses
import datetime
import os
import tomllib
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.usage import option
from fsharding.base.calls import call_as
from fsharding.base.errors import ConfigError, did_you_mean, message, report
from fsharding.base.local_paths import check_local
from fsharding.base.untrusted import read_plain

__all__ = ["OWN_OPTIONS", "config_text", "with_config_file"]

OWN_OPTIONS = ("config", "print_config")  # no file has them

_MOST_BYTES = 1 << 16


def with_config_file(args: Sequence[str]) -> list[str]:
    """Insert the options of the `--config` file of `fsharding train` before those typed."""
    paths = [args[i + 1] for i, arg in enumerate(args[:-1]) if arg == "--config"]
    paths += [arg.partition("=")[2] for arg in args if arg.startswith("--config=")]
    if not paths:
        return list(args)
    if len(paths) > 1:
        text = f"got {len(paths)} files: {', '.join(paths)}."
        raise ConfigError(report(f"fsharding train --config {text}", mend="Give one file."))
    # By field: save_every for `--save-every=3`, and plot for `--no-plot`.
    typed = [arg[2:].partition("=")[0].replace("-", "_").removeprefix("no_") for arg in args if arg.startswith("--")]
    options = call_as("fsharding train --config", _read_options, Path(paths[0]))
    return [*(arg for name, given in options.items() if name not in typed for arg in given), *args]


def _read_options(path: Path) -> dict[str, list[str]]:
    """Return the arguments for each option in a file; `.toml` is TOML, everything else YAML."""
    check_local(path)
    try:
        text = read_plain(os.path.realpath(path), _MOST_BYTES).decode("utf-8")
        pairs = list(tomllib.loads(text).items()) if path.suffix == ".toml" else _parse_yaml(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        why = "it is too deep" if isinstance(error, RecursionError) else getattr(error, "strerror", None) or str(error)
        mend = "Give a file of YAML or TOML with one option a line; --print-config writes one."
        raise ConfigError(message(f"cannot read {path}.", [why], mend)) from error
    hints = typing.get_type_hints(TrainConfig)
    known = [name for name in hints if name not in OWN_OPTIONS]  # a list: keys of YAML need not be hashable
    result: dict[str, list[str]] = {}
    wrong: list[str] = []
    for key, value in pairs:
        name = key.replace("-", "_") if isinstance(key, str) else key
        if name not in known:
            wrong.append(f"{key}: unknown.{did_you_mean(str(name), known)}")
        elif name in result:
            wrong.append(f"{key}: occurs twice")
        elif isinstance(given := _arguments(name, value, hints[name]), str):
            wrong.append(f"{key}: {given}, not {value!r}")
        else:
            result[name] = given
    if wrong:
        mend = "Keys are the options of `fsharding train --help`."
        raise ConfigError(message(f"cannot take all of {path}.", wrong, mend))
    return result


class _Loader(yaml.SafeLoader):
    """Loader of YAML without aliases, which could make an error message of any size."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias")
        return super().compose_node(parent, index)


def _parse_yaml(text: str) -> list[tuple[Any, Any]]:
    """Return the pairs of a mapping, each key as often as it is there."""
    loader = _Loader(text)
    node = loader.get_single_node()
    if not isinstance(node, yaml.MappingNode | None):
        raise ValueError("it isn't a mapping of keys to values")
    return [tuple(loader.construct_object(part, deep=True) for part in pair) for pair in node.value] if node else []


_WORDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "text"}


def _arguments(name: str, value: Any, hint: Any) -> list[str] | str:
    """Return the arguments of an option; or, as text, the type it needs."""
    typed = option(name)
    kind, *others = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)  # None comes last
    if value is None:
        return [] if others else _WORDS.get(kind, "text")
    if kind is bool:
        return [typed if value else f"--no-{typed[2:]}"] if isinstance(value, bool) else _WORDS[bool]
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list) else [value]
        return [f"{typed}={x}" for x in items] if all(isinstance(x, str) for x in items) else "text or a list of it"
    if get_origin(kind) is Literal:
        return [f"{typed}={value}"] if value in get_args(kind) else f"one of {', '.join(get_args(kind))}"
    if isinstance(value, datetime.date):  # a deadline, with or without a time
        value = value.isoformat()
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        with suppress(ValueError):
            value = float(value)
    taken = {int: int, float: int | float}.get(kind, str | int)
    return [f"{typed}={value}"] if isinstance(value, taken) and not isinstance(value, bool) else _WORDS[kind]


def config_text(config: TrainConfig) -> str:
    """Return a configuration as YAML for `--config`."""
    values = {k: v for k, v in dataclasses.asdict(config).items() if k not in OWN_OPTIONS}
    plain = {k: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1 << 20)
