"""`compare_units`: compare units across ranks before each gather or reduction, for calls outside of a train step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

from torch.distributed.device_mesh import DeviceMesh

from fsharding.base.public import public, refuse
from fsharding.comm.step_agreement import comparison_of
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import Mesh
from fsharding.mesh.failures import naming_lost, order_here

__all__ = ["compare_units"]


@public
def compare_units(mesh: Mesh) -> AbstractContextManager[None]:
    """Compare units, and the plans of their collectives, between ranks before each one in the `with` block.

    For debugging: ranks at different units raise before they use one unit's bytes for the other's. Every unit costs a
    small collective and a wait. `make_train_step` does the same in its first step, and compares one hash in each later
    one. If losses look wrong, use it around a direct call of `value_and_grad` on an accelerator, or of `gather_unit`
    in `fs.shard_map`.

    Args:
        mesh: Mesh, all of whose ranks must enter the block.

    Returns:
        A context manager.

    Raises:
        ArgumentError: `mesh` isn't a mesh.
        RankError: Ranks are at different units; the error names both, with the line on each rank.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.ones(4)}, layout)
        >>> with fs.debug.compare_units(layout.mesh):
        ...     loss, grads = fs.value_and_grad(lambda p: fs.gather_unit(p)["w"].sum())(params)
        >>> float(loss)
        4.0
    """
    if not isinstance(mesh, DeviceMesh | AbstractMesh):
        raise refuse("a mesh", mesh, "Make one: mesh = fs.make_mesh(dp=-1).")
    return _comparing(mesh)


@contextmanager
def _comparing(mesh: Mesh) -> Generator[None]:
    with naming_lost("fs.debug.compare_units", mesh):
        order = order_here()
        if order is not None:
            order.always = order.comparison = comparison_of(mesh)
        yield
        if order is not None:
            order.end("units")
