"""The command line: `fsharding VERB ...`, one clear message and exit status 2 for what a user can mend, 1 at run time.

In: arguments. Out: an exit status: 0 done, 1 failed at run time, 2 bad arguments or configuration, 130 interrupted,
or the one that was asked for if a run was told to stop.
Configurations are checked before ranks start. Law: no traceback for what a user can mend.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NoReturn

import tyro

from fsharding.bench import (
    CheckpointConfig,
    MemoryConfig,
    OptimizerConfig,
    OverheadConfig,
    RanksConfig,
    ReshardBenchConfig,
    ScalingConfig,
    StepConfig,
    bench_checkpoint,
    bench_memory,
    bench_optimizer,
    bench_ranks,
    bench_reshard,
    bench_scaling,
    bench_step,
    overhead,
)
from fsharding.checkpoint.saving import own_version
from fsharding.cli.checkpoints import ExportConfig, InspectConfig, ReshardConfig, ToolConfig, run_tool
from fsharding.cli.config import TrainConfig, check
from fsharding.cli.config_file import config_text, with_config_file
from fsharding.cli.doctor import DoctorConfig, doctor
from fsharding.cli.plan import PlanConfig, preview
from fsharding.cli.train import train
from fsharding.errors import ConfigError, FshardingError, message
from fsharding.mesh import preemption
from fsharding.mesh.launch import launch_ranks, under_launcher

__all__ = ["main"]


@dataclass(frozen=True)
class ListConfig:
    """The measurements of `fsharding bench`.

    Attributes:
        json: print one JSON object.
    """

    json: bool = False


_Train = Annotated[TrainConfig, tyro.conf.subcommand("train", description="Train a decoder on bytes or tokens.")]
_Plan = Annotated[
    PlanConfig, tyro.conf.subcommand("plan", description="Show what a preset takes on a mesh of any size.")
]
_Doctor = Annotated[
    DoctorConfig, tyro.conf.subcommand("doctor", description="Look at this machine as ranks will see it.")
]
_Overhead = Annotated[
    OverheadConfig, tyro.conf.subcommand("overhead", description="Host overhead of a step, beside FSDP2's.")
]
_Optimizer = Annotated[
    OptimizerConfig, tyro.conf.subcommand("optimizer", description="An update of AdamW, beside torch's fused one.")
]
_Checkpoint = Annotated[
    CheckpointConfig, tyro.conf.subcommand("checkpoint", description="Saving and loading, beside torch's own.")
]
_Moving = Annotated[
    ReshardBenchConfig, tyro.conf.subcommand("reshard", description="Resharding, beside a raw all-to-all.")
]
_Memory = Annotated[
    MemoryConfig,
    tyro.conf.subcommand("memory", description="Memory of a step, beside DDP and FSDP2."),
]
_Scaling = Annotated[
    ScalingConfig, tyro.conf.subcommand("scaling", description="How a step grows with ranks, units and parameters.")
]
_Ranks = Annotated[
    RanksConfig, tyro.conf.subcommand("ranks", description="What a rank of thousands does by itself, beside FSDP2's.")
]
_Step = Annotated[StepConfig, tyro.conf.subcommand("step", description="A training step, beside DDP and FSDP2.")]
_Bench = Annotated[
    _Step
    | _Memory
    | _Scaling
    | _Ranks
    | _Overhead
    | _Optimizer
    | _Checkpoint
    | _Moving
    | Annotated[ListConfig, tyro.conf.subcommand("list", description="List what can be measured.")],
    tyro.conf.subcommand("bench", description="Measure side by side with what people use."),
]


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits.

    Args:
        args: by default those of the process.
    """
    given = list(sys.argv[1:] if args is None else args)
    if given == ["--version"]:
        print(f"fsharding {own_version()}")
        sys.exit(0)
    try:
        given = with_config_file(given, "train", TrainConfig)
    except ConfigError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    config = tyro.cli(
        _Train | _Plan | _Bench | _Doctor | ToolConfig,
        args=given,
        prog="fsharding",
        description="Functional sharding for PyTorch. fsharding --version prints the version.",
    )
    status = 0
    try:
        if isinstance(config, TrainConfig):
            status = _train(config)
        elif isinstance(config, PlanConfig):
            preview(config)
        elif isinstance(config, DoctorConfig):
            status = doctor(config)
        elif isinstance(config, InspectConfig | ReshardConfig | ExportConfig):
            status = run_tool(config)
        elif isinstance(config, ListConfig):
            names = ("step", "memory", "scaling", "ranks", "overhead", "optimizer", "checkpoint", "reshard")
            print(json.dumps({"benches": names}) if config.json else ", ".join(names))
        elif isinstance(config, ScalingConfig):
            bench_scaling(config)
        elif isinstance(config, RanksConfig):
            bench_ranks(config)
        elif isinstance(config, OptimizerConfig):
            bench_optimizer(config)
        else:
            _bench(config)
    except FshardingError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except BrokenPipeError:
        # The reader of the output is gone, as `head` is when it has enough; Python would complain again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("Interrupted; complete checkpoints are intact.", file=sys.stderr, flush=True)
        sys.exit(130)
    sys.exit(status)


def _train(config: TrainConfig) -> int:
    if config.print_config:
        print(config_text(config), end="", flush=True)
        return 0
    ranks = _ranks(config.ranks, default=1)
    check(config, ranks)
    if under_launcher() or ranks == 1:
        return train(config)
    if config.deadline:
        # Counted from here, and the same on all ranks.
        config = replace(config, deadline=preemption.parse_deadline(config.deadline).isoformat())
    return max(launch_ranks(train, ranks, config, grace=config.grace))


_BENCHES: dict[type[Any], Callable[[Any], None]] = {
    StepConfig: bench_step,
    OverheadConfig: overhead,
    MemoryConfig: bench_memory,
    CheckpointConfig: bench_checkpoint,
    ReshardBenchConfig: bench_reshard,
}


def _bench(config: StepConfig | MemoryConfig | OverheadConfig | CheckpointConfig | ReshardBenchConfig) -> None:
    ranks, run = _ranks(config.ranks, default=2), _BENCHES[type(config)]
    if under_launcher():
        run(config)
    else:
        # One rank, too: torch's DDP and FSDP2 want a process group.
        launch_ranks(run, ranks, config)


def _ranks(asked: int | None, *, default: int) -> int:
    """How many ranks will run: those that a launcher started, or those that were asked for."""
    world = os.environ["WORLD_SIZE"] if under_launcher() else ""
    if world and not world.isdigit():
        text = f"got WORLD_SIZE={world!r} from a launcher."
        raise ConfigError(message("fsharding", text, mend="Unset RANK and WORLD_SIZE, or start it by torchrun."))
    started = int(world) if world else None
    if started is not None and asked not in (None, started):
        text = f"got --ranks {asked}, but a launcher started {started} ranks."
        raise ConfigError(message("fsharding", text, mend="Leave --ranks out under torchrun."))
    ranks = started or (default if asked is None else asked)
    if ranks < 1:
        raise ConfigError(message("fsharding", f"got --ranks {ranks}.", mend="Start at least one rank."))
    return ranks
