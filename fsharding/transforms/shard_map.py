"""`shard_map`: run a function on local tensors, with DTensors outside.

For every sharding of the arguments, each rank gets its part of the result of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor

from fsharding.base import _compat, _functorch, tree
from fsharding.base.errors import TransformError, message
from fsharding.base.public import check_function, public, refuse_compiled
from fsharding.base.tree import Tree
from fsharding.mesh.device_mesh import Mesh, abstract, set_mesh
from fsharding.mesh.failures import order_here
from fsharding.sharding.named_sharding import Local, hides_owners, to_local, typeof
from fsharding.sharding.partition_spec import P
from fsharding.transforms.gather_unit import local_nodes

__all__ = ["shard_map"]


@public
@_compat.outside_of_graphs
def shard_map(fn: Callable[..., Any], *, mesh: Mesh | None = None) -> Callable[..., Any]:
    """Wrap a function of `Local` nodes so that it takes and returns DTensors; like JAX's `shard_map`, without specs.

    `fn` runs on every rank. It receives DTensors as `Local` nodes (this rank's shards), and other arguments unchanged;
    `fs.ops` finds the mesh. A `Local` that it returns, such as a gradient, becomes a DTensor with the node's sharding;
    leading dims that a transform added are replicated. Other results belong to this rank alone.

        hvp = fs.shard_map(lambda p, v: torch.func.jvp(torch.func.grad(loss), (p,), (v,))[1])

    Inside, you differentiate the sum of all ranks' results. A result of `ops.psum` is shared by all ranks and
    counts once. `fs.value_and_grad` takes DTensors: call it outside.

    Args:
        fn: Function of trees. Apply transforms inside.
        mesh: Mesh for `fs.ops`; needed only without DTensors. Default: the DTensors' mesh.

    Returns:
        A function of the same arguments.

    Raises:
        TransformError: Called under a torch.func transform, with leaves on pipeline stages or DTensors on several
            meshes; or `fn` returns nodes whose values don't match their shardings.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.ones(4)}, layout)
        >>> def loss(params):  # this rank's part: gradients are sums over all ranks
        ...     return fs.gather_unit(params)["w"].square().sum() / layout.mesh.size()
        >>> grads = fs.shard_map(torch.func.grad(loss))(params)
        >>> fs.unshard(grads["w"])
        tensor([2., 2., 2., 2.])
    """
    check_function("a function of trees", fn, 0)

    @functools.wraps(fn)
    @public
    @_compat.never_inlined
    def run(*args: Any, **kwargs: Any) -> Any:
        refuse_compiled("Compile the function inside: fs.shard_map(torch.compile(fn)).")
        if _functorch.in_functorch():
            mend = "Transform the function inside: fs.shard_map(torch.func.grad(f))."
            raise TransformError(message("cannot run under a torch.func transform.", mend=mend))
        _check(tree.named_leaves((args, kwargs)))
        nodes, spec = local_nodes((args, kwargs))
        here = mesh or next((x.sharding.mesh for x in nodes if isinstance(x, Local)), None)
        given_args, given_kwargs = tree.unflatten(spec, nodes)
        order = order_here()
        if order is not None and order.comparison is not None:
            named = zip(tree.paths((args, kwargs)), nodes, strict=True)
            order.names = {_compat.storage_id(x.value): path for path, x in named if isinstance(x, Local)}
        with nullcontext() if here is None else set_mesh(here):
            out = fn(*given_args, **given_kwargs)
        return _at_rest(out)

    return run


def _check(leaves: dict[str, Any]) -> None:
    """Refuse leaves of pipeline stages, and leaves on several meshes."""
    at_rest = {path: x for path, x in leaves.items() if isinstance(x, DTensor)}
    if staged := [f"{path} is {typeof(x)}" for path, x in at_rest.items() if hides_owners(x)]:
        mend = "Reshard to a layout without stages first: fs.reshard(state, layout)."
        raise TransformError(message("cannot tell which ranks own leaves with assignments.", staged, mend))
    meshes = {path: to_local(x).sharding.mesh for path, x in at_rest.items()}
    if len(set(meshes.values())) > 1:
        rows = [f"{path} is on {abstract(m)}" for path, m in meshes.items()]
        mend = "Bring them to one mesh: fs.reshard(state, layout)."
        raise TransformError(message("needs all leaves on one mesh.", rows, mend))


def _at_rest(out: Tree) -> Tree:
    """Convert nodes of a result to DTensors; dims in front of a node's shape are replicated."""
    wrong: list[str] = []

    def rest(path: str, x: Any) -> Any:
        if not isinstance(x, Local):
            return x
        extra = x.value.ndim - len(x.shape)
        lead = tuple(x.value.shape[: max(extra, 0)])
        if extra < 0 or lead + x.sharding.local_shape(x.shape) != tuple(x.value.shape):
            here = list(x.sharding.local_shape(x.shape))
            wrong.append(f"{path} is {typeof(x)}, which is {here} here, but holds {list(x.value.shape)}")
            return x
        sharding = replace(x.sharding, spec=P(*(None,) * extra, *x.sharding.spec)) if extra else x.sharding
        return sharding.to_dtensor(x.value, (*lead, *x.shape))

    result = tree.map_with_path(rest, out)
    if wrong:
        mend = "Return the plain tensor, node.value, if it isn't a shard of such a leaf."
        raise TransformError(message("got nodes whose values do not match their shardings.", wrong, mend))
    return result
