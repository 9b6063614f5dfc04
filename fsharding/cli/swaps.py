"""Swaps of strategy and mesh in mid-run: `--swap-at 50=zero1,100=zero3:replica=2,dp=2`.

In: the text of the option. Out: plain values; a swap at step N comes before step N + 1 is taken.
What a swap leaves out stays as it was. Law: a run that swaps has the losses of one that does not.
"""

from __future__ import annotations

from typing import NamedTuple

from fsharding.errors import ConfigError, message
from fsharding.mesh.abstract_mesh import AXES
from fsharding.sharding.strategy import STRATEGIES

__all__ = ["Swap", "parse_swaps"]


class Swap(NamedTuple):
    """One swap.

    Attributes:
        step: number of updates before it.
        strategy: name of the new strategy.
        mesh: axes of the new mesh, as `--mesh` has them; "" for the mesh as it is.
    """

    step: int
    strategy: str
    mesh: str


def parse_swaps(text: str) -> tuple[Swap, ...]:
    """The swaps of an option, by step.

    Raises:
        ConfigError: text that cannot be read, an unknown strategy, a step below 1 or one that stands twice.
    """
    swaps: list[Swap] = []
    for part in filter(None, text.split(",")):
        if swaps and swaps[-1].mesh and part.partition("=")[0].strip() in AXES:
            swaps[-1] = swaps[-1]._replace(mesh=f"{swaps[-1].mesh},{part}")
            continue
        step, equals, rest = part.partition("=")
        strategy, _, mesh = rest.partition(":")
        if not equals or not step.strip().isdigit() or int(step) < 1 or strategy not in STRATEGIES:
            mend = f"Write STEP=STRATEGY or STEP=STRATEGY:dp=4, with one of {', '.join(STRATEGIES)}."
            raise ConfigError(message("fsharding train", f"cannot read {part!r} in --swap-at {text}.", mend=mend))
        swaps.append(Swap(int(step), strategy, mesh))
    steps = [swap.step for swap in swaps]
    if twice := sorted({step for step in steps if steps.count(step) > 1}):
        raise ConfigError(message("fsharding train", f"got --swap-at {text}: step {twice[0]} stands twice."))
    return tuple(sorted(swaps))
