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
    """`x / sqrt(mean(x**2) + eps) * scale` along the last dim (Zhang and Sennrich 2019).

    Args:
        x_D: floating point [..., D]; D is normalized.
        scale_D: floating point [D], the factor of each feature.
        eps: added to the mean square under the root.
        over: model axes along which ranks have different tokens; data axes are taken care of by `gather_unit`.
        mesh: by default the mesh of `fs.set_mesh`.

    Example:
        >>> fs.ops.rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2))
        tensor([0.8485, 1.1314])
    """
    axes = tuple(a for a in ((over,) if isinstance(over, str) else over) if axis_size(a, mesh) > 1)
    scale_D = pvary(scale_D, axes, mesh=mesh) if axes else scale_D
    return F.rms_norm(x_D, (x_D.shape[-1],), scale_D, eps)
