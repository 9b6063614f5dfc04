"""`load`: a checkpoint in any layout of the same model, or an error that says what is wrong with it.

In: a directory, and where the state should live. Out: a new `TrainState`; nothing that exists is touched.
First the manifest and the leaves are compared, then every file's checksum, then the chunks; only then a tensor is read.
Law: `load(save(x, A), B) == reshard(x, B)`, bitwise, for every strategy, mesh and precision.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from fsharding import tree
from fsharding.checkpoint import dcp, store
from fsharding.checkpoint.agree import rank, ranks, together
from fsharding.checkpoint.leaves import Want, owner, param_path, placement, staged
from fsharding.checkpoint.manifest import Manifest, SavedLeaf, text_of
from fsharding.checkpoint.store import StrPath
from fsharding.checkpoint.structure import rebuild
from fsharding.errors import CheckpointError, LayoutError, message
from fsharding.layout import Layout
from fsharding.mesh import AbstractMesh
from fsharding.optim.base import GradientTransformation
from fsharding.precision import ScaleState
from fsharding.sharding import NamedSharding
from fsharding.state import TrainState, spread_main
from fsharding.tree import Tree

__all__ = ["load"]

_FUNCTION = "fs.checkpoint.load"
_CPU = torch.device("cpu")


def load(path: StrPath, layout: Layout, *, opt: GradientTransformation | None = None) -> TrainState:
    """Reads a checkpoint into a layout: the one that it was saved in, or any other of the same model. Collective.

    Parameters in the compute dtype, and copies, are made from the main parameters, as a step makes them. A loss scale
    that the layout's precision does not want is dropped; one that it wants and the checkpoint lacks starts afresh.

    Args:
        path: the directory.
        layout: where everything goes. Its mesh may have another number of ranks than the one that saved.
        opt: the optimizer, whose `init` says what the optimizer state should be; it runs on the meta device, so it must
            not look at values. Without it the state is what the checkpoint has, if it is of fsharding's own optimizers.

    Returns:
        The state, bitwise what was saved.

    Raises:
        CheckpointError: on every rank: no checkpoint, or one that is incomplete, damaged, of a newer version, of
            another model, optimizer or main dtype. Every leaf that differs and every damaged file is listed.
        LayoutError: the layout is on an abstract mesh.
    """
    if isinstance(layout.mesh, AbstractMesh):
        mend = "Plan the layout on a mesh of fs.make_mesh."
        raise LayoutError(message(_FUNCTION, f"cannot load onto the abstract mesh {layout.mesh}.", mend=mend))
    folder, manifest = _look(path)
    wanted, opt_state = _wanted(layout, manifest, opt)
    _compare(folder, manifest, wanted, layout, with_opt=opt is not None)
    _verify(folder, manifest)
    read: dict[str, Tensor] = {}
    together(_FUNCTION, lambda: read.update(_read(folder, manifest, wanted)))
    return _assemble(read, opt_state, layout)


def _look(path: StrPath) -> tuple[Path, Manifest]:
    """The directory and its manifest, which are the same on all ranks."""
    seen: list[tuple[Path, Manifest]] = []

    def read() -> tuple[str, str]:
        folder = store.find(path)
        manifest = store.read_manifest(_FUNCTION, folder)
        seen.append((folder, manifest))
        return str(folder), hashlib.sha256(text_of(manifest).encode()).hexdigest()

    found = together(_FUNCTION, read)
    if len({*found}) > 1:
        rows = [
            f"rank {r}: {folder}, its manifest has the sha256 {digest[:12]}..."
            for r, (folder, digest) in enumerate(found)
        ]
        raise CheckpointError(message(_FUNCTION, "found different checkpoints on different ranks.", rows))
    return seen[0]


# ------------------------------------------------------------------------------------------------------ what should be


def _wanted(layout: Layout, manifest: Manifest, opt: GradientTransformation | None) -> tuple[dict[str, Want], Tree]:
    """The leaves of a state in this layout, and the tree of the optimizer state with its paths as leaves."""
    device = torch.device(layout.mesh.device_type) if not isinstance(layout.mesh, AbstractMesh) else _CPU
    wanted = {
        param_path(leaf): Want(
            leaf.shape, layout.precision.main_dtype(leaf.init), leaf.main if leaf.trainable else leaf.params, device
        )
        for leaf in layout.leaves
    }
    wanted["step"] = Want((), torch.int64, None, _CPU)
    wanted["key"] = Want((2,), torch.int64, None, _CPU)
    if layout.precision.loss_scale is not None and "loss_scale.scale" in manifest.tree:
        wanted["loss_scale.scale"] = Want((), torch.float32, None, _CPU)
        wanted["loss_scale.good_steps"] = Want((), torch.int64, None, _CPU)
    moments: dict[str, Want] = {}
    if opt is None:
        opt_state = rebuild(manifest.structure, lambda path: path)
        for path in tree.leaves(opt_state):
            saved = manifest.tree.get(path)
            if saved is not None:
                moments[path] = _by_owner(path, saved, layout, device)
    else:
        state = {"opt_state": opt.init(_meta_main(layout))}
        for path, x in tree.named_leaves(state).items():
            sharding, shape = placement(path, x, layout)
            moments[path] = Want(shape, x.dtype, sharding, device if x.is_meta else x.device)
        opt_state = tree.map_with_path(lambda path, _: path, state)["opt_state"]
    return {**wanted, **moments}, opt_state


def _by_owner(path: str, saved: SavedLeaf, layout: Layout, device: torch.device) -> Want:
    """A leaf of the optimizer state of which we know what the manifest says alone: cut as the parameter of its path."""
    dtype = getattr(torch, saved.dtype)
    if saved.spec is None:
        return Want(saved.shape, dtype, None, _CPU)
    leaf = owner(path, saved.shape, layout)
    return Want(saved.shape, dtype, leaf.main if leaf is not None else NamedSharding(layout.mesh), device)


def _meta_main(layout: Layout) -> Tree:
    """Main parameters without memory; None for frozen leaves."""
    leaves = [
        leaf.main.to_dtensor(
            torch.empty(leaf.main.local_shape(leaf.shape), dtype=layout.precision.main_dtype(leaf.init), device="meta"),
            leaf.shape,
        )
        if leaf.trainable
        else None
        for leaf in layout.leaves
    ]
    return tree.unflatten(layout.structure, leaves)


# ------------------------------------------------------------------------------------------------------- what there is


def _compare(folder: Path, manifest: Manifest, wanted: dict[str, Want], layout: Layout, *, with_opt: bool) -> None:
    """Refuses a checkpoint whose leaves are not those that are wanted; all of them are listed."""
    other: list[str] = []
    dtypes: list[str] = []
    for path, want in wanted.items():
        saved = manifest.tree.get(path)
        if saved is None:
            other.append(f"{path} is missing; wanted is {want}")
        elif saved.shape != want.shape:
            other.append(f"{path} is {saved}; wanted is {want}")
        elif str(saved) != str(want):
            dtypes.append(f"{path} is {saved}; wanted is {want}")
    # A loss scale that is not wanted is dropped.
    extra = [path for path in manifest.tree if path not in wanted and not path.startswith("loss_scale")]
    other += [f"{path} is extra: {manifest.tree[path]}" for path in extra]
    if not with_opt:
        other += _changed_frozen(manifest, wanted, layout)
    rows = [*other, *dtypes]
    if not rows:
        return
    if any(not row.startswith("opt_state") for row in other):
        what, mend = "another model", "Plan the layout with the model, and the frozen leaves, that were saved."
    elif other:
        what, mend = "another optimizer", "Give the optimizer that was saved: opt=..."
    else:
        what, mend = "another precision", "Load it with the dtypes that were saved, and cast afterwards."
    rule = f"cannot use {folder}: it is a checkpoint of {what}; {len(rows)} leaves differ."
    raise CheckpointError(message(_FUNCTION, rule, rows, mend))


def _changed_frozen(manifest: Manifest, wanted: dict[str, Want], layout: Layout) -> list[str]:
    """Leaves that were frozen and are trained now, or the other way: their moments cannot be as they were."""
    if not any(path.startswith("opt_state") and want.sharding is not None for path, want in wanted.items()):
        return []
    frozen = manifest.layout.get("frozen", ())
    return [
        f"{param_path(leaf)} was {'trained' if leaf.path not in frozen else 'frozen'}, and is "
        f"{'trained' if leaf.trainable else 'frozen'} in the layout"
        for leaf in layout.leaves
        if leaf.trainable == (leaf.path in frozen) and param_path(leaf) in manifest.tree
    ]


def _verify(folder: Path, manifest: Manifest) -> None:
    """Compares sizes and checksums; rank r takes every file whose number is r modulo the number of ranks."""
    mine = dict(list(manifest.files.items())[rank() :: ranks()])
    rows = [row for part in together(_FUNCTION, lambda: store.damage(folder, mine)) for row in part]
    if rows or dcp.METADATA not in manifest.files:
        rule = f"refuses {folder}: {len(rows)} of its {len(manifest.files)} files are damaged."
        mend = "Use another checkpoint, or a copy of this one."
        raise CheckpointError(message(_FUNCTION, rule, sorted(rows) or [f"{dcp.METADATA} is not named"], mend))


# ----------------------------------------------------------------------------------------------------------- the state


def _read(folder: Path, manifest: Manifest, wanted: dict[str, Want]) -> dict[str, Tensor]:
    """All leaves in new memory."""
    inventory = dcp.inventory(folder, manifest)
    shards = {
        path: staged(
            want.shape,
            want.sharding,
            torch.empty(
                want.shape if want.sharding is None else want.sharding.local_shape(want.shape),
                dtype=want.dtype,
                device=want.device,
            ),
        )
        for path, want in wanted.items()
    }
    dcp.read(folder, inventory, shards)
    step = int(shards["step"].local)
    if step != manifest.step:
        rule = f"refuses {folder}: its manifest says step {manifest.step}, its files step {step}."
        raise CheckpointError(message(_FUNCTION, rule, mend="Use another checkpoint, or a copy of this one."))
    return {
        path: x.local if x.sharding is None else x.sharding.to_dtensor(x.local, x.shape) for path, x in shards.items()
    }


def _assemble(read: dict[str, Tensor], opt_state: Tree, layout: Layout) -> TrainState:
    """A state from what was read: params are made from the main parameters."""
    stored = [read[param_path(leaf)] for leaf in layout.leaves]
    trained = [x if leaf.trainable else None for x, leaf in zip(stored, layout.leaves, strict=True)]
    main = tree.unflatten(layout.structure, trained)
    scale = None
    if layout.precision.loss_scale is not None:
        scale = layout.precision.init_scale()
        if "loss_scale.scale" in read:
            scale = ScaleState(read["loss_scale.scale"], read["loss_scale.good_steps"])
    return TrainState(
        step=read["step"],
        params=spread_main(main, tree.unflatten(layout.structure, stored), layout),
        main=main if layout.has_main else None,
        opt_state=tree.map(lambda path: read[path], opt_state),
        loss_scale=scale,
        key=read["key"],
        layout=layout,
    )
