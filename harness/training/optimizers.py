"""The first-order optimizer of a cell and its learning-rate schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections import ChainMap
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from harness.cell import OPTIMIZER_FIELDS, Optimizer
from harness.errors import TrainingError
from kfac_core import KFAC
from kfac_core.collectives import Communicator
from kfac_core.optimizers import NLCG, LevenbergMarquardt
from kfac_core.schedule import START

Kind = Callable[..., torch.optim.Optimizer]


def build_optimizer(
    spec: Optimizer, parameters: Iterable[nn.Parameter], kfac: KFAC | None, communicator: Communicator
) -> torch.optim.Optimizer:
    """The optimizer that `spec` names; NLCG steps `kfac` itself, the others step after it."""
    own = {field: getattr(spec, field) for field in OPTIMIZER_FIELDS[spec.name]}
    if spec.name == "nlcg":
        return NLCG(parameters, lr=spec.lr, kfac=kfac, communicator=communicator, **own)
    if spec.name == "lm":
        assert kfac is not None  # noqa: S101  the cell has it
        return LevenbergMarquardt(parameters, kfac=kfac, lr=spec.lr, communicator=communicator)
    kinds = _TORCH if spec.name in _TORCH else _of_pytorch_optimizer(spec.name)
    return kinds[spec.name](parameters, lr=spec.lr, **own)


def learning_rate(spec: Optimizer, world_size: int, step: int, steps_per_epoch: int, epochs: int) -> float:
    """Rate of `step`: that of the schedule, or linear warm-up, then steps down (SC20, section VI)."""
    rate = spec.lr * (world_size if spec.lr_scaling == "linear" else 1)
    if spec.schedule is not None:
        return rate * spec.schedule.share(step, steps_per_epoch, epochs)
    epoch = step // steps_per_epoch + step % steps_per_epoch / steps_per_epoch
    if epoch < spec.warmup_epochs:
        return rate * (START + (1 - START) * epoch / spec.warmup_epochs)
    return rate * spec.decay_factor ** bisect_right(sorted(spec.decay_epochs), epoch)


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for matrices and AdamW for the rest, with one learning rate and weight decay.

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


_TORCH: dict[str, Kind] = {
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.AdamW,
    "muon": Muon,
    "lbfgs": partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"),
}


def _of_pytorch_optimizer(wanted: str) -> dict[str, Kind]:
    try:
        from pytorch_optimizer import LARS, SOAP, Lamb  # noqa: PLC0415  an optional extra

        from harness.training.shampoo import Shampoo  # noqa: PLC0415  needs it too
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"optimizer.name={wanted} needs the extra large-batch: pip install 'kronscale[large-batch]'"
        ) from None
    # The library divides Lamb's step by a bias correction that its text says it leaves out (version 3 of
    # arXiv:1904.00962): the first step would be ten times lr. `adam_debias` leaves it out.
    return {"lars": LARS, "lamb": partial(Lamb, adam_debias=True), "soap": SOAP, "shampoo": Shampoo}
