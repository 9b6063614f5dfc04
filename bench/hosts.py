"""A measurement on two hosts: the same command, started by torchrun in each of two namespaces of this machine.

Each rank has as many threads as with `--ranks` on one host, so the two can be compared.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.options import StepConfig
from fsharding.base.errors import ConfigError, report
from tests.two_hosts import HostPair

__all__ = ["arguments_of", "on_two_hosts"]


def on_two_hosts(config: StepConfig) -> int:
    """Run `python -m bench step` on two hosts; return the first exit status that isn't 0, or 0."""
    ranks = 2 if config.ranks is None else config.ranks
    if ranks < 2 or ranks % 2:
        text = f"cannot put {ranks} ranks on 2 hosts."
        raise ConfigError(report(text, mend="Give an even number: --ranks 4 --hosts 2."))
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
        command = ["-m", "bench", "step", *arguments_of(config)]
        runs = pair.run(pair.torchrun(command, ranks=ranks // 2), env=env, capture=False)
    return next((run.returncode for run in runs if run.returncode), 0)


def arguments_of(config: Any) -> list[str]:
    """Return the command line of a configuration: the options that differ from their defaults."""
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
