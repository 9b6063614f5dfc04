"""`load`: read the weights of a Hugging Face directory into any layout; each rank reads only its own slices.

Guarantee: the values don't depend on the layout; the peak memory of a rank is its shards and 16 MiB. One error lists
every file that can't be read.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from fsharding.base import tree
from fsharding.base.dtypes import FLOATS
from fsharding.base.errors import CheckpointError, FshardingError, message
from fsharding.base.public import check_path, public
from fsharding.base.tree import Tree
from fsharding.checkpoint.byte_ranges import pieces as windows
from fsharding.checkpoint.collective_call import agreed, on_all
from fsharding.checkpoint.directory import StrPath, real_path
from fsharding.checkpoint.state_leaves import Want, main_wants
from fsharding.foreign.coded_weights import CONFIG_KEY
from fsharding.foreign.foreign_weights import Refusal, Weights, as_numbers, open_index, open_part, table_of
from fsharding.foreign.name_map import SAME_BUFFERS, Piece, misfits, other_constants, read_leaf
from fsharding.foreign.safetensors_files import INDEX, SINGLE
from fsharding.interop.hf.comparison import differences
from fsharding.interop.hf.config_tables import config_of, read_config
from fsharding.interop.hf.naming import Names, names_of, pieces_by_leaf
from fsharding.mesh.device_mesh import own_rank, world_size
from fsharding.mesh.meeting import called_by_all
from fsharding.models.decoder import DecoderConfig
from fsharding.sharding import boxes
from fsharding.sharding.layout import Layout
from fsharding.sharding.named_sharding import LeafType

__all__ = ["load", "open_folder"]

_STACKED = "model.layers.0.mlp.experts.gate_up_proj"
_HEAD = "lm_head.weight"
_TABLE = "model.embed_tokens.weight"
_RUNTIME = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors that old versions of transformers stored although they are computed from the config."""


@public
@called_by_all
def load(
    path: StrPath, layout: Layout, names: Names | None = None, *, extra: Literal["refuse", "ignore"] = "refuse"
) -> Tree:
    """Load the weights of a Hugging Face directory. Collective over all ranks, which must share the file system.

    Args:
        path: Directory with `config.json`, and `model.safetensors` or several files with an index. Entries of
            `config.json` that change the computation are compared with the layout's model. Block-quantized fp8 weights,
            as in DeepSeek-V3, are dequantized; each rank reads only the values and scales that it needs.
        layout: Layout of `models.decoder(fs.hf.config_of(path))`, or of any tree with `names`.
        names: Map from the path of each leaf to its tensors. Default: `fs.hf.names_of` for the decoder of
            `config.json`. A leaf with a `Fused` dim may be `Joined` from separate tensors.
        extra: Whether tensors that no leaf uses are an error ("refuse") or are skipped ("ignore").

    Returns:
        A tree for `fs.state_from_params`: main parameters in `layout.main`, in their dtype, and frozen parameters in
        `layout.params`. To compute with it without a state, call `fs.params_from_main(tree, tree, layout)`.

    Raises:
        CheckpointError: on every rank, before weights are read: files that can't be read, an unsupported config, a
            config that differs from the layout's model, or tensors that are missing, extra, or of a different shape or
            kind; all are listed. Also a tied model whose file has a different head.
        LayoutError: a layout on an abstract mesh.

    Example:
        >>> recipe = fs.models.presets.recipe("tiny-llama3")
        >>> layout = fs.plan_layout(recipe.model(), fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(recipe.model(), fs.sgd(0.1), fs.random.key(0), layout)
        >>> saved = fs.hf.save("llama", state, recipe)
        >>> params = fs.hf.load(saved.path, layout)
        >>> torch.equal(fs.unshard(params["embed"]["table"]), fs.unshard(state.params["embed"]["table"]))
        True
    """
    check_path("a path, then a Layout", path, "fs.hf.load(path, layout)")
    wants = main_wants(layout)

    def look() -> tuple[Weights, dict[str, list[Piece]]]:
        folder, config = _opened(path, with_config=names is None)
        result = (names or {}, ()) if config is None else _default_names(config, folder)
        _check_config(folder, layout)
        compared = _compare(folder, layout, wants, *result, strict=extra == "refuse")
        if config is not None and config.tied:
            _check_tied(folder)
        return folder, compared

    rule = f"finds {path} different on different ranks."
    folder, pieces = agreed(look, lambda found: sorted(found[0].leaves.items()), rule, "sees different tensors")
    # Allocate all leaves first: temporary memory is then contiguous, and is returned to the system.
    leaves = {name: want.empty() for name, want in wants.items()}
    read = on_all(lambda: [read_leaf(folder, pieces[name], leaf) for name, leaf in leaves.items()])
    return tree.unflatten(layout.structure, read)


def _opened(path: StrPath, *, with_config: bool) -> tuple[Weights, DecoderConfig | None]:
    """Read the headers, and the config if asked for; one error lists the problems of both."""
    result: list[Any] = []
    wrong: list[str] = []
    reads = [open_folder, lambda path: config_of(_entries(path))]
    for read in reads if with_config and os.path.isdir(path) else reads[:1]:
        try:
            result.append(read(path))
        except FshardingError as error:
            wrong.append(str(error))
    if wrong:
        raise CheckpointError("\n".join(wrong))
    return result[0], result[1] if with_config else None


def _entries(path: StrPath) -> dict[str, Any]:
    """Read the entries of `config.json` without the format of the weights, which `open_folder` checks."""
    return {key: value for key, value in read_config(path).items() if key != CONFIG_KEY}


