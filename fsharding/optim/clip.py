"""The global norm of a sharded tree, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.errors import ConfigError, LayoutError, message
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.comm.leaf_memory import on_device
from fsharding.comm.step_agreement import StepAgreement
from fsharding.comm.transport import start_sum
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import abstract, axis_group
from fsharding.optim.base import ContextTransformation, EmptyState, UpdateContext, multiply, transformation
from fsharding.optim.windows import in_windows
from fsharding.sharding.boxes import chunk
from fsharding.sharding.named_sharding import Local, NamedSharding, hides_owners, local_of, sharding_of
from fsharding.transforms.norms import counts_here, norm_in_flight

__all__ = ["LeafSquares", "carrier_sum", "clip_by_global_norm", "global_norm", "norm_axes", "square_sums"]

_CHUNK = 1 << 18
"""Elements that are widened at once: 2 MiB, which stay in the last-level cache. Smaller chunks are slower."""

_LARGE = 1 << 18
"""Size of a leaf from which ranks with equal copies divide the work."""


@public
def global_norm(values: Tree, *, shardings: Tree = None) -> Tensor:
    """Compute the L2 norm over all leaves and all ranks: float32, 0-d, the same on every rank. Collective.

    Squares are summed in float64. In a loss function or `fs.shard_map` it is differentiable, as `fs.tree.vdot` is.

    Args:
        values: Tree of DTensors, `Local` nodes and plain tensors.
        shardings: Their shardings, such as `layout.main`; needed for leaves with explicit assignments.

    Returns:
        The norm; 0 for a tree without leaves.

    Raises:
        LayoutError: Leaves are not reduced yet, or have assignments but no `shardings`; all are listed.
        TreeError: The trees do not match.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(2)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> fs.global_norm(fs.shard({"w": torch.tensor([3.0, 4.0])}, layout))
        tensor(5.)
    """
    if any(isinstance(x, Local) for x in tree.leaves(values)):
        return norm_in_flight(values)
    return square_sums(None, values, shardings).norm()


class LeafSquares(NamedTuple):
    """Sums of squares of full leaves, from which a norm is computed."""

    paths: tuple[str, ...]
    sums: Tensor  # float64[leaves], the same on every rank

    def norm(self) -> Tensor:
        """Return the global norm, float32, 0-d."""
        return self.sums.sum().sqrt().float()

    def not_finite(self) -> list[str]:
        """Return paths of leaves with a NaN or an infinity on some rank; the host reads the sums."""
        bad = torch.isfinite(self.sums).logical_not().tolist()
        return [path for path, wrong in zip(self.paths, bad, strict=True) if wrong]


def square_sums(agreement: StepAgreement | None, values: Tree, shardings: Tree) -> LeafSquares:
    """Return the squares of `global_norm`; one sum also carries the step's agreement over the remaining axes."""
    named = tree.named_leaves(values)
    given: dict[str, NamedSharding | None] = dict.fromkeys(named)
    if shardings is not None:
        flat = tree.flatten_up_to(tree.flatten(values)[1], shardings, ("values", "shardings"))
        given = dict(zip(named, flat, strict=True))
    elif hidden := [path for path, x in named.items() if isinstance(x, DTensor) and hides_owners(x)]:
        mend = "Pass their shardings: fs.global_norm(grads, shardings=layout.main)."
        raise LayoutError(message("cannot tell which ranks own leaves with assignments.", hidden, mend))
    sharding_at = {path: _sharding(x, given[path]) for path, x in named.items()}
    unreduced = [f"{path}: {s}" for path, s in sharding_at.items() if s is not None and s.partial]
    if unreduced:
        mend = "Reduce them first: fs.value_and_grad(loss_fn, grads=layout.main)."
        raise LayoutError(message("needs reduced gradients.", unreduced, mend))
    squares: dict[str, Tensor] = {}
    for group in in_windows(named):
        squares |= _square_sums({path: _share(named[path], sharding_at[path]) for path in group})
    groups: dict[tuple[str, ...], list[str]] = {}
    meshes: dict[tuple[str, ...], NamedSharding] = {}
    for path, s in sharding_at.items():
        if s is not None and not counts_here(s):
            squares[path] = torch.zeros_like(squares[path])
        axes = () if s is None else norm_axes(s, named[path].numel())
        groups.setdefault(axes, []).append(path)
        if s is not None:
            meshes[axes] = s
    carrier = carrier_sum(groups, agreement.axes) if agreement is not None else None
    for axes, paths in groups.items():
        if axes:
            # One all-reduce for all leaves that sum over the same axes; one of them also carries the agreement.
            terms = [squares[path] for path in paths]
            if agreement is not None and axes == carrier:
                terms.append(agreement.as_term(terms[0].device))
            total = start_sum(torch.stack(terms), axis_group(meshes[axes].mesh, axes), torch.float64).wait()
            if agreement is not None and axes == carrier:
                agreement.summed(total[-1], axes)
                total = total[:-1]
            squares.update(zip(paths, total.unbind(), strict=True))
    sums = torch.stack(list(squares.values())) if squares else torch.zeros(0, dtype=torch.float64)
    return LeafSquares(tuple(squares), sums)


