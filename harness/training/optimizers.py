"""The first-order optimizer of a cell and its learning-rate schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import torch
from torch import nn

from harness.cell import Optimizer
from kfac_core import KFAC
from kfac_core.collectives import Communicator
from kfac_core.optimizers import NLCG

WARMUP_START = 0.2  # SC20 starts the warm-up from a fifth of the peak rate


def build_optimizer(
    spec: Optimizer, parameters: Iterable[nn.Parameter], kfac: KFAC | None, communicator: Communicator
) -> torch.optim.Optimizer:
    """The optimizer that `spec` names; NLCG steps `kfac` itself, the others step after it."""
    if spec.name == "nlcg":
        return NLCG(parameters, lr=spec.lr, kfac=kfac, communicator=communicator)
    lr, decay = spec.lr, spec.weight_decay
    if spec.name == "adam":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)
    if spec.name == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=lr, momentum=spec.momentum, weight_decay=decay)
    if spec.name in ("lars", "lamb"):
        return _large_batch_optimizer(spec, parameters)
    return torch.optim.SGD(
        parameters, lr=lr, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=decay
    )


def learning_rate(spec: Optimizer, world_size: int, epoch: float) -> float:
    """Rate at the fractional `epoch`: linear warm-up, then steps down (SC20, section VI)."""
    rate = spec.lr * (world_size if spec.lr_scaling == "linear" else 1)
    if epoch < spec.warmup_epochs:
        return rate * (WARMUP_START + (1 - WARMUP_START) * epoch / spec.warmup_epochs)
    return rate * spec.decay_factor ** bisect_right(sorted(spec.decay_epochs), epoch)


def _large_batch_optimizer(spec: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        from pytorch_optimizer import LARS, Lamb  # noqa: PLC0415  an optional extra
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"optimizer.name={spec.name} needs the extra large-batch: pip install 'kronscale[large-batch]'"
        ) from None
    if spec.name == "lars":
        return LARS(
            parameters,
            lr=spec.lr,
            momentum=spec.momentum,
            nesterov=spec.nesterov,
            weight_decay=spec.weight_decay,
        )
    return Lamb(parameters, lr=spec.lr, weight_decay=spec.weight_decay)
