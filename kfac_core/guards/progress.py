"""Whether steps have an effect: gradients that are not finite, a clip that always binds, eval mode."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kfac_core.overflow import HostCopy, copy_to_host

SAMPLES = 10
"""Second-order updates in a row at which the kl-clip must bind before it is reported, once."""

_BINDS = 0.5  # a step that is scaled by less is another learning rate


class Progress:
    """Reads the device at second-order updates only, and a step later, so that nothing waits.

    Attributes:
        nonfinite_steps: steps whose gradients were not finite on this rank, as far as the host knows.
    """

    def __init__(self) -> None:
        self.nonfinite_steps = 0
        self._binding = self._checked = 0
        self._largest = 0.0
        self._said_clip = self._said_eval = False
        self._copy: HostCopy | None = None

    def ask(self, checked: int, finite: Tensor, scale: Tensor | None) -> None:
        """Start to copy how many of the steps were finite, and the last factor of the kl-clip."""
        scale = scale if scale is not None else torch.full_like(finite, -1.0)
        self._checked = checked
        self._copy = copy_to_host(torch.stack([finite, scale.to(finite.dtype).reshape(())]).unsqueeze(0))

    def read(self, step: int) -> list[str]:
        """Warnings from what was asked for in the step before."""
        if self._copy is None:
            return []
        ((finite, scale),), self._copy = self._copy.numbers(), None
        nonfinite = self._checked - round(finite)
        self._log_clip(scale)
        if nonfinite <= self.nonfinite_steps:
            return []
        self.nonfinite_steps = nonfinite
        return [
            f"K-FAC: gradients that are not finite in {self.nonfinite_steps} of the steps up to {step}: they "
            "were set to zero, so that they reach no parameter that K-FAC takes; with float16 use a "
            "GradScaler (KFAC(grad_scaler=...)), else lower the learning rate or raise the damping"
        ]

    def of_eval(self, *, captured: bool, in_eval: bool) -> list[str]:
        """One warning of factors that are due, and a model in eval mode, whose passes do not count."""
        if captured or not in_eval or self._said_eval:
            return []
        self._said_eval = True
        return [
            "K-FAC: the model was in eval mode in a training pass, whose statistics do not count: call "
            "model.train(); to freeze BatchNorm, put its modules alone in eval mode"
        ]

    def _log_clip(self, scale: float) -> None:
        if self._said_clip or scale < 0:
            return
        self._binding, self._largest = (
            (self._binding + 1, max(self._largest, scale)) if scale < _BINDS else (0, 0.0)
        )
        if self._binding == SAMPLES:
            self._said_clip = True
            logging.getLogger("kfac_core.preconditioner").warning(
                "the kl-clip has scaled the step down at %d second-order updates in a row, to %.2g of its "
                "size or less: the learning rate has next to no effect; raise kl_clip, or lower the learning "
                "rate until the factor is 1 now and then", SAMPLES, self._largest,
            )  # fmt: skip
