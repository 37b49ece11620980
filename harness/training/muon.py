"""Muon for whole networks: torch's own for matrices, AdamW for all other parameters."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from harness.errors import TrainingError


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW as one optimizer with one learning rate and weight decay.

    A convolution's weight is a matrix with a row for each output channel, as in Jordan et al. 2024. Updates
    are as large as AdamW's (`match_rms_adamw`; Liu et al. 2025), so that both share a learning rate.

    Args:
        params: the parameters, in one group.

    Raises:
        TrainingError: this torch has no Muon.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, nesterov: bool, weight_decay: float
    ) -> None:
        kind: Any = getattr(torch.optim, "Muon", None)
        if kind is None:
            raise TrainingError(f"optimizer.name=muon needs torch >= 2.9, got {torch.__version__}")
        listed = list(params)
        super().__init__(listed, {"lr": lr})
        self._matrices = [parameter for parameter in listed if parameter.ndim > 1]
        others = [parameter for parameter in listed if parameter.ndim < 2]
        # views: a step of Muon on them is a step of the network
        self._views = [nn.Parameter(matrix.detach().view(len(matrix), -1)) for matrix in self._matrices]
        self._inner: list[torch.optim.Optimizer] = [
            kind(
                self._views, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay),
        ]  # fmt: skip
        self._join_states()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; takes no closure."""
        for view, matrix in zip(self._views, self._matrices, strict=True):
            view.grad = matrix.grad.view_as(view) if matrix.grad is not None else None
        for optimizer in self._inner:
            for group in optimizer.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"inner": [optimizer.state_dict() for optimizer in self._inner]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        for optimizer, saved in zip(self._inner, state_dict["inner"], strict=True):
            optimizer.load_state_dict(saved)
        self._join_states()

    def _join_states(self) -> None:
        self.state = ChainMap(*(optimizer.state for optimizer in self._inner))  # type: ignore[assignment]  # read only
