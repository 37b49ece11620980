"""Beta, the weight of the old direction in a conjugate-gradient step: four formulas.

Each takes, at step k: g `[n]`, y = g - g_old `[n]`, new = (-g).z `[]`, and the memory of step k - 1 with
d `[n]`, delta = (-g_old).z_old `[]` and, for `KEEP_Z`, z `[n]`. Each returns `[]` without synchronising.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

EPS = 1e-8  # in the method's denominators, as in the release
KEEP_Z = frozenset({"PR", "HS"})


def clipped_beta(rule: str, g: Tensor, y: Tensor, new: Tensor, old: Mapping[str, Tensor]) -> Tensor:
    """Beta clipped to [0, 1], `[]`: a negative one restarts; above one the old direction would grow."""
    return BETAS[rule](g, y, new, old).clamp(0.0, 1.0)


def _fletcher_reeves(g: Tensor, y: Tensor, new: Tensor, old: Mapping[str, Tensor]) -> Tensor:
    return new / (old["delta"] + EPS)


def _polak_ribiere(g: Tensor, y: Tensor, new: Tensor, old: Mapping[str, Tensor]) -> Tensor:
    return (new - torch.dot(-g, old["z"])) / (old["delta"] + EPS)


def _hestenes_stiefel(g: Tensor, y: Tensor, new: Tensor, old: Mapping[str, Tensor]) -> Tensor:
    return (new - torch.dot(-g, old["z"])) / (torch.dot(old["d"], y) + EPS)


def _dai_yuan(g: Tensor, y: Tensor, new: Tensor, old: Mapping[str, Tensor]) -> Tensor:
    return new / (torch.dot(old["d"], y) + EPS)


# arXiv:1812.02886 has FR (the release's default) and PR; HS and DY are those of Hager & Zhang, "A survey of
# nonlinear conjugate gradient methods", 2006, with z instead of the residual. On a convex quadratic with
# exact line search all four equal the beta of linear CG.
BETAS: Mapping[str, Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor]], Tensor]] = MappingProxyType(
    {"FR": _fletcher_reeves, "PR": _polak_ribiere, "HS": _hestenes_stiefel, "DY": _dai_yuan}
)
