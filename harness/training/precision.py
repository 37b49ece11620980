"""The numbers that a model's forward and backward pass are computed in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from harness.cell import Precision
from harness.errors import SiteError


class Arithmetic:
    """One precision on one device, for the life of a rank.

    Args:
        precision: `float32` keeps all products in float32, also convolutions, which torch would give to a
            GPU's TF32 units; `tf32` gives those units every product; `bfloat16` is autocast: weights,
            gradients, K-FAC and the optimizer stay float32.

    Raises:
        SiteError: `tf32` without a GPU, which would be float32 by another name.
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

    def of_the_model(self) -> AbstractContextManager[Any]:
        """A context for a forward pass; the backward pass follows it by itself."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16")
