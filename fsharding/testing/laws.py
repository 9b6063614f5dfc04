"""Checks that run on ranks: a map and its transpose, a function and its reference, a step that can be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.errors import message
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.mesh.device_mesh import Mesh, abstract, coordinate
from fsharding.ops.collectives import psum
from fsharding.sharding.named_sharding import Local, local_of, opened, sharding_of
from fsharding.testing.cases import local_part
from fsharding.testing.compare import compare
from fsharding.train.capture import refuse_host_work
from fsharding.train.state import TrainState
from fsharding.train.step import TrainStep

__all__ = ["assert_adjoint", "assert_capturable", "assert_matches_reference", "rank_values"]


def rank_values(
    shape: Sequence[int],
    mesh: Mesh,
    *,
    same: Sequence[str] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Draw normal values that differ between the ranks of a mesh, as inputs of `assert_adjoint`.

    Args:
        shape: Shape of this rank's tensor.
        mesh: Mesh of the ranks.
        same: Axes along which ranks get equal values.
        seed: Seed of the values.
        dtype: Element type.

    Returns:
        A CPU tensor.

    Example:
        >>> from fsharding.testing import rank_values
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> x = rank_values((2, 3), mesh, seed=1)
        >>> x.shape, x.dtype, torch.equal(x, rank_values((2, 3), mesh, seed=1))
        (torch.Size([2, 3]), torch.float64, True)
    """
    place = 0
    for name, size in zip(abstract(mesh).names, abstract(mesh).sizes, strict=True):
        place = place * size + (0 if name in same else coordinate(mesh)[name])
    generator = torch.Generator().manual_seed(seed * 4096 + place)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


@public
def assert_adjoint(
    op: Callable[[Any], Any],
    dual: Callable[[Any], Any],
    x: Tree,
    *,
    mesh: Mesh,
    same_in: Sequence[str] = (),
    same_out: Sequence[str] = (),
    seed: int = 0,
    what: str = "",
) -> None:
    """Assert that `<op(x), y> == <x, dual(y)>`, both summed over ranks, for a random y. Collective.

    Args:
        op: Linear map of tensors, or of trees of tensors, that all ranks apply together.
        dual: Expected transpose of `op`.
        x: This rank's argument; float64 gives the tightest check.
        mesh: Mesh of the ranks.
        same_in: Axes along which ranks share one x, which counts once: `("dp",)` for `pvary` over dp.
        same_out: Axes along which ranks share one output: `("dp",)` for `psum` over dp.
        seed: Seed of y.
        what: Name of the pair in the message.

    Raises:
        AssertionError: On every rank: the sums differ by more than rounding errors of the narrowest dtype, or the
            output of `dual` differs in shape from x on some rank.

    Example:
        >>> from fsharding.testing import assert_adjoint, rank_values
        >>> def psum(x):
        ...     return fs.ops.psum(x, "dp", mesh=mesh)
        >>> def vary(x):
        ...     return fs.ops.pvary(x, "dp", mesh=mesh)
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> assert_adjoint(psum, vary, rank_values((3,), mesh), mesh=mesh, same_out=("dp",))
    """
    out = op(x)
    flat, closed = opened(out)
    y = closed([rank_values(t.shape, mesh, same=same_out, seed=seed, dtype=t.dtype) for t in flat])
    back = dual(y)
    shapes = [[tuple(t.shape) for t in opened(side)[0]] for side in (x, back)]
    fits = shapes[0] == shapes[1]
    left, size = _inner(out, y, mesh, same_out)
    right, _ = _inner(x, back, mesh, same_in) if fits else (0.0, 0.0)
    own = torch.tensor([left, right, size, float(not fits)], dtype=torch.float64)
    left, right, size, wrong = psum(own, abstract(mesh).names, mesh=mesh).tolist()
    rounding = max(torch.finfo(t.dtype).eps for t in [*opened(out)[0], *opened(back)[0]])
    name = what or " and ".join(getattr(fn, "__qualname__", repr(fn)) for fn in (op, dual))
    if wrong:
        rows = [] if fits else [f"x has {shapes[0]} here, dual(op(x)) has {shapes[1]}"]
        rule = f"found that {name} aren't transposes: shapes differ on {wrong:g} rank{'s' * (wrong > 1)}."
        raise AssertionError(message(rule, rows))
    if not abs(left - right) <= 32 * rounding * (size + 1e-300):
        rows = [f"sum of <op x, y> is {left!r}", f"sum of <x, dual y> is {right!r}"]
        rule = f"found that {name} aren't transposes on mesh {abstract(mesh)}."
        raise AssertionError(message(rule, rows))


