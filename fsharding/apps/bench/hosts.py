"""A measurement on two hosts: the same command again, started by torchrun in each of two namespaces of this machine.

In: its options. Out: the exit status; rank 0 prints as it does on one host. Each rank has the threads that it has with
`--ranks` on one host, so the two can be compared.
Guarantee: the ranks get the options that were given, and no others.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from fsharding.apps.bench.options import StepConfig
from fsharding.apps.bench.step import check
from fsharding.base.calls import named
from fsharding.base.errors import ConfigError, message
from fsharding.testing.hosts import HostPair

__all__ = ["arguments_of", "on_two_hosts"]


@named("fsharding bench step")
def on_two_hosts(config: StepConfig) -> int:
    """Runs `fsharding bench step` on two hosts, and prints on rank 0.

    Args:
        config: what to measure; by default with one rank on each host.

    Returns:
        The exit status of the first host on which it failed; 0 if it did on none.

    Raises:
        ConfigError: this system cannot have two hosts, the ranks do not divide, or `bench_step` would refuse it.
    """
    check(config, "fsharding bench step")
    ranks = 2 if config.ranks is None else config.ranks
    if ranks < 2 or ranks % 2:
        text = f"cannot put {ranks} ranks on 2 hosts."
        raise ConfigError(message(text, mend="Give an even number: --ranks 4 --hosts 2."))
    outputs = [path.resolve().parent for path in (config.plot, config.trace) if path is not None]
    for folder in outputs:
        folder.mkdir(parents=True, exist_ok=True)
    # torchrun sets one thread only where a host has several ranks.
    env = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "KINETO_LOG_LEVEL": "6",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    env = {name: value for name, value in env.items() if name not in os.environ}
    with HostPair(shared=outputs) as pair:
        command = ["-m", "fsharding", "bench", "step", *arguments_of(config)]
        runs = pair.run(pair.torchrun(command, ranks=ranks // 2), env=env, capture=False)
    return next((run.returncode for run in runs if run.returncode), 0)


def arguments_of(config: Any) -> list[str]:
    """The command line of a configuration: the options that differ from their defaults.

    Args:
        config: a dataclass of options, none of which is required.

    Example:
        >>> from fsharding.apps.bench.options import StepConfig
        >>> arguments_of(StepConfig(rounds=3, contenders=("ddp", "fsdp2"), json=True))
        ['--contenders', 'ddp', 'fsdp2', '--rounds', '3', '--json']
    """
    result: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        name = f"--{field.name.replace('_', '-')}"
        if value == field.default:
            continue
        if isinstance(value, bool):
            result.append(name if value else f"--no-{name[2:]}")
        elif isinstance(value, tuple):
            result += [name, *map(str, value)]
        else:
            result += [name, str(value.resolve() if isinstance(value, Path) else value)]
    return result