def _check_config(folder: Weights, layout: Layout) -> None:
    """Refuse a `config.json` of a model that computes something different from the layout's."""
    if not os.path.lexists(folder.path / "config.json"):
        return
    if rows := differences(_entries(folder.path), layout.config):
        mend = "Plan the layout with the model of the directory, such as models.decoder(fs.hf.config_of(path))."
        rule = f"cannot use {folder.path}: its config.json and the model of the layout compute different things."
        raise CheckpointError(message(rule, rows, mend))


def _default_names(config: DecoderConfig, folder: Weights) -> tuple[Names, tuple[str, ...]]:
    """Find the names for a config, and tensors that files may have in addition."""
    names = names_of(config, stacked_experts=_STACKED in folder.leaves)
    if not config.tied:
        return names, ()
    if _TABLE not in folder.leaves:  # the files of a tied model may have the table under the head's name
        names = {path: _HEAD if name == _TABLE else name for path, name in names.items()}
    return names, (_HEAD,)


def _check_tied(folder: Weights) -> None:
    """Refuse a tied model whose file has a head unlike its embedding; each rank compares some of the rows."""
    if _HEAD not in folder.leaves or _TABLE not in folder.leaves:
        return
    head, table = folder.leaves[_HEAD], folder.leaves[_TABLE]
    same = head.shape == table.shape
    if same:
        rows = boxes.chunk(head.shape[0], world_size(), own_rank())
        for box in windows((rows, (0, head.shape[1])), torch.float32.itemsize):
            both = [torch.empty(boxes.shape_of(box)) for _ in range(2)]
            for name, out in zip((_HEAD, _TABLE), both, strict=True):
                folder.read(name, box, out)
            same = same and torch.equal(*both)
    if not same:
        row = f"{_HEAD} and {_TABLE} differ, and tie_word_embeddings is true"
        mend = "transformers does not tie them then: for that model write tie_word_embeddings false in config.json, and"
        mend += f" plan the layout with models.decoder(fs.hf.config_of(path)); for a tied model remove {_HEAD}."
        raise CheckpointError(message(f"cannot use {folder.path}: it has two different heads.", [row], mend))


def _compare(
    folder: Weights, layout: Layout, wants: dict[str, Want], names: Names, allowed: tuple[str, ...], *, strict: bool
) -> dict[str, list[Piece]]:
    """Find the pieces of each leaf; refuse a directory that lacks some, and list every tensor that differs."""
    result, rows = pieces_by_leaf(names, {path: want.shape for path, want in wants.items()}, layout, len(folder.leaves))
    rows += misfits(folder, result, names, wants, _objection, allowed if strict else None)
    rows += (unlike := [*other_constants(names, folder)])
    if rows:
        mend = "Plan the layout with models.decoder(fs.hf.config_of(path)), or pass names={ours: theirs}"
        mend += f"; {SAME_BUFFERS}" if unlike else ""
        mend += "; extra='ignore' skips the rest." if any(" is extra: " in row for row in rows) else "."
        rule = f"cannot use {folder.path}: its tensors differ from the layout's in {len(rows)} places."
        raise CheckpointError(message(rule, rows, mend))
    return result


def _objection(piece: Piece, want: Want, stored: LeafType | None) -> str | None:
    wanted = f"wanted is {LeafType(piece.shape, want.dtype)}"
    if stored is None:
        return f"is missing; {wanted}"
    plain = stored.dtype == want.dtype or (stored.dtype in FLOATS and want.dtype in FLOATS)
    return None if stored.shape == piece.shape and plain else f"is {stored}, {wanted}"


# -------------------------------------------------------------------------------------------------------- the directory
def open_folder(path: StrPath) -> Weights:
    """Read the headers of all safetensors files of a directory."""
    folder = real_path(path)
    try:
        name, weights = _stored_in(folder)
        if weights.format != "safetensors":
            raise Refusal(f"{name}: its format is {weights.format}, not safetensors")
        weights = as_numbers(weights, folder)
    except Refusal as refused:
        mend = "Get the directory again, as save_pretrained(safe_serialization=True) of transformers writes it."
        raise CheckpointError(message(f"cannot read {folder}.", refused.rows, refused.mend or mend)) from refused
    leaves = {tensor: leaf for tensor, leaf in weights.leaves.items() if not _RUNTIME.search(tensor)}
    return replace(weights, path=folder, leaves=leaves)


def _stored_in(folder: Path) -> tuple[str, Weights]:
    """Open and name the index of a directory, or its only file; refuse two saves, and files without an index."""
    if os.path.lexists(folder / INDEX):
        try:
            table = table_of(folder / INDEX)
        except (OSError, ValueError) as error:
            raise Refusal(f"{INDEX}: {getattr(error, 'strerror', None) or error}") from error
        others = sorted({*map(str, table.values())} - {SINGLE})
        if others and os.path.lexists(folder / SINGLE):
            # transformers reads the single file and ignores the index, whichever is newer.
            what = f"lists {others[0]}, and {SINGLE} is there too: two saves in one directory"
            raise Refusal(f"{INDEX} {what}; remove {SINGLE}, or {INDEX} and its files")
        # A tensor is read from the file that the index names, even if other files have it too.
        return INDEX, open_index(folder / INDEX, table)
    if not folder.is_dir():
        raise Refusal("there is no such directory")
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(".safetensors")]
    if len(names) == 1 or SINGLE in names:
        name = SINGLE if SINGLE in names else names[0]
        return name, open_part(folder, name)
    rows = [f"it has {len(names)} .safetensors files and no {INDEX}"]
    if names and all(name.startswith("shard-") for name in names):
        rows.append("they are shards of torch's HuggingFaceStorageWriter, which fs.foreign.load_weights reads")
    raise Refusal(*rows)
