"""The command line: `fsharding VERB ...`. Arguments are checked before torch is imported."""

from __future__ import annotations

import functools
import operator
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn

import tyro

from fsharding.apps.cli import options as declared
from fsharding.apps.cli.config_file import with_config_file
from fsharding.apps.cli.starting import quit_on_signals, tell
from fsharding.apps.cli.usage import check_options, check_values
from fsharding.base.errors import ConfigError, FshardingError, did_you_mean, report
from fsharding.base.version import own_version

__all__ = ["main"]


def _subcommands(table: Mapping[str, tuple[Any, str]]) -> Any:
    """Make a union of the options in a table, each under its name."""
    named = [
        Annotated[options, tyro.conf.subcommand(name, description=line)] for name, (options, line) in table.items()
    ]
    return functools.reduce(operator.or_, named)


_VERBS = {
    "train": (declared.TrainConfig, "Train a decoder on bytes or tokens."),
    "generate": (declared.GenerateConfig, "Continue a prompt with the model of a checkpoint."),
    "plan": (declared.PlanConfig, "Show what a preset takes on a mesh of any size."),
    "doctor": (declared.DoctorConfig, "Look at this machine as ranks will see it."),
    "inspect": (declared.InspectConfig, "Show a checkpoint and verify it."),
    "reshard": (declared.ReshardConfig, "Write a checkpoint in another layout."),
    "export": (declared.ExportConfig, "Write a checkpoint for another program."),
}
_OPTIONS = ("--help", "--version")  # without a verb; `--tyro-print-completion` and the like are the parser's


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    given = list(sys.argv[1:] if args is None else args)
    if given == ["--version"]:
        print(f"fsharding {own_version()}")
        sys.exit(0)
    if given[:1] == ["bench"]:
        print(f"In a checkout of the repository, type: {shlex.join(['python', '-m', *given])}", file=sys.stderr)
        sys.exit(2)
    status = 0
    try:
        _check_verbs(given)
        given = with_config_file(given, "train", declared.TrainConfig)
        command, options, rest = _command(given)
        if options is not None:
            check_options(command, options, rest)
        about = "Functional sharding for PyTorch. fsharding --version prints the version."
        config: Any = tyro.cli(_subcommands(_VERBS), args=given, prog="fsharding", description=about)
        check_values(command, config)
        if isinstance(config, declared.TrainConfig):
            quit_on_signals(config.preempt_status)
            tell(config, "loading torch")
        from fsharding.apps.cli.verbs import run  # lazy: imports torch, which --help doesn't need

        status = run(config)
    except FshardingError as error:
        # Errors of functions get the name of the command, which the user typed.
        text = str(error) if str(error).startswith("fsharding") else f"{_command(given)[0]}: {error}"
        print(f"{type(error).__name__}: {text}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt as error:
        print(f"Interrupted. {error}".rstrip(), file=sys.stderr, flush=True)
        sys.exit(130)
    sys.exit(status)


def _command(args: Sequence[str]) -> tuple[str, type[Any] | None, Sequence[str]]:
    """Split arguments into the command, its options if it exists, and the arguments after it."""
    name = args[0] if args and args[0] in _VERBS else ""
    return (f"fsharding {name}", _VERBS[name][0], args[1:]) if name else ("fsharding", None, args)


def _check_verbs(args: Sequence[str]) -> None:
    """Refuse an unknown subcommand with a suggestion, which the parser lacks."""
    if args and args[0].startswith("--") and args[0] not in _OPTIONS and not args[0].startswith("--tyro-"):
        mend = f"Write one of {', '.join(_VERBS)} first.{did_you_mean(args[0], _OPTIONS)}"
        raise ConfigError(report(f"fsharding has no {args[0]}.", mend=mend))
    if args and not args[0].startswith("-") and args[0] not in _VERBS:
        mend = f"Write one of {', '.join(_VERBS)}.{did_you_mean(args[0], _VERBS)}"
        raise ConfigError(report(f"fsharding has no {args[0]!r}.", mend=mend))
