"""`load`: read a checkpoint into any layout of the same model, or raise an error that lists all problems.

Guarantee: `load(save(x, A), B) == reshard(x, B)`, bitwise, for every strategy, mesh and precision.
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.errors import CheckpointError, did_you_mean, message
from fsharding.base.public import check_path, public
from fsharding.base.tree import Tree
from fsharding.checkpoint import directory
from fsharding.checkpoint.collective_call import on_all, together
from fsharding.checkpoint.directory import StrPath
from fsharding.checkpoint.manifest import METADATA, OTHER, Manifest, SavedFile, SavedLeaf
from fsharding.checkpoint.positions import Stateful, check_stateful, select
from fsharding.checkpoint.reader import DamagedError, Source, damage, open_source
from fsharding.checkpoint.serialized_layout import rebuild
from fsharding.checkpoint.state_leaves import (
    BUFFERS,
    StateLeaf,
    Want,
    device_of,
    leaves_in,
    main_wants,
    saved_shardings,
)
from fsharding.comm.tier_room import take_room
from fsharding.formats.precision import ScaleState
from fsharding.mesh.device_mesh import own_rank, world_size
from fsharding.mesh.meeting import called_by_all
from fsharding.optim.base import GradientTransformation
from fsharding.sharding.boxes import Box
from fsharding.sharding.layout import Layout
from fsharding.train.state import TrainState, refrozen, rounding_key, sealed, spread

__all__ = ["load", "load_leaves"]

_CPU = torch.device("cpu")


@public
@called_by_all
def load(
    path: StrPath,
    layout: Layout,
    *,
    opt: GradientTransformation | None = None,
    cast: bool = False,
    data: Stateful | None = None,
) -> TrainState:
    """Load a checkpoint into a layout of the same model, on any mesh and strategy. Collective.

    Compute-dtype parameters are cast from the main parameters, as in a step. A saved loss scale is dropped
    if the layout has none; one that wasn't saved starts at its initial value.

    Args:
        path: Checkpoint directory.
        layout: Layout of the result; its mesh may have a different number of ranks than the one that saved.
        opt: Optimizer. Its `init` runs on the meta device to check the optimizer state, so it can't read values. It may
            be omitted for fsharding's optimizers. With it, the layout may freeze different leaves than the checkpoint;
            newly trained leaves get new moments.
        cast: Whether to cast leaves whose dtype differs; otherwise they raise.
        data: Data to resume at the saved position. If all data ranks had one position, as with `fs.data.packed`, any
            mesh can resume it; otherwise the number of data ranks must match.

    Returns:
        The state, bitwise equal to the saved one unless cast.

    Raises:
        CheckpointError: on every rank, a missing, incomplete or damaged checkpoint, a newer format version, or a
            different model, optimizer or main dtype; all leaves and files are listed. With `data`, a missing position,
            a different number of data ranks, or a position that the data refuses.
        LayoutError: a layout on an abstract mesh.
        ArgumentError: arguments that aren't a path and a layout; pass `state.layout` instead of a state.
        RankError: a rank is lost, or doesn't make the call.

    Example:
        >>> mesh, opt = fs.make_mesh(dp=-1, device="cpu"), fs.adamw(1e-3)
        >>> layout, other = (fs.plan_layout({"w": torch.zeros(4)}, mesh, strategy=fs.zero(k)) for k in (1, 3))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, opt, fs.random.key(0), layout)
        >>> fs.checkpoint.save("run/5", state)
        >>> fs.unshard(fs.checkpoint.load("run/5", other, opt=opt).params["w"])
        tensor([1., 1., 1., 1.])
    """
    check_path("a path, then a Layout", path, "fs.checkpoint.load(path, layout)")
    device_of(layout)
    if data is not None:
        check_stateful(data)
    folder, manifest, damaged = _look(path)
    position = select(str(folder), manifest, layout) if data is not None else None
    # Load with the leaves frozen that were frozen, so that the moments match; `refrozen` then changes which are.
    wanted_layout = layout
    if opt is not None:
        layout = layout.with_frozen(manifest.layout.get("frozen", ()))
    wanted, opt_state = _wanted(layout, manifest, opt)
    rows = [f"{path} is extra: {saved}" for path, saved in manifest.tree.items() if path not in wanted]
    rows += _changed_frozen(manifest, wanted, layout) if opt is None else []
    _compare(folder, manifest, wanted, rows, damaged, cast=cast)
    leaves = [(want.sharding, want.shape, want.dtype) for want in wanted.values() if want.sharding is not None]
    copies = layout.leaves if layout.has_main else ()
    take_room(layout, [*leaves, *((leaf.params, leaf.shape, layout.param_dtype(leaf)) for leaf in copies)])
    result = _assemble(_read(folder, manifest, wanted), opt_state, layout)
    if opt is not None and layout is not wanted_layout:
        result = refrozen(result, wanted_layout, opt)
    if data is not None:
        on_all(lambda: None if position is None else data.load_state_dict(position))
    return result


@public
def load_leaves(
    path: StrPath, paths: str | Sequence[str], layout: Layout | None = None, *, cast: bool = False
) -> dict[str, Tensor]:
    """Load some leaves of a checkpoint; only their parts of the files are read.

    Args:
        path: Checkpoint directory.
        paths: Dotted paths as in the manifest, or prefixes: `params.blocks` selects every leaf below it.
        layout: Layout with all of the leaves, which become DTensors as in `load`; the call is collective then. By
            default each leaf is a full CPU tensor in its saved dtype, and any process may make the call alone.
        cast: Whether to cast leaves that have different dtypes than the layout, instead of raising.

    Returns:
        The leaves by path.

    Raises:
        CheckpointError: as in `load`, a path that matches no leaf, or parameters that the layout lacks.
        LayoutError: a layout on an abstract mesh.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> fs.checkpoint.save("run/5", state)
        >>> fs.checkpoint.load_leaves("run/5", "params")
        {'params.w': tensor([1., 1., 1., 1.])}
    """
    chosen = [paths] if isinstance(paths, str) else [*paths]
    if layout is None:
        folder, manifest = directory.found(path)
        if damaged := damage(folder, manifest.files, hashed=False):
            raise _refusal(folder, manifest, damaged)
        tree_of = {leaf: manifest.tree[leaf] for leaf in _chosen(folder, manifest, chosen)}
        _check_memory(folder, tree_of)
        whole = {leaf: Want(saved.shape, getattr(torch, saved.dtype), None, _CPU) for leaf, saved in tree_of.items()}
        return _fetch(open_source(folder, manifest), whole)
    return _load_leaves(path, chosen, layout, cast=cast)


@called_by_all
def _load_leaves(path: StrPath, chosen: Sequence[str], layout: Layout, *, cast: bool) -> dict[str, Tensor]:
    device_of(layout)
    folder, manifest, damaged = _look(path)
    paths = _chosen(folder, manifest, chosen)
    known = _wanted_leaves(layout, manifest, paths)
    extra = [f"{path} is extra: {manifest.tree[path]}" for path in paths if path not in known]
    wanted = {path: known[path] for path in paths if path in known}
    _compare(folder, manifest, wanted, extra, damaged, cast=cast)
    return _read(folder, manifest, wanted)


def _chosen(folder: Path, manifest: Manifest, paths: Sequence[str]) -> list[str]:
    """Select the leaves at paths or below them."""
    leaves = sorted(manifest.tree)
    result: dict[str, None] = {}
    missing: list[str] = []
    for path in dict.fromkeys(paths):
        # "/" is the character after ".": between the two are the paths that continue with a dot.
        below = leaves[bisect_left(leaves, f"{path}.") : bisect_left(leaves, f"{path}/")]
        found = [path, *below] if path in manifest.tree else below
        result |= dict.fromkeys(found)
        missing += [] if found else [path]
    if missing:
        # Comparing all pairs of texts could take hours: only the first ones, which the error shows, get suggestions.
        known = [leaf for leaf in leaves if len(leaf) <= _LONGEST_GUESS]
        guessed = {path for path in missing[:_SUGGESTED] if len(path) <= _LONGEST_GUESS}
        rows = [f"{path}: unknown.{did_you_mean(path, known) if path in guessed else ''}" for path in missing]
        rule = f"finds no such leaves in {folder}."
        raise CheckpointError(message(rule, rows, "fs.checkpoint.metadata(path).tree has all paths."))
    return [*result]


_SUGGESTED = 10
_LONGEST_GUESS = 200


def _check_memory(folder: Path, leaves: Mapping[str, SavedLeaf]) -> None:
    """Refuse leaves larger than this machine's memory; a sparse file can claim any size without using the disk."""
    wanted = sum(math.prod(leaf.shape) * getattr(torch, leaf.dtype).itemsize for leaf in leaves.values())
    if wanted > (there := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        rows = [f"{path} is {leaf}" for path, leaf in leaves.items()]
        rule = f"cannot load {wanted:,} bytes of {folder}: this machine has {there:,}."
        mend = "Pass a layout, so that each rank reads its part: load_leaves(path, paths, layout)."
        raise CheckpointError(message(rule, rows, mend))


def _look(path: StrPath) -> tuple[Path, Manifest, list[str]]:
    """Find the directory and its manifest, equal on all ranks, and the files that are missing or truncated."""

    def read() -> tuple[tuple[Path, Manifest], tuple[str, str, list[str]]]:
        folder = directory.find(path)
        manifest = directory.read_manifest(folder)
        share = _share(manifest)
        rows = damage(folder, share, hashed=False)
        if manifest.chunks is not None and not rows:  # torch's metadata isn't parsed, but its checksum must be right
            rows = damage(folder, {name: file for name, file in share.items() if name == METADATA})
        return (folder, manifest), (str(folder), hashlib.sha256(repr(manifest).encode()).hexdigest(), rows)

    own, result = together(read)
    if len({(folder, digest) for folder, digest, _ in result}) > 1:
        rows = [
            f"rank {r}: {folder}, its manifest has the digest {digest[:12]}..."
            for r, (folder, digest, _) in enumerate(result)
        ]
        raise CheckpointError(message("found different checkpoints on different ranks.", rows))
    return *own, [row for _, _, rows in result for row in rows]


def _share(manifest: Manifest) -> dict[str, SavedFile]:
    """Select the files that this rank checks."""
    return dict(list(manifest.files.items())[own_rank() :: world_size()])


def _wanted_leaves(layout: Layout, manifest: Manifest, of_opt: Sequence[str]) -> dict[str, Want]:
    """Describe the leaves of a state in this layout, with the given paths of the optimizer state."""
    mains = main_wants(layout)
    wanted = {leaf.path_in("params"): mains[leaf.path] for leaf in layout.leaves}
    wanted["step"] = Want((), torch.int64, None, _CPU)
    wanted["key"] = Want((2,), torch.int64, None, _CPU)
    if "loss_scale.scale" in manifest.tree:
        wanted["loss_scale.scale"] = Want((), torch.float32, None, _CPU)
        wanted["loss_scale.good_steps"] = Want((), torch.int64, None, _CPU)
    homes = saved_shardings(manifest, layout) if of_opt else {}
    some = {*of_opt}
    for path, saved in manifest.tree.items():
        dtype = getattr(torch, saved.dtype)
        if path.startswith(BUFFERS):
            wanted[path] = Want(saved.shape, dtype, None, device_of(layout))
        elif path.startswith("opt_state") and path in some:
            home = homes[path]
            wanted[path] = Want(saved.shape, dtype, home, _CPU if home is None else device_of(layout))
    return wanted


def _wanted(layout: Layout, manifest: Manifest, opt: GradientTransformation | None) -> tuple[dict[str, Want], Tree]:
    """Describe the leaves of a state in this layout, and build the optimizer state with paths as leaves."""
    if opt is None:
        opt_state = rebuild(manifest.structure, lambda path: path)
        paths = tree.leaves(opt_state)
        if missing := [path for path in paths if path not in manifest.tree]:
            rule = f"cannot read a checkpoint whose optimizer state has {len(missing)} leaves that it does not list."
            mend = "Use a different checkpoint, or a copy of this one; or pass the optimizer, opt=."
            raise CheckpointError(message(rule, missing, mend))
        return _wanted_leaves(layout, manifest, paths), opt_state
    # On the meta device the optimizer's `init` gives every shape and dtype without memory; only counts have values.
    wanted = _wanted_leaves(layout, manifest, ())
    kept, whole, stacked = layout.precision.moments, layout.meta_main(), layout.stacked
    first = opt.start(_meta_main(layout), moments=kept, shardings=layout.main, whole=whole, stacked=stacked)
    state = {"opt_state": first}
    moments = layout.moments(first)
    memory = {entry.path: entry.sharding.memory for entry in moments.values()}
    leaves = leaves_in(state, moments)
    saved_as = _in_other_groups(leaves, manifest)
    for path, leaf in leaves.items():
        device = device_of(layout) if leaf.local.is_meta else leaf.local.device
        sharding = leaf.sharding and replace(leaf.sharding, memory=memory.get(path, "device"))
        wanted[saved_as.get(path, path)] = Want(leaf.shape, leaf.local.dtype, sharding, device)
    return wanted, tree.map_with_path(lambda path, _: saved_as.get(path, path), state)["opt_state"]


def _in_other_groups(wanted: Collection[str], manifest: Manifest) -> dict[str, str]:
    """Map moments that the checkpoint has in a different group of `multi_transform` to their saved paths."""

    def without_group(path: str) -> list[tuple[list[str], list[str]]]:
        parts = path.split(".")
        return [(parts[: i + 1], parts[i + 2 :]) for i, part in enumerate(parts) if part == "groups"]

    others = {repr(at): path for path in manifest.tree if path not in wanted for at in without_group(path)}
    missing = [path for path in wanted if path not in manifest.tree] if others else []
    return {path: others[repr(at)] for path in missing for at in without_group(path) if repr(at) in others}


def _meta_main(layout: Layout) -> Tree:
    """Build main parameters without memory; None for frozen leaves."""
    wants = main_wants(layout)
    leaves = [wants[leaf.path].without_memory().at_rest() if leaf.trainable else None for leaf in layout.leaves]
    return tree.unflatten(layout.structure, leaves)


def _compare(
    folder: Path, manifest: Manifest, wanted: dict[str, Want], also: list[str], damaged: list[str], *, cast: bool
) -> None:
    """Refuse leaves that differ from the wanted ones, listed with the rows of `also`, and then damaged files."""
    other: list[str] = []
    dtypes: list[str] = []
    for path, want in wanted.items():
        saved = manifest.tree.get(path)
        if saved is None:
            other.append(f"{path} is missing; wanted is {want}")
        elif saved.shape != want.shape:
            other.append(f"{path} is {saved}; wanted is {want}")
        elif str(saved) != str(want) and not cast:
            dtypes.append(f"{path} is {saved}; wanted is {want}")
    other += also
    rows = [*other, *dtypes]
    # Not before comparing: a checkpoint of a different model is the better reason.
    if not rows and damaged:
        raise _refusal(folder, manifest, damaged)
    if not rows:
        return
    if any(not row.startswith("opt_state") for row in other):
        what = "another model"
        mend = "Plan the layout with the model, and the frozen leaves, that were saved."
        if all(row.endswith("in the layout") for row in other if row.startswith("params")):
            mend += " To train other leaves, give the optimizer: opt=..."
    elif other:
        what = "another optimizer"
        mend = "Give the optimizer that was saved: opt=..."
    else:
        what = "another precision"
        mend = "Load it with the dtypes that were saved, or with cast=True."
    rule = f"cannot use {folder}: it is a checkpoint of {what}; {len(rows)} leaves differ."
    raise CheckpointError(message(rule, rows, mend))


def _changed_frozen(manifest: Manifest, wanted: dict[str, Want], layout: Layout) -> list[str]:
    """List leaves that are frozen in only one of checkpoint and layout: without `opt`, their moments can't be made."""
    if not any(path.startswith("opt_state") and want.sharding is not None for path, want in wanted.items()):
        return []
    frozen = manifest.layout.get("frozen", ())
    return [
        f"{leaf.path_in('params')} was {'trained' if leaf.path not in frozen else 'frozen'}, and is "
        f"{'trained' if leaf.trainable else 'frozen'} in the layout"
        for leaf in layout.leaves
        if leaf.trainable == (leaf.path in frozen) and leaf.path_in("params") in manifest.tree
    ]


def _refusal(folder: Path, manifest: Manifest, rows: list[str]) -> CheckpointError:
    rule = f"refuses {folder}: {len(rows)} of its {len(manifest.files)} files are damaged."
    return CheckpointError(message(rule, sorted(rows), OTHER))


def _read(folder: Path, manifest: Manifest, wanted: Mapping[str, Want]) -> dict[str, Tensor]:
    """Read the wanted leaves into new memory. If one rank finds damage, all ranks check every file. Collective."""

    def attempt() -> tuple[dict[str, Tensor], str]:
        try:
            return _fetch(open_source(folder, manifest), wanted), ""
        except DamagedError as error:
            return {}, str(error)

    read, problems = together(attempt)
    if met := [text for text in problems if text]:
        _, parts = together(lambda: (None, damage(folder, _share(manifest))))
        rows = [row for part in parts for row in part]
        raise _refusal(folder, manifest, rows) if rows else CheckpointError(met[0])
    if "step" in read and (step := int(read["step"])) != manifest.step:
        rule = f"refuses {folder}: its manifest says step {manifest.step}, its files step {step}."
        raise CheckpointError(message(rule, mend=OTHER))
    return read


def _fetch(source: Source, wanted: Mapping[str, Want]) -> dict[str, Tensor]:
    """Read this rank's part of each leaf, box by box in the order of the files, so that each block is read once."""
    # Allocate a leaf when its first box is read: leaves that are kept off the device need memory only while they are.
    parts = [(path, box) for path, want in wanted.items() for box in want.without_memory().kept()]
    left = Counter(path for path, _ in parts)
    reading: dict[str, tuple[StateLeaf, dict[Box, Tensor]]] = {}
    result: dict[str, Tensor] = {}
    for path, box in sorted(parts, key=lambda part: source.position(*part)):
        if path not in reading:
            leaf = wanted[path].empty()
            reading[path] = leaf, leaf.kept()
        source.read(path, box, reading[path][1][box])
        left[path] -= 1
        if not left[path]:
            # At once, not after the loop: a leaf in host or disk memory needs its read buffer only until here.
            result[path] = reading.pop(path)[0].at_rest()
    return {path: result[path] if path in result else want.empty().at_rest() for path, want in wanted.items()}


def _assemble(read: dict[str, Tensor], opt_state: Tree, layout: Layout) -> TrainState:
    """Build a state from its leaves; parameters are cast from the main parameters."""
    stored = [read[leaf.path_in("params")] for leaf in layout.leaves]
    trained = [x if leaf.trainable else None for x, leaf in zip(stored, layout.leaves, strict=True)]
    main = tree.unflatten(layout.structure, trained)
    scale = None
    if layout.precision.loss_scale is not None:
        scale = layout.precision.init_scale()
        if "loss_scale.scale" in read:
            scale = ScaleState(read["loss_scale.scale"], read["loss_scale.good_steps"])
    key = rounding_key(read["key"], read["step"], layout)
    state = TrainState(
        step=read["step"],
        params=spread(main, tree.unflatten(layout.structure, stored), layout, key=key),
        main=main if layout.has_main else None,
        opt_state=tree.map(lambda path: read[path], opt_state),
        loss_scale=scale,
        key=read["key"],
        layout=layout,
        buffers={path.removeprefix(BUFFERS): x for path, x in read.items() if path.startswith(BUFFERS)},
    )
    return sealed(state)
