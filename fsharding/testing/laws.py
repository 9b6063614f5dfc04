"""Checks that run on the ranks: two maps are each other's transpose; a function is its reference; a step is a graph.

Guarantee: a map and its transpose agree on every inner product, `<op x, y> == <x, dual y>`, summed over ranks.
"""

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
    """Normal values that are other ones on every rank of a mesh: what `assert_adjoint` is fed with.

    Args:
        shape: of this rank's tensor.
        mesh: whose ranks differ.
        same: axes along which ranks get the same values.
        seed: other values for another seed.
        dtype: element type.

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
    """Checks that `sum over ranks of <op(x), y>` is `sum over ranks of <x, dual(y)>`, where y is drawn. Collective.

    Args:
        op: a linear map of tensors, or trees of them, that all ranks of the mesh apply together.
        dual: what should be its transpose.
        x: this rank's argument; float64 makes the check sharp.
        mesh: whose ranks are summed over.
        same_in: axes along which x is one value that the ranks share, so that it counts once: `dp` for a `pvary` on it.
        same_out: the same for what comes out: `dp` for a `psum` over it.
        seed: of y.
        what: name of the pair, for the message.

    Raises:
        AssertionError: on every rank: the two numbers differ by more than rounding in the narrowest dtype, or what
            `dual` gives on some rank has other shapes than x.

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
        rule = f"found that {name} are no transposes: shapes differ on {wrong:g} ranks."
        raise AssertionError(message(rule, rows))
    if not abs(left - right) <= 32 * rounding * (size + 1e-300):
        rows = [f"sum of <op x, y> is {left!r}", f"sum of <x, dual y> is {right!r}"]
        rule = f"found that {name} are no transposes on mesh {abstract(mesh)}."
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
    """Checks that `fn` of sharded trees is what `reference` gives for the whole ones. Each rank checks what it holds.

    Args:
        fn: takes each argument sharded; returns a tree of DTensors, `Local`s, or plain tensors that all ranks share.
        reference: the same function of whole plain tensors; it must not speak to other ranks.
        *args: trees of whole plain tensors, the same on all ranks.
        shardings: for each argument, a tree of `NamedSharding`; None leaves a leaf, or all of an argument, plain.
        rtol: relative tolerance; with `rtol=0, atol=0` all bits have to agree.
        atol: absolute tolerance.
        what: name of what is compared, for the message.

    Raises:
        AssertionError: on the ranks that hold something that differs; each such path is listed.

    Example:
        >>> from fsharding.testing import assert_matches_reference
        >>> layout = fs.plan_layout({"w": torch.zeros(4, 2)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> def doubled(params):
        ...     return fs.tree.map(lambda x: 2 * x, params)
        >>> assert_matches_reference(doubled, doubled, {"w": torch.ones(4, 2)}, shardings=[layout.params])
    """
    result = fn(*(_placed(arg, where) for arg, where in zip(args, shardings, strict=True)))
    want = reference(*args)
    own, spec = tree.flatten(result)
    theirs = tree.flatten_up_to(spec, want)
    here = tree.unflatten(spec, [node.value if isinstance(node, Local) else local_of(node) for node in own])
    parts = tree.unflatten(spec, [_cut(whole, node) for whole, node in zip(theirs, own, strict=True)])
    compare(here, parts, what, None if rtol == atol == 0 else (rtol, atol))


@public
def assert_capturable(step: TrainStep, state: TrainState, batch: Tree) -> None:
    """Refuses a step that `fs.capture` would refuse, without a GPU. Collective.

    It makes three steps on a copy of the state: the first as any, then two whose operations on which shapes and numbers
    are compared, and in which the host must not read a tensor.

    Args:
        step: of `make_train_step` with `check="async"`.
        state: a state for it, which is left as it is.
        batch: this rank's part.

    Raises:
        TransformError: the host reads the device, takes a tensor from the host to it, or the operations differ from
            call to call; with the lines.
        ConfigError: the step was made with `check="sync"`.
        ArgumentError: no step or no state.

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
    """This rank's term of an inner product, and of the sum of the magnitudes of its terms."""
    if any(coordinate(mesh).get(axis, 0) for axis in same):
        return 0.0, 0.0
    products = [(x.double() * y.double()).flatten() for x, y in zip(opened(a)[0], opened(b)[0], strict=True)]
    terms = torch.cat(products) if products else torch.zeros(0, dtype=torch.float64)
    return float(terms.sum()), float(terms.abs().sum())


def _placed(arg: Tree, where: Tree) -> Tree:
    if where is None:
        return arg
    flat, spec = tree.flatten(arg)
    shardings = tree.flatten_up_to(spec, where)
    return tree.unflatten(
        spec,
        [x if s is None else s.to_dtensor(local_part(x, s), x.shape) for x, s in zip(flat, shardings, strict=True)],
    )


def _cut(whole: Tensor, node: Any) -> Tensor:
    if isinstance(node, Local):
        return local_part(whole, node.sharding)
    return local_part(whole, sharding_of(node)) if isinstance(node, DTensor) else whole
