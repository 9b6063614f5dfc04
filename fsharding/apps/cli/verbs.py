"""The verbs of the command line: each configuration with the function that acts on it.

In: a configuration, as the parser made it. Out: an exit status. Where a verb needs ranks they are started here, unless
a launcher has started them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsharding import checkpoint
from fsharding.apps.cli.checkpoints import run_tool
from fsharding.apps.cli.config import check
from fsharding.apps.cli.config_file import config_text
from fsharding.apps.cli.doctor import doctor
from fsharding.apps.cli.generate import check_generate, generate
from fsharding.apps.cli.options import (
    DoctorConfig,
    ExportConfig,
    GenerateConfig,
    InspectConfig,
    PlanConfig,
    ReshardConfig,
    TrainConfig,
)
from fsharding.apps.cli.plan import preview
from fsharding.apps.cli.starting import hold_again, tell
from fsharding.apps.cli.train import train
from fsharding.base.calls import named
from fsharding.base.errors import ConfigError, RankError, message
from fsharding.mesh import preemption
from fsharding.mesh.launch import launch_ranks
from fsharding.mesh.rendezvous import under_launcher

__all__ = ["run"]


def run(config: Any) -> int:
    """Acts on a configuration.

    Returns:
        The exit status.
    """
    return _VERBS[type(config)](config) or 0


def _train(config: TrainConfig) -> int:
    if config.print_config:
        print(config_text(config), end="", flush=True)
        return 0
    ranks = _ranks(config.ranks)
    check(config, ranks)
    hold_again()
    try:
        if under_launcher() or ranks == 1:
            return train(config)
        if config.deadline:
            # Counted from here, and the same on all ranks.
            config = replace(config, deadline=preemption.parse_deadline(config.deadline).isoformat())
        tell(config, f"starting {ranks} ranks")
        return max(launch_ranks(train, ranks, config, grace=config.grace))
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(_what_is_left(config)) from error
    except RankError as error:
        raise RankError(f"{error}\n{_what_is_left(config)}", error.ranks, error.stacks) from error


def _what_is_left(config: TrainConfig) -> str:
    """What a run that ended without saving has left behind."""
    newest = checkpoint.latest(config.checkpoints)
    if newest is None:
        return f"There is no complete checkpoint in {config.checkpoints}."
    return f"The newest complete checkpoint is {newest}; the same command with --resume auto continues from it."


def _generate(config: GenerateConfig) -> int:
    ranks = _ranks(config.ranks)
    check_generate(config, ranks)
    if under_launcher() or ranks == 1:
        return generate(config)
    return max(launch_ranks(generate, ranks, config))


@named("fsharding")
def _ranks(asked: int | None) -> int:
    """How many ranks will run: those that a launcher started, or those that were asked for."""
    world = os.environ["WORLD_SIZE"] if under_launcher() else ""
    if world and not world.isdigit():
        text = f"got WORLD_SIZE={world!r} from a launcher."
        raise ConfigError(message(text, mend="Unset RANK and WORLD_SIZE, or start it by torchrun."))
    started = int(world) if world else None
    if started is not None and asked not in (None, started):
        text = f"got --ranks {asked}, but a launcher started {started} ranks."
        raise ConfigError(message(text, mend="Leave --ranks out under torchrun."))
    ranks = started or (1 if asked is None else asked)
    if ranks < 1:
        raise ConfigError(message(f"got --ranks {ranks}.", mend="Start at least one rank."))
    return ranks


_VERBS: dict[type[Any], Callable[[Any], int | None]] = {
    TrainConfig: _train,
    GenerateConfig: _generate,
    PlanConfig: preview,
    DoctorConfig: doctor,
    InspectConfig: run_tool,
    ReshardConfig: run_tool,
    ExportConfig: run_tool,
}
