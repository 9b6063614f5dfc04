"""`--config FILE`: options of a command in a file of YAML or TOML, and `--print-config`, which writes one.

In: the arguments of the command line; a file from an untrusted source. Out: arguments, with those of the file
before those that were typed. A key is the name of an option, with `_` or `-`.
Guarantees: an option on the command line wins over the file, and the file over defaults. A printed configuration reads
back to the same one. No file can hang or fill this process; one error names all keys that are wrong.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from fsharding.base.calls import call_as, public_name
from fsharding.base.errors import ConfigError, did_you_mean, message, report
from fsharding.base.local_paths import check_local
from fsharding.base.untrusted import read_plain

__all__ = ["OWN_OPTIONS", "config_text", "read_options", "with_config_file"]

OWN_OPTIONS = ("config", "print_config")
"""Options that say where options are from; no file has them."""

_MOST_BYTES = 1 << 16
_DEPTH = 3


def with_config_file(args: Sequence[str], command: str, config: type[Any]) -> list[str]:
    """The arguments of a command line, with the options of its `--config` file before them.

    Args:
        args: of the process, the command first.
        command: that takes `--config`; arguments of another one stay as they are.
        config: the dataclass of its options.

    Raises:
        ConfigError: a file that cannot be read, unknown keys, values of a wrong type, or two files.
    """
    if not args or args[0] != command:
        return list(args)
    paths = _paths(args[1:])
    if not paths:
        return list(args)
    if len(paths) > 1:
        text = f"got {len(paths)} files: {', '.join(paths)}."
        raise ConfigError(report(f"fsharding {command} --config {text}", mend="Give one file."))
    typed = {_name(arg) for arg in args[1:] if arg.startswith("--")}
    options = call_as(f"fsharding {command} --config", read_options, Path(paths[0]), config)
    return [command, *(arg for name, given in options.items() if name not in typed for arg in given), *args[1:]]


def _paths(args: Sequence[str]) -> list[str]:
    """The values of `--config`; a missing one is left to the parser of options."""
    apart = [args[i + 1] for i, arg in enumerate(args[:-1]) if arg == "--config"]
    return apart + [arg.partition("=")[2] for arg in args if arg.startswith("--config=")]


def _name(arg: str) -> str:
    """The field that an option sets: `--save-every=3`, `--save_every` and `--no-plot` are save_every and plot."""
    name = arg[2:].partition("=")[0].replace("-", "_")
    return name.removeprefix("no_")


# ---------------------------------------------------------------------------------------------------------- reading
def read_options(path: Path, config: type[Any]) -> dict[str, list[str]]:
    """The options in a file, each as arguments of the command line.

    Args:
        path: of the file; `.toml` is TOML, all else YAML.
        config: the dataclass of the options.

    Raises:
        ConfigError: it is a URL, cannot be read, or has unknown keys, or values of a wrong type.
    """
    check_local(path)
    try:
        text = read_plain(os.path.realpath(path), _MOST_BYTES).decode("utf-8")
        pairs = _parse_toml(text) if path.suffix == ".toml" else _parse_yaml(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error) or "it is too deep"
        mend = "Give a file of YAML or TOML with one option a line; --print-config writes one."
        raise ConfigError(message(f"cannot read {path}.", [why], mend)) from error
    hints = typing.get_type_hints(config)
    known = [field.name for field in dataclasses.fields(config) if field.name not in OWN_OPTIONS]
    result: dict[str, list[str]] = {}
    wrong: list[str] = []
    for key, value in pairs:
        name = key.replace("-", "_") if isinstance(key, str) else key
        if name not in known:
            wrong.append(f"{key}: unknown.{did_you_mean(str(name), known)}")
        elif name in result:
            wrong.append(f"{key}: stands twice")
        elif isinstance(given := _arguments(name, value, hints[name]), str):
            wrong.append(f"{key}: {given}, not {value!r}")
        else:
            result[name] = given
    if wrong:
        mend = f"Keys are the options of `{public_name().removesuffix(' --config')} --help`."
        raise ConfigError(message(f"cannot take all of {path}.", wrong, mend))
    return result


def _parse_toml(text: str) -> list[tuple[Any, Any]]:
    return list(tomllib.loads(text).items())


def _parse_yaml(text: str) -> list[tuple[Any, Any]]:
    """The pairs of a mapping. Events are looked at before anything is built of them."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEPTH:
            raise ValueError(f"it is more than {_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("it is no mapping of keys to values")
        return [
            (loader.construct_object(key, deep=True), loader.construct_object(value, deep=True))
            for key, value in node.value
        ]
    finally:
        loader.dispose()


def _arguments(name: str, value: Any, hint: Any) -> list[str] | str:
    """An option's arguments; or, as a text, the type that its value should have."""
    option = f"--{name.replace('_', '-')}"
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None:
        return [] if types.NoneType in kinds else _WORDS.get(kinds[0], "text")
    kind = next(kind for kind in kinds if kind is not types.NoneType)
    if kind is bool:
        return [option if value else f"--no-{option[2:]}"] if isinstance(value, bool) else _WORDS[bool]
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list) else [value]
        return [f"{option}={x}" for x in items] if all(isinstance(x, str) for x in items) else "text or a list of it"
    if get_origin(kind) is Literal:
        return [f"{option}={value}"] if value in get_args(kind) else f"one of {', '.join(get_args(kind))}"
    taken = _plain(value, kind)
    return [f"{option}={taken}"] if taken is not None else _WORDS[kind]


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "text",
}


def _plain(value: Any, kind: Any) -> str | None:
    """The text of a number or text; None for a value of another type."""
    if isinstance(value, bool):
        return None
    if kind is int:
        return str(value) if isinstance(value, int) else None
    if kind is float:
        if isinstance(value, str):  # YAML 1.1 takes 1e-3 for a text
            try:
                value = float(value)
            except ValueError:
                return None
        return str(value) if isinstance(value, int | float) else None
    if isinstance(value, datetime.datetime):  # a deadline
        return value.isoformat()
    return str(value) if isinstance(value, str | int) else None


# ---------------------------------------------------------------------------------------------------------- writing
def config_text(config: Any) -> str:
    """A configuration as YAML that `--config` reads back."""
    values = {k: v for k, v in dataclasses.asdict(config).items() if k not in OWN_OPTIONS}
    plain = {k: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1 << 20)
