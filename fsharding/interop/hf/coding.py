"""Quantize the weights of a Hugging Face save: each rank quantizes its own boxes.

Guarantee: values and scales equal those of the full tensors in every layout, since max is exact in any order.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsharding.base.errors import message
from fsharding.checkpoint.byte_ranges import pieces
from fsharding.comm.codes import largest_of_ranks
from fsharding.comm.redistribute import in_buckets
from fsharding.foreign.coded_weights import start_of, touched_by
from fsharding.foreign.name_map import Piece
from fsharding.formats import Blocks, codec
from fsharding.formats.codec import Scales
from fsharding.formats.precision import KEEP, Precision
from fsharding.mesh.failures import world_size
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box

__all__ = ["Coding"]

_PLAIN = ("*embed*", "lm_head*", "*router*", "*.mlp.gate.weight", "*.block_sparse_moe.gate.weight")
"""Tensors that no reader expects to be quantized: lookup tables and routers."""
_BUCKET = 4 << 20  # block maxima that are all-reduced at once


class Coding:
    """Block maxima of all quantized tensors of a save, and the values and scales computed with them."""

    def __init__(self, format: Blocks | None, keep: tuple[str, ...] = KEEP) -> None:
        """Start without tensors; leaves in `keep` aren't quantized, and without a format none are."""
        self.format: Any = format
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the quantized tensors
        self._precision = Precision(gather=format, keep=keep)
        self._block = "" if format is None else "x".join(map(str, format.block))
        self._amaxes: dict[str, Tensor] = {}

    def takes(self, path: str, shape: tuple[int, ...], piece: Piece) -> bool:
        """Whether a piece of a leaf is quantized."""
        if any(fnmatch.fnmatchcase(piece.name, pattern) for pattern in _PLAIN):
            return False
        if self._precision.format_of(path, len(piece.shape)) is None:
            return False
        return not piece.lead or piece.box[0][0] not in self._precision.kept_rows(path, shape[0])

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        """Add a tensor, with maxima of 0."""
        self.shapes[name] = shape
        self._amaxes[name] = torch.zeros(self.format.grid(shape))

    def measure(self, parts: Iterable[tuple[str, Box, Tensor]]) -> None:
        """Update the block maxima with this rank's boxes: tensor names, boxes, and values."""
        for name, box, x in parts:
            if name not in self.shapes:
                continue
            # In windows, since values are copied to float32. Box and window may end inside a block: merge with max.
            shape = self.shapes[name]
            for piece in pieces(box, torch.float32.itemsize):
                values = x[boxes.relative(piece, box)]
                found = codec.amaxes(values, self.format.sizes(shape), start_of(piece))
                there = self._touched(name, piece)
                there.copy_(torch.maximum(there, found.cpu()))

    def exchange(self, device: torch.device) -> None:
        """All-reduce (max) the block maxima over all ranks. Collective, if there is a process group."""
        if not dist.is_initialized():
            return
        for names in in_buckets(list(self.shapes), lambda name: self._amaxes[name].numel(), _BUCKET):
            flat = torch.cat([self._amaxes[name].reshape(-1) for name in names]).to(device)
            flat = largest_of_ranks(flat, range(world_size()), None)
            sizes = [self._amaxes[name].numel() for name in names]
            for name, part in zip(names, flat.cpu().split(sizes), strict=True):
                self._amaxes[name] = part.view(self._amaxes[name].shape)

    def not_finite(self) -> list[str]:
        """List the tensors that have inf or NaN, one row each."""
        counts = {name: (int(x.isfinite().logical_not().sum()), x.numel()) for name, x in self._amaxes.items()}
        bad = {name: f"{few} of its {total} blocks of {self._block}" for name, (few, total) in counts.items() if few}
        return [f"{name} has inf or NaN in {where}" for name, where in bad.items()]

    def warn_of_edges(self) -> None:
        """Warn about tensors that have incomplete blocks at their edges."""
        # `dequantize` of transformers computes the size of a block as a dim divided by the number of its scales, so it
        # returns wrong values for such tensors, or raises. Readers that use `weight_block_size` are right.
        rows = [
            f"{name} is {list(shape)}"
            for name, shape in self.shapes.items()
            if any(n > block and n % block for n, block in zip(shape[-2:], self.format.sizes(shape), strict=False))
        ]
        if rows:
            rule = f"writes tensors with sizes that are not multiples of their {self._block} blocks."
            mend = (
                "dequantize=True of transformers reads them wrongly; hf.load and programs that compute in fp8 read them"
                " correctly. Keep them unquantized with Precision(keep=...), or choose blocks that divide their sizes."
            )
            warnings.warn(message(rule, rows, mend), stacklevel=6)

    def scales(self, name: str) -> Tensor:
        """Compute the scales of a full tensor."""
        return codec.scales_of(self._amaxes[name], self.format).blocks

    def codes(self, name: str, box: Box, x: Tensor) -> Tensor:
        """Quantize a box of a tensor to float8, on the device of the values."""
        scales = Scales(codec.scales_of(self._touched(name, box), self.format).blocks.to(x.device))
        block = self.format.sizes(self.shapes[name])
        return codec.encode(x, scales, self.format, block=block, start=start_of(box)).view(self.format.dtype)

    def _touched(self, name: str, box: Box) -> Tensor:
        """View the maxima of the blocks that a box of a tensor touches."""
        touched = touched_by(box, self.shapes[name], self.format)
        return self._amaxes[name][tuple(slice(*ends) for ends in touched)]