@public
def assert_matches_reference(
    fn: Callable[..., Tree],
    reference: Callable[..., Tree],
    *args: Tree,
    shardings: Sequence[Tree],
    rtol: float = 1e-5,
    atol: float = 1e-6,
    what: str = "",
) -> None:
    """Assert that `fn` of sharded trees equals `reference` of the full ones; each rank checks its shards.

    Args:
        fn: Function of sharded arguments. Returns a tree of DTensors, `Local`s, or plain tensors that all ranks share.
        reference: The same function of full plain tensors, without communication.
        *args: Trees of full plain tensors, equal on all ranks.
        shardings: Tree of `NamedSharding` for each argument; None keeps a leaf, or a full argument, plain.
        rtol: Relative tolerance; `rtol=0, atol=0` compares bits.
        atol: Absolute tolerance.
        what: Name of the result in the message.

    Raises:
        AssertionError: On ranks with a shard that differs. The message lists each such path.

    Example:
        >>> from fsharding.testing import assert_matches_reference
        >>> layout = fs.plan_layout({"w": torch.zeros(4, 2)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> def doubled(params):
        ...     return fs.tree.map(lambda x: 2 * x, params)
        >>> assert_matches_reference(doubled, doubled, {"w": torch.ones(4, 2)}, shardings=[layout.params])
    """
    result = fn(*(_placed(arg, where) for arg, where in zip(args, shardings, strict=True)))
    here = tree.map(lambda node: node.value if isinstance(node, Local) else local_of(node), result)
    parts = tree.map(_shard, result, reference(*args))
    compare(here, parts, what, None if rtol == atol == 0 else (rtol, atol))


@public
def assert_capturable(step: TrainStep, state: TrainState, batch: Tree) -> None:
    """Assert, without a GPU, that `fs.capture` accepts a step. Collective.

    Runs three steps on a copy of the state. The second and third must run the same operations on the same shapes and
    numbers, and in both the host must not read a tensor.

    Args:
        step: Train step of `make_train_step`, with `check="async"`.
        state: State for the step; it is not changed.
        batch: This rank's batch.

    Raises:
        TransformError: The host reads a tensor on the device or copies one to it, or operations differ between steps;
            the message has the lines.
        ConfigError: The step was made with `check="sync"`.
        ArgumentError: `step` isn't a train step, or `state` isn't a state.

    Example:
        >>> def loss(params, batch):
        ...     error = (batch["x"] @ fs.gather_unit(params)["w"]).square().sum()
        ...     return error * 2 if error.item() > 1 else error
        >>> state, step = fs.setup({"w": torch.ones(4)}, loss, fs.sgd(0.1), fs.random.key(0), check="async")
        >>> try:
        ...     fs.testing.assert_capturable(step, state, {"x": torch.ones(3, 4)})
        ... except TypeError as error:
        ...     print(str(error).splitlines()[0])
        fs.testing.assert_capturable cannot capture a step in which the host reads the device.
    """
    refuse_host_work(step, state, batch)


def _inner(a: Tree, b: Tree, mesh: Mesh, same: Sequence[str]) -> tuple[float, float]:
    """Return this rank's part of an inner product, and of the sum of magnitudes, which bounds the rounding error."""
    if any(coordinate(mesh).get(axis, 0) for axis in same):
        return 0.0, 0.0
    products = [(x.double() * y.double()).flatten() for x, y in zip(opened(a)[0], opened(b)[0], strict=True)]
    terms = torch.cat(products) if products else torch.zeros(0, dtype=torch.float64)
    return float(terms.sum()), float(terms.abs().sum())


def _placed(arg: Tree, where: Tree) -> Tree:
    if where is None:
        return arg
    return tree.map(lambda x, s: x if s is None else s.to_dtensor(local_part(x, s), x.shape), arg, where)


def _shard(node: Any, full: Tensor) -> Tensor:
    if isinstance(node, Local):
        return local_part(full, node.sharding)
    return local_part(full, sharding_of(node)) if isinstance(node, DTensor) else full
