"""Read weights that are published as fp8 values and block scales ("fp8" of transformers) as float32."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsharding.base.dtypes import FLOATS
from fsharding.base.untrusted import beside, read_json
from fsharding.checkpoint.byte_ranges import pieces
from fsharding.formats import E4M3, E5M2, Blocks, codec
from fsharding.formats.codec import Scales
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.named_sharding import LeafType

__all__ = [
    "CONFIG_KEY", "CONFIG_LIMIT", "MEND", "SCALES", "Reader", "blocks_in", "blocks_of", "config_of_blocks", "decoded",
    "start_of", "touched_by", "why_not",
]  # fmt: skip

CONFIG_KEY = "quantization_config"
SCALES = "_scale_inv"  # the suffix of the name of a tensor's scales

Reader = Callable[[str, Box, Tensor], None]
"""Reads a slice of a tensor by name; see `Weights.read`."""

_READ = (
    "supported is quant_method 'fp8' with weight_block_size [rows, columns], fmt 'e4m3' or 'e5m2' and"
    " activation_scheme 'dynamic'"
)
MEND = (
    "Write the model in bfloat16 first: in transformers, dequantize() and save_pretrained(). To read values and scales"
    " as stored, open the file or the index instead of its directory."
)
CONFIG_LIMIT = 16 << 20  # the largest `config.json`, in bytes
_MOST_OF_A_BLOCK = 1 << 24
_FMTS = {"e4m3": E4M3, "e5m2": E5M2}


# --------------------------------------------------------------------------------------------------------- config.json
def blocks_of(entries: Mapping[str, Any]) -> Blocks | None:
    """Return the format of weights by the entries of their `config.json`, or None."""
    given = entries.get(CONFIG_KEY)
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"{CONFIG_KEY} is {given!r}, not an object with quant_method")
    wanted = {"quant_method": ("fp8",), "fmt": (*_FMTS, None), "activation_scheme": ("dynamic", None)}
    for key, values in wanted.items():
        if given.get(key) not in values:
            raise ValueError(f"{CONFIG_KEY} has {key} {given.get(key)!r}: {_READ}")
    block = given.get("weight_block_size")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(map(_is_size, block))):
        raise ValueError(f"{CONFIG_KEY} has weight_block_size {block!r}: {_READ}")
    return Blocks(_FMTS[given.get("fmt") or "e4m3"], (block[0], block[1]))


def _is_size(n: Any) -> bool:
    return type(n) is int and 0 < n <= _MOST_OF_A_BLOCK


def blocks_in(folder: Path) -> Blocks | None:
    """Return the format of a directory's weights; None without a `config.json` or an entry in it."""
    if not os.path.lexists(folder / "config.json"):
        return None
    try:
        entries = read_json(beside(folder, "config.json"), most=CONFIG_LIMIT, finite=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"config.json: {getattr(error, 'strerror', None) or error}") from error
    return blocks_of(entries) if isinstance(entries, dict) else None


def config_of_blocks(format: Blocks, plain: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a directory whose weights have a format."""
    fmt = next(name for name, dtype in _FMTS.items() if dtype == format.dtype)
    result = {"quant_method": "fp8", "fmt": fmt, "weight_block_size": [*format.block], "activation_scheme": "dynamic"}
    return result | ({"modules_to_not_convert": plain} if plain else {})


def why_not(format: Any) -> str | None:
    """Return why weights cannot be written in a format, or None."""
    if not isinstance(format, Blocks):
        return f"is a {type(format).__name__}"
    if format.dtype != E4M3 or not isinstance(format.block, tuple) or format.scale != "float32" or format.stochastic:
        return f"is {format}"
    return None


# -------------------------------------------------------------------------------------------------------------- reading
def decoded(leaves: Mapping[str, LeafType], read: Reader, format: Blocks) -> tuple[dict[str, LeafType], Reader]:
    """Return the tensors other than scales, quantized ones as float32, and a reader that dequantizes."""
    coded = {name: replace(format, dtype=leaf.dtype) for name, leaf in leaves.items() if leaf.dtype in _FMTS.values()}
    rows: list[str] = []
    for name, blocks in coded.items():
        rows += _objections(name, leaves[name], leaves.get(name + SCALES), blocks)
    weights = {name: name.removesuffix(SCALES) for name in leaves if name.endswith(SCALES)}
    alone = [name for name, of in weights.items() if of not in coded and of in leaves]
    rows += [f"{name} are the scales of {weights[name]}, which is {leaves[weights[name]]}" for name in alone]
    if rows:
        raise ValueError("\n".join(rows))
    result = {
        name: replace(leaf, dtype=torch.float32) if name in coded else leaf
        for name, leaf in leaves.items()
        if weights.get(name) not in coded
    }

    def numbers(name: str, box: Box, out: Tensor) -> None:
        if name not in coded:
            read(name, box, out)
            return
        for piece in pieces(box, torch.float32.itemsize):
            values = _window(name, piece, leaves[name].shape, coded[name], read, out.dtype)
            out[boxes.relative(piece, box)].copy_(values)

    return result, numbers


def _objections(name: str, leaf: LeafType, scales: LeafType | None, blocks: Blocks) -> list[str]:
    if not leaf.shape:
        return [f"{name} is {leaf}: quantized values have at least one dim"]
    wanted = LeafType(blocks.grid(leaf.shape), torch.float32)
    if scales is None:
        return [f"{name} is {leaf}, and {name}{SCALES} is missing; wanted is {wanted}"]
    if scales.shape != wanted.shape or scales.dtype not in FLOATS:
        return [f"{name}{SCALES} is {scales}, wanted is {wanted}: {name} is {leaf} in blocks of {blocks.block}"]
    return []


def _window(name: str, box: Box, shape: tuple[int, ...], blocks: Blocks, read: Reader, dtype: torch.dtype) -> Tensor:
    """Read and dequantize a box that isn't empty."""
    codes = torch.empty(boxes.shape_of(box), dtype=blocks.dtype)
    read(name, box, codes)
    touched = touched_by(box, shape, blocks)
    scales = torch.empty(boxes.shape_of(touched), dtype=torch.float32)
    read(name + SCALES, touched, scales)
    sizes = blocks.sizes(shape)
    return codec.decode(codes.view(torch.uint8), Scales(scales), blocks, dtype, block=sizes, start=start_of(box))


def start_of(box: Box) -> tuple[int, int]:
    """Return the first indices of a box in the last two dims."""
    rows, columns = (0, *(first for first, _ in box))[-2:]
    return rows, columns


def touched_by(box: Box, shape: tuple[int, ...], blocks: Blocks) -> Box:
    """Return the box of the scales for a box of a tensor."""
    sizes = blocks.sizes(shape)[-len(box) :]
    lead = len(box) - len(sizes)
    return (*box[:lead], *(codec.touched(a, b - a, n) for (a, b), n in zip(box[lead:], sizes, strict=True)))
