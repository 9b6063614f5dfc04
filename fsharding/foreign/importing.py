"""`load_weights`: tensors of another program become DTensors in a layout, each rank reading its own boxes alone."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.errors import CheckpointError, message
from fsharding.base.local_paths import check_local
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.checkpoint.collective_call import agreed, on_all
from fsharding.checkpoint.directory import StrPath
from fsharding.checkpoint.state_leaves import Want, main_wants
from fsharding.foreign.foreign_weights import Weights, not_cast, weights_at
from fsharding.foreign.name_map import SAME_BUFFERS, Names, Part, constants_of, other_constants, parts_by_leaf
from fsharding.mesh.meeting import called_by_all
from fsharding.sharding.boxes import Box
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_names import MEND, objections_to_names
from fsharding.sharding.named_sharding import LeafType, local_of, sharding_of

__all__ = ["load_weights"]


@public
@called_by_all
def load_weights(
    path: StrPath,
    like: Layout | Tree,
    names: Names = None,
    *,
    prefix: str = "",
    cast: bool = False,
    extra: Literal["refuse", "ignore"] = "refuse",
) -> Tree:
    """Reads weights that another program wrote. Collective over all ranks, which have to see one file system.

    Args:
        path: a `torch.save` file, a directory of torch DCP, or safetensors; see `open_weights`.
        like: a layout, for main parameters as `fs.state_from_params` takes them; or a tree of tensors, such as an
            optimizer state, whose shapes, dtypes and shardings the result has.
        names: what our leaves are called there: a table by dotted path, or a function. Blocks are stacked here, so
            `{"blocks.wq": "layers.{i}.attn.wq.weight"}`; `Transposed(name)` swaps the last two dims,
            and `Rows(name, (3, 4))` says what `{i}` is in each row. `net.sources` of a functionalized module has all.
        prefix: take the names that begin with it, without it.
        cast: accept other dtypes, and cast.
        extra: "ignore" lets tensors be that nothing asks for.

    Returns:
        A tree of new tensors. For a layout: main parameters in `layout.main`, frozen ones in `layout.params`.

    Raises:
        CheckpointError: on every rank, with all tensors that are missing, extra, or of another shape or dtype; or
            weights that cannot be read.
        ConfigError: the path is a URL.
        LayoutError: the layout is on an abstract mesh.

    Example:
        >>> import tempfile
        >>> layout = fs.plan_layout({"w": torch.zeros(2, 3)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"linear.weight": torch.ones(2, 3)}, f"{folder}/model.pt")
        ...     params = fs.foreign.load_weights(f"{folder}/model.pt", layout, {"w": "linear.weight"})
        >>> state = fs.state_from_params(params, fs.adamw(1e-3), fs.random.key(0), layout)
        >>> fs.unshard(state.params["w"]).shape
        torch.Size([2, 3])
    """
    check_local(path)
    wants = main_wants(like) if isinstance(like, Layout) else _of_tree(like)
    structure = like.structure if isinstance(like, Layout) else tree.flatten(like)[1]

    def look() -> tuple[Weights, str]:
        weights = weights_at(path, prefix)
        return weights, hashlib.sha256(repr(sorted(weights.leaves.items())).encode()).hexdigest()

    weights = agreed(look, f"finds {path} different on different ranks.", "sees other tensors")
    named = _compare(weights, wants, names, prefix, cast=cast, strict=extra == "refuse")
    read = on_all(lambda: [_read(weights, named[leaf], want) for leaf, want in wants.items()])
    return tree.unflatten(structure, read)


# ------------------------------------------------------------------------------------------------------- what is wanted


def _of_tree(like: Tree) -> dict[str, Want]:
    if odd := objections_to_names(tree.paths(like)):
        raise CheckpointError(message(f"cannot name {len(odd)} leaves.", odd, MEND))

    def want(x: Any) -> Want:
        sharding = sharding_of(x) if isinstance(x, DTensor) else None
        return Want(tuple(x.shape), x.dtype, sharding, local_of(x).device)

    return {path: want(x) for path, x in tree.named_leaves(like).items()}


def _compare(
    weights: Weights, wants: dict[str, Want], names: Names, prefix: str, *, cast: bool, strict: bool
) -> dict[str, list[Part]]:
    """Return the foreign tensors of each leaf; refuse weights that are not the wanted ones, and list everything."""
    rows: list[str] = []
    named = parts_by_leaf(names, {path: want.shape for path, want in wants.items()}, rows)
    used = {part.name for own in named.values() for part in own}
    for path, part in ((path, part) for path, own in named.items() for part in own):
        if why := weights.unread.get(part.name):
            rows.append(f"{path}: {part.name} is not read: {why}")
        elif why := _objection(part, wants[path], weights.leaves.get(part.name), cast=cast):
            rows.append(f"{path}: {part.name} {why}")
    if strict:
        others = {name: leaf for name, leaf in {**weights.leaves, **weights.unread}.items() if name not in used}
        rows += [f"{name} is extra: {leaf}" for name, leaf in others.items() if name not in constants_of(names)]
    rows += (unlike := other_constants(names, weights))
    if not rows:
        return named
    mend = "Say what they are called there: names={ours: theirs}"
    mend += f"; {SAME_BUFFERS}" if unlike else ""
    if not cast and any(", wanted is " in row for row in rows):
        mend += "; cast=True casts"
    if strict and any(" is extra: " in row for row in rows):
        mend += "; extra='ignore' leaves the rest"
    if not prefix and (common := _common_prefix(weights, used)):
        mend += f"; prefix={common!r} looks below it"
    rule = f"cannot use {weights.path}: {len(rows)} tensors are not as they should be."
    raise CheckpointError(message(rule, rows, f"{mend}."))


def _objection(part: Part, want: Want, stored: LeafType | None, *, cast: bool) -> str | None:
    wanted = LeafType(part.shape, want.dtype)
    if stored is None:
        return f"is missing; wanted is {wanted}"
    if why := not_cast(stored, wanted.dtype):
        return f"is not read: {why}"
    if stored.shape != wanted.shape or (stored.dtype != wanted.dtype and not cast):
        return f"is {stored}, wanted is {wanted}"
    return None


def _common_prefix(weights: Weights, used: set[str]) -> str | None:
    """A prefix below which everything is that was not found without it."""
    first = next(iter(used), "")
    prefixes = [name.removesuffix(first) for name in weights.leaves if name.endswith(f".{first}")]
    return next((p for p in prefixes if all(f"{p}{name}" in weights.leaves for name in used)), None)


# -------------------------------------------------------------------------------------------------------------- reading


def _read(weights: Weights, parts: list[Part], want: Want) -> Tensor:
    """One leaf in new memory."""
    leaf = want.empty()
    for box, x in leaf.kept().items():
        for part in parts:
            _read_part(weights, part, box, x)
    return leaf.at_rest()


def _read_part(weights: Weights, part: Part, box: Box, x: Tensor) -> None:
    """The part of a foreign tensor in a box of a leaf."""
    depth = len(part.lead)
    if not all(start <= index < stop for index, (start, stop) in zip(part.lead, box, strict=False)):
        return
    out = x[tuple(index - start for index, (start, _) in zip(part.lead, box, strict=False))]
    inner = box[depth:]
    if part.transposed:
        out = out.mT
        inner = (*inner[:-2], inner[-1], inner[-2])
    weights.read(part.name, inner, out)
