"""Measurements beside what people use: `python -m bench step`, `memory` and others; `--help` lists them.

Options are read and checked before torch is imported and before ranks start.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import tyro

from bench.options import (
    CheckpointConfig,
    MemoryConfig,
    OptimizerConfig,
    OverheadConfig,
    OverlapConfig,
    PipelineConfig,
    RanksConfig,
    ReshardConfig,
    ScalingConfig,
    StepConfig,
    wrong_numbers,
)
from fsharding.apps.cli.usage import check_options, check_values
from fsharding.base.errors import ConfigError, FshardingError, did_you_mean, report

__all__ = ["BENCHES", "main"]

BENCHES = {
    "step": (StepConfig, "A training step, beside DDP and FSDP2."),
    "memory": (MemoryConfig, "Memory of a step, beside DDP and FSDP2."),
    "scaling": (ScalingConfig, "How a step grows with ranks, units and parameters."),
    "ranks": (RanksConfig, "What a rank of thousands does by itself, beside FSDP2's."),
    "overhead": (OverheadConfig, "Host overhead of a step, beside FSDP2's."),
    "overlap": (OverlapConfig, "Which share of communication is hidden, at given rates."),
    "optimizer": (OptimizerConfig, "An update of AdamW, beside torch's fused one."),
    "checkpoint": (CheckpointConfig, "Saving and loading, beside torch's own."),
    "pipeline": (PipelineConfig, "Schedules of a pipeline, side by side."),
    "reshard": (ReshardConfig, "Resharding, beside a raw all-to-all."),
}
"""Options and help of each measurement: `bench_NAME` of the module NAME, which may have a `check` of the options."""

_ON_RANKS = ("step", "memory", "overhead", "checkpoint", "pipeline", "reshard")
"""The others run in this process, or start ranks themselves."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one measurement and exit: with 0, 1 after a failure, 2 for wrong options."""
    given = list(sys.argv[1:] if args is None else args)
    name = given[0] if given else ""
    command = f"python -m bench {name}".rstrip()
    status = 0
    try:
        if name and not name.startswith("-") and name not in BENCHES:
            mend = f"Write one of {', '.join(BENCHES)}.{did_you_mean(name, BENCHES)}"
            raise ConfigError(report(f"python -m bench has no {name!r}.", mend=mend))
        if name in BENCHES:
            check_options(command, BENCHES[name][0], given[1:])
        kinds = [Annotated[kind, tyro.conf.subcommand(key, description=line)] for key, (kind, line) in BENCHES.items()]
        either: Any = functools.reduce(operator.or_, kinds)
        config: Any = tyro.cli(either, args=given, prog="python -m bench")
        check_values(command, config)
        if rows := wrong_numbers(config):
            raise ConfigError(report(f"{command} cannot measure this.", rows))
        status = _run(name, config)
    except FshardingError as error:
        text = str(error) if str(error).startswith("python -m bench") else f"{command}: {error}"
        print(f"{type(error).__name__}: {text}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    sys.exit(status)


def _run(name: str, config: Any) -> int:
    """Measure in this process, on the ranks of a launcher, or on new ones; return the exit status."""
    from fsharding.mesh.launch import launch_ranks  # lazy: it imports torch, as do the measurements
    from fsharding.mesh.rendezvous import under_launcher  # lazy: the same

    module = importlib.import_module(f"bench.{name}")
    if hasattr(module, "check"):
        module.check(config)
    measure = getattr(module, f"bench_{name}")
    if name in _ON_RANKS and under_launcher() and config.ranks not in (None, int(os.environ["WORLD_SIZE"])):
        text = f"got {config.ranks} ranks, but a launcher started {os.environ['WORLD_SIZE']}."
        raise ConfigError(report(text, mend="Leave --ranks out under torchrun; reshard needs 4."))
    if name == "step" and config.hosts == 2 and not under_launcher():
        return importlib.import_module("bench.hosts").on_two_hosts(config)
    if name in _ON_RANKS and not under_launcher():
        # One rank is started, too: DDP and FSDP2 want a process group.
        launch_ranks(measure, config.ranks or 2, config)
    else:
        measure(config)
    return 0


if __name__ == "__main__":
    main()