def carrier_sum(sums: Iterable[tuple[str, ...]], axes: Sequence[str]) -> tuple[str, ...] | None:
    """Return the smallest sum over some axes that can carry one more number; None if none can."""
    return min((over for over in sums if axes and {*axes} <= {*over}), key=lambda over: (len(over), over), default=None)


def norm_axes(sharding: NamedSharding, numel: int) -> tuple[str, ...]:
    """Return the axes over which the squares of a leaf are summed: those that shard it or divide the work."""
    sharded = (*sharding.simplified().spec.all_axes, *(a.axis for a in sharding.assigned))
    return tuple(a for a in AXES if a in sharded or a in _copies(sharding, numel))


def _copies(sharding: NamedSharding, numel: int) -> tuple[str, ...]:
    """Return the data axes whose ranks divide the squares of a leaf: it is large, and they have equal copies."""
    if numel < _LARGE:
        return ()
    used = sharding.spec.all_axes
    shape = abstract(sharding.mesh)
    return tuple(a for a in sharding.data_axes if a not in used and shape.axis_size(a) > 1)


def _share(x: Tensor, sharding: NamedSharding | None) -> Tensor:
    """Return the elements that this rank squares, flat."""
    flat = (on_device(local_of(x), x.device_mesh.device_type) if isinstance(x, DTensor) else x).detach().reshape(-1)
    copies = _copies(sharding, x.numel()) if sharding is not None else ()
    if sharding is None or not copies:
        return flat
    group = axis_group(sharding.mesh, copies)
    first, end = chunk(flat.numel(), group.size, group.index)
    return flat[first:end]


def _sharding(x: Tensor, given: NamedSharding | None) -> NamedSharding | None:
    if not isinstance(x, DTensor):
        return None
    return sharding_of(x) if given is None or not given.assigned else given


def _square_sums(shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sum of squares of each share (float64, 0-d)."""
    squares = {path: _square_sum(flat) for path, flat in shares.items() if flat.device.type == "cpu"}
    # On a device one kernel reads many leaves of a dtype; `linalg.vector_norm` would copy each to float64 first.
    away: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for path, flat in shares.items():
        if path not in squares:
            away.setdefault((flat.device, flat.dtype), []).append(path)
    for paths in away.values():
        norms = _compat.foreach_norm([shares[path] for path in paths])
        squares.update((path, norm.square()) for path, norm in zip(paths, norms, strict=True))
    return {path: squares[path] for path in shares}


def _square_sum(flat: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    buffer = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float64)
    for part in flat.split(_CHUNK) if flat.numel() else ():  # torch 2.11 can't split an empty fake tensor
        wide = buffer[: part.numel()].copy_(part)
        total += torch.dot(wide, wide)
    return total


@public
def clip_by_global_norm(max_norm: float) -> ContextTransformation:
    """Clip by the global norm (Pascanu et al. 2013, arXiv:1211.5063): `g * min(1, max_norm / (norm + 1e-6))`.

    As `torch.nn.utils.clip_grad_norm_`, over all leaves and all ranks; optax has no 1e-6.

    Args:
        max_norm: Largest global norm, above 0; infinity leaves gradients unchanged.

    Returns:
        A stateless `ContextTransformation`, to be put before an optimizer in `fs.optim.chain`.

    Raises:
        ConfigError: `max_norm` isn't above 0.

    Example:
        >>> clip = fs.optim.clip_by_global_norm(1.0)
        >>> clip.update({"w": torch.tensor([3.0, 4.0])}, clip.init(None))[0]["w"]
        tensor([0.6000, 0.8000])
    """
    if not max_norm > 0:
        mend = "Pass a norm above 0; math.inf leaves gradients unchanged."
        raise ConfigError(message(f"got max_norm={max_norm}.", mend=mend))

    def change(updates: Tree, state: EmptyState, _: Tree, context: UpdateContext) -> tuple[Tree, EmptyState]:
        scale = factor(global_norm(updates) if context.norm is None else context.norm)
        return multiply(updates, scale, donate=context.donate), state

    def factor(norm: Tensor) -> Tensor:
        return torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    return transformation(lambda *_: EmptyState(), change, factor=factor, by_element=True, needs_norm=True)
