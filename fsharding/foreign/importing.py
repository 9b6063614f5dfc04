"""`load_weights`: load another program's tensors as DTensors of a layout; each rank reads only its own boxes."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

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
from fsharding.foreign.name_map import SAME_BUFFERS, Names, Piece, misfits, other_constants, parts_by_leaf, read_leaf
from fsharding.mesh.meeting import called_by_all
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
    """Load weights that another program wrote. Collective over all ranks, which must share a file system.

    Args:
        path: Path of a `torch.save` file, a DCP directory, or safetensors; see `open_weights`.
        like: Layout, to load main parameters for `fs.state_from_params`; or a tree of tensors, such as an optimizer
            state, to load a tree of the same shapes, dtypes and shardings.
        names: Names of our leaves in the files: a dict by dotted path, or a function of the path. `{i}` stands for the
            index in a stack: `{"blocks.wq": "layers.{i}.attn.wq.weight"}`. `Transposed(name)` swaps the last two dims;
            `Rows(name, (3, 4))` lists the values of `{i}`. For a functionalized module, pass `net.sources`.
        prefix: Prefix of the names to read, which is removed.
        cast: Whether to cast tensors of different dtypes rather than refuse them.
        extra: Whether to "refuse" or "ignore" tensors that match no leaf.

    Returns:
        A tree of new tensors; for a layout, main parameters sharded as `layout.main`, frozen ones as `layout.params`.

    Raises:
        CheckpointError: Files that cannot be read; tensors that are missing, extra, or of a different shape or dtype,
            all listed on every rank.
        ConfigError: The path is a URL.
        LayoutError: The layout is on an abstract mesh.

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
    # Ranks compare the names, shapes and dtypes that they see: if one differs, all raise, and none hangs.
    rule = f"finds {path} different on different ranks."
    weights = agreed(lambda: weights_at(path, prefix), lambda x: sorted(x.leaves.items()), rule, "sees other tensors")
    named = _compare(weights, wants, names, prefix, cast=cast, strict=extra == "refuse")
    # Leaf by leaf: a leaf that is kept off the device needs memory to be read into only until it is there.
    read = on_all(lambda: [read_leaf(weights, named[path], want.empty()) for path, want in wants.items()])
    return tree.unflatten(structure, read)


def _of_tree(like: Tree) -> dict[str, Want]:
    if odd := objections_to_names(tree.paths(like)):
        raise CheckpointError(message("cannot use the paths of some leaves as names.", odd, MEND))

    def want(x: Any) -> Want:
        sharding = sharding_of(x) if isinstance(x, DTensor) else None
        return Want(tuple(x.shape), x.dtype, sharding, local_of(x).device)

    return {path: want(x) for path, x in tree.named_leaves(like).items()}


def _compare(
    weights: Weights, wants: dict[str, Want], names: Names, prefix: str, *, cast: bool, strict: bool
) -> dict[str, list[Piece]]:
    """Return the foreign tensors of each leaf; raise an error that lists everything that doesn't match."""
    rows: list[str] = []
    named = parts_by_leaf(names, {path: want.shape for path, want in wants.items()}, rows)
    rows += misfits(weights, named, names, wants, partial(_objection, cast=cast), () if strict else None)
    rows += (unlike := [*other_constants(names, weights)])
    if not rows:
        return named
    mend = "Pass their names in the files, names={ours: theirs}"
    mend += f"; {SAME_BUFFERS}" if unlike else ""
    if not cast and any(", wanted is " in row for row in rows):
        mend += "; cast=True casts"
    if strict and any(" is extra: " in row for row in rows):
        mend += "; extra='ignore' skips extra ones"
    if not prefix and (common := _common_prefix(weights, {x.name for own in named.values() for x in own})):
        mend += f"; prefix={common!r} reads the names below it"
    rule = f"cannot use {weights.path}: its tensors do not match."
    raise CheckpointError(message(rule, rows, f"{mend}."))


def _objection(piece: Piece, want: Want, stored: LeafType | None, *, cast: bool) -> str | None:
    wanted = LeafType(piece.shape, want.dtype)
    if stored is None:
        return f"is missing; wanted is {wanted}"
    if why := not_cast(stored, wanted.dtype):
        return f"is not read: {why}"
    if stored.shape != wanted.shape or (stored.dtype != wanted.dtype and not cast):
        return f"is {stored}, wanted is {wanted}"
    return None


def _common_prefix(weights: Weights, used: set[str]) -> str | None:
    """Return the prefix under which all names would be found, or None."""
    first = next(iter(used), "")
    prefixes = [name.removesuffix(first) for name in weights.leaves if name.endswith(f".{first}")]
    return next((p for p in prefixes if all(f"{p}{name}" in weights.leaves for name in used)), None)
