"""The precision of a model's forward and backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from harness.cell import Precision
from harness.errors import SiteError


class ModelPrecision:
    """Sets torch's precision of products for this process, and provides the model's autocast.

    Args:
        precision: `float32` computes all products in float32, also convolutions, for which torch uses a
            GPU's TF32 units by default; `tf32` uses those units for every product but K-FAC's; `bfloat16` is
            autocast: weights, gradients, K-FAC and the optimizer stay float32.

    Raises:
        SiteError: `tf32` without a GPU, where it would be float32.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        if precision == "tf32" and device.type != "cuda":
            raise SiteError(
                f"training.precision=tf32 needs a GPU, and this rank computes on {device.type}; "
                "use float32 or bfloat16"
            )
        self._precision, self._device = precision, device
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"

    def autocast(self) -> AbstractContextManager[Any]:
        """A context for forward passes; autograd uses the same precision in the backward pass."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16")
