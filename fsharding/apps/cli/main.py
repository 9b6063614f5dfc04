"""The command line: `fsharding VERB ...`, one clear message and exit status 2 for what a user can mend, 1 at run time.

In: arguments. Out: an exit status: 0 done, 1 failed at run time, 2 bad arguments or configuration, 130 interrupted,
or the one that was asked for if a run was told to stop.
Arguments are read before torch is imported, and configurations are checked before ranks start.
Guarantee: no traceback for what a user can mend.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn

import tyro

from fsharding.apps.bench.options import (
    CheckpointConfig,
    MemoryConfig,
    OptimizerConfig,
    OverheadConfig,
    OverlapConfig,
    PipelineConfig,
    RanksConfig,
    ReshardBenchConfig,
    ScalingConfig,
    StepConfig,
)
from fsharding.apps.cli.config_file import with_config_file
from fsharding.apps.cli.options import (
    DoctorConfig,
    ExportConfig,
    GenerateConfig,
    InspectConfig,
    ListConfig,
    PlanConfig,
    ReshardConfig,
    TrainConfig,
)
from fsharding.apps.cli.starting import quit_on_signals, tell
from fsharding.apps.cli.usage import check_options, check_values
from fsharding.base.errors import ConfigError, FshardingError, did_you_mean, report
from fsharding.base.version import own_version

__all__ = ["main"]

_BENCHES = {
    "step": (StepConfig, "A training step, beside DDP and FSDP2."),
    "memory": (MemoryConfig, "Memory of a step, beside DDP and FSDP2."),
    "scaling": (ScalingConfig, "How a step grows with ranks, units and parameters."),
    "ranks": (RanksConfig, "What a rank of thousands does by itself, beside FSDP2's."),
    "overhead": (OverheadConfig, "Host overhead of a step, beside FSDP2's."),
    "overlap": (OverlapConfig, "Which share of communication is hidden, at given rates."),
    "optimizer": (OptimizerConfig, "An update of AdamW, beside torch's fused one."),
    "checkpoint": (CheckpointConfig, "Saving and loading, beside torch's own."),
    "pipeline": (PipelineConfig, "Schedules of a pipeline, one beside the other."),
    "reshard": (ReshardBenchConfig, "Resharding, beside a raw all-to-all."),
    "list": (ListConfig, "List what can be measured."),
}
"""Measurements by name, each with its options and a line of help."""


def _subcommands(table: Mapping[str, tuple[Any, str]]) -> Any:
    """One of the options in a table, each under its name."""
    named = [
        Annotated[options, tyro.conf.subcommand(name, description=line)] for name, (options, line) in table.items()
    ]
    return functools.reduce(operator.or_, named)


_VERBS = {
    "train": (TrainConfig, "Train a decoder on bytes or tokens."),
    "generate": (GenerateConfig, "Continue a prompt with the model of a checkpoint."),
    "plan": (PlanConfig, "Show what a preset takes on a mesh of any size."),
    "bench": (_subcommands(_BENCHES), "Measure side by side with what people use."),
    "doctor": (DoctorConfig, "Look at this machine as ranks will see it."),
    "inspect": (InspectConfig, "Show a checkpoint and verify it."),
    "reshard": (ReshardConfig, "Write a checkpoint in another layout."),
    "export": (ExportConfig, "Write a checkpoint for another program."),
}
"""Verbs by name, each with its options and a line of help."""

_OPTIONS = ("--help", "--version")
"""What stands alone; `--tyro-print-completion` and the like are the parser's."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits."""
    given = list(sys.argv[1:] if args is None else args)
    if given == ["--version"]:
        print(f"fsharding {own_version()}")
        sys.exit(0)
    status = 0
    try:
        _check_verbs(given)
        given = with_config_file(given, "train", TrainConfig)
        command, options, rest = _command(given)
        if options is not None:
            check_options(command, options, rest)
        config: Any = tyro.cli(
            _subcommands(_VERBS),
            args=given,
            prog="fsharding",
            description="Functional sharding for PyTorch. fsharding --version prints the version.",
        )
        check_values(command, config)
        if isinstance(config, TrainConfig):
            quit_on_signals(config.preempt_status)
            tell(config, "loading torch")
        from fsharding.apps.cli.verbs import run  # lazy: it imports torch, for which no help waits

        status = run(config)
    except FshardingError as error:
        # Functions name themselves, which a user of the command line has not called.
        text = str(error) if str(error).startswith("fsharding") else f"{_command(given)[0]}: {error}"
        print(f"{type(error).__name__}: {text}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except BrokenPipeError:
        # The reader of the output is gone, as `head` is when it has enough; Python would complain again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt as error:
        print(f"Interrupted. {error}".rstrip(), file=sys.stderr, flush=True)
        sys.exit(130)
    sys.exit(status)


def _command(args: Sequence[str]) -> tuple[str, type[Any] | None, Sequence[str]]:
    """The words that say what to do, the options of that if there are such words, and the arguments after them."""
    if args and args[0] == "bench":
        name = args[1] if len(args) > 1 and args[1] in _BENCHES else ""
        return (f"fsharding bench {name}", _BENCHES[name][0], args[2:]) if name else ("fsharding bench", None, args[1:])
    name = args[0] if args and args[0] in _VERBS else ""
    return (f"fsharding {name}", _VERBS[name][0], args[1:]) if name else ("fsharding", None, args)


def _check_verbs(args: Sequence[str]) -> None:
    """Refuses a verb, or a measurement of `bench`, that there is not; the parser would not say which one is near."""
    if args and args[0].startswith("--") and args[0] not in _OPTIONS and not args[0].startswith("--tyro-"):
        mend = f"Write one of {', '.join(_VERBS)} first.{did_you_mean(args[0], _OPTIONS)}"
        raise ConfigError(report(f"fsharding has no {args[0]}.", mend=mend))
    for place, (name, names) in enumerate((("fsharding", _VERBS), ("fsharding bench", _BENCHES))):
        if len(args) <= place or args[place].startswith("-"):
            return
        if args[place] not in names:
            mend = f"Write one of {', '.join(names)}.{did_you_mean(args[place], names)}"
            raise ConfigError(report(f"{name} has no {args[place]!r}.", mend=mend))
        if args[0] != "bench":
            return
