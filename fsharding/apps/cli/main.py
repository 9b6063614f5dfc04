"""The command line: `fsharding VERB ...`. Arguments are checked before torch is imported."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn, Union

import tyro

from fsharding.apps.cli import options as declared
from fsharding.apps.cli.config_file import with_config_file
from fsharding.apps.cli.starting import quit_on_signals, tell
from fsharding.apps.cli.usage import check_options, check_values
from fsharding.base.calls import call_as
from fsharding.base.errors import ConfigError, FshardingError, did_you_mean, report
from fsharding.base.version import own_version

__all__ = ["VERBS", "main"]

# Options by verb; `run_VERB` of `verbs` takes them, and their docstring is the help.
VERBS = {
    "train": declared.TrainConfig,
    "generate": declared.GenerateConfig,
    "plan": declared.PlanConfig,
    "doctor": declared.DoctorConfig,
    "inspect": declared.InspectConfig,
    "reshard": declared.ReshardConfig,
    "export": declared.ExportConfig,
}


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    given = list(sys.argv[1:] if args is None else args)
    verb = given[0] if given else ""
    command = f"fsharding {verb}" if verb in VERBS else "fsharding"
    if given == ["--version"]:
        print(f"fsharding {own_version()}")
        sys.exit(0)
    if verb == "bench":
        print(f"In a checkout of the repository, type: {shlex.join(['python', '-m', *given])}", file=sys.stderr)
        sys.exit(2)
    status = 0
    try:
        if verb == "train":
            given = [verb, *with_config_file(given[1:])]
        if verb in VERBS:
            check_options(command, VERBS[verb], given[1:])
        elif verb and verb not in ("-h", "--help") and not verb.startswith("--tyro-"):  # the parser has these
            mend = f"Write one of {', '.join(VERBS)} first.{did_you_mean(verb, (*VERBS, '--help', '--version'))}"
            raise ConfigError(report(f"fsharding has no {verb}.", mend=mend))
        about = "Functional sharding for PyTorch. fsharding --version prints the version."
        either: Any = Union[*(Annotated[options, tyro.conf.subcommand(name)] for name, options in VERBS.items())]
        config: Any = tyro.cli(either, args=given, prog="fsharding", description=about)
        check_values(command, config)
        if isinstance(config, declared.TrainConfig):
            quit_on_signals(config.preempt_status)
            tell(config, "loading torch")
        from fsharding.apps.cli import verbs  # lazy: imports torch, which --help doesn't need

        status = call_as(command, getattr(verbs, f"run_{verb}"), config) or 0
    except FshardingError as error:
        # Errors of functions get the name of the command, which the user typed.
        text = str(error) if str(error).startswith("fsharding") else f"{command}: {error}"
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
