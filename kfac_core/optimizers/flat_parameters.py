"""All parameters of an optimizer as one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_core.errors import ConfigError

LARS_WEIGHT_SHARE = 0.1  # the release's `wd`, as a share of eta


class FlatParameters:
    """Parameters of all groups in the order of the groups: one vector of n numbers.

    Attributes:
        first: the parameter under which torch's `Optimizer.state` stores the one state.
        like: an empty tensor with the vectors' dtype (float32 at least) and device.

    Raises:
        ConfigError: the parameters have several devices or dtypes, or are not real.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._parameters: list[Tensor] = [p for group in groups for p in group["params"]]
        self._sizes = [p.numel() for p in self._parameters]
        self._group_sizes = [sum(p.numel() for p in group["params"]) for group in groups]
        self.first = self._parameters[0]
        for what in ("device", "dtype"):
            kinds = sorted({str(getattr(p, what)) for p in self._parameters})
            if len(kinds) > 1:
                raise ConfigError(f"one vector holds all parameters: {what} {', '.join(kinds)}; use one")
        if not self.first.is_floating_point():
            raise ConfigError(f"dtype={self.first.dtype} is not a real floating-point type")
        dtype = torch.promote_types(
            self.first.dtype, torch.float32
        )  # half precision cannot hold y = g - g_old
        self.like = self.first.new_empty(0, dtype=dtype)

    @property
    def size(self) -> int:
        """The number of parameters, n."""
        return sum(self._sizes)

    def gradient(self) -> Tensor:
        """A copy of all gradients, `[n]`; zeros for a parameter without one."""
        flat = self.like.new_zeros(self.size)
        present = [
            (part.view_as(p), p.grad)
            for part, p in zip(flat.split(self._sizes), self._parameters, strict=True)
            if p.grad is not None
        ]
        if present:
            torch._foreach_copy_([part for part, _ in present], [grad for _, grad in present])
        return flat

    def adapt_by_layer(self, g: Tensor, eta: float, eps: float) -> None:
        """LARS: scale each parameter's part of g `[n]` by eta |w| / (|g| + 0.1 eta |w| + eps), in place.

        A part whose |w| is zero keeps its gradient. (The release's ratio is zero there, so that a bias
        initialised to zero would never change.) You et al., arXiv:1708.03888, with the constants of the NLCG
        release.
        """
        parts = list(g.split(self._sizes))
        w_norm = torch.stack([norm.to(g.dtype) for norm in torch._foreach_norm(self._parameters)])
        g_norm = torch.stack(list(torch._foreach_norm(parts)))
        ratio = eta * w_norm / (g_norm + LARS_WEIGHT_SHARE * eta * w_norm + eps)
        torch._foreach_mul_(parts, list(torch.where(w_norm > 0, ratio, 1.0).unbind()))

    def by_group(self, direction: Tensor, rates: Sequence[float | Tensor]) -> Tensor:
        """`direction` `[n]` with each group's part multiplied by the group's rate, `[n]`."""
        parts = direction.split(self._group_sizes)
        return torch.cat([part * rate for part, rate in zip(parts, rates, strict=True)])

    def move(self, s: Tensor) -> None:
        """Add s `[n]` to the parameters."""
        torch._foreach_add_(self._parameters, self._parts(s))

    def values(self) -> Tensor:
        """A copy of the parameters, `[n]`."""
        return torch.cat([parameter.detach().flatten().to(self.like) for parameter in self._parameters])

    def restore(self, values: Tensor) -> None:
        """Set the parameters to `values` `[n]`."""
        torch._foreach_copy_(self._parameters, self._parts(values))

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return [part.view_as(p) for part, p in zip(flat.split(self._sizes), self._parameters, strict=True)]
