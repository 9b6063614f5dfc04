"""RMSNorm, also if the ranks of an axis have different tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fsharding.mesh.device_mesh import Mesh, axis_size
from fsharding.ops.collectives import pvary

__all__ = ["rms_norm"]


def rms_norm(
    x_D: Tensor, scale_D: Tensor, *, eps: float = 1e-5, over: str | Sequence[str] = (), mesh: Mesh | None = None
) -> Tensor:
    """Compute `x / sqrt(mean(x**2) + eps) * scale` along the last dim (Zhang & Sennrich 2019, arXiv:1910.07467).

    As `F.rms_norm`, but with eps=1e-5 by default; torch takes the epsilon of the dtype.

    Args:
        x_D: Floating point [..., D].
        scale_D: Floating point [D].
        eps: Number added to the mean square, under the root.
        over: Model axes along which ranks have different tokens; `gather_unit` takes care of data axes.
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        [..., D] in the dtype of x.

    Example:
        >>> fs.ops.rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2))
        tensor([0.8485, 1.1314])
    """
    axes = tuple(a for a in ((over,) if isinstance(over, str) else over) if axis_size(a, mesh) > 1)
    scale_D = pvary(scale_D, axes, mesh=mesh) if axes else scale_D
    return F.rms_norm(x_D, (x_D.shape[-1],), scale_D, eps)
