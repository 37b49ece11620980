"""The first-order optimizer of a cell and its learning-rate schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

import torch
from torch import nn

from harness.cell import OPTIMIZER_FIELDS, Optimizer
from kfac_core import KFAC
from kfac_core.collectives import Communicator
from kfac_core.optimizers import NLCG

Kind = Callable[..., torch.optim.Optimizer]

_TORCH: dict[str, Kind] = {
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.AdamW,
}
WARMUP_START = 0.2  # SC20 starts the warm-up from a fifth of the peak rate


def build_optimizer(
    spec: Optimizer, parameters: Iterable[nn.Parameter], kfac: KFAC | None, communicator: Communicator
) -> torch.optim.Optimizer:
    """The optimizer that `spec` names; NLCG steps `kfac` itself, the others step after it."""
    own = {field: getattr(spec, field) for field in OPTIMIZER_FIELDS[spec.name]}
    if spec.name == "nlcg":
        return NLCG(parameters, lr=spec.lr, kfac=kfac, communicator=communicator, **own)
    kinds = _TORCH if spec.name in _TORCH else _large_batch_optimizers(spec.name)
    return kinds[spec.name](parameters, lr=spec.lr, **own)


def learning_rate(spec: Optimizer, world_size: int, epoch: float) -> float:
    """Rate at the fractional `epoch`: linear warm-up, then steps down (SC20, section VI)."""
    rate = spec.lr * (world_size if spec.lr_scaling == "linear" else 1)
    if epoch < spec.warmup_epochs:
        return rate * (WARMUP_START + (1 - WARMUP_START) * epoch / spec.warmup_epochs)
    return rate * spec.decay_factor ** bisect_right(sorted(spec.decay_epochs), epoch)


def _large_batch_optimizers(wanted: str) -> dict[str, Kind]:
    try:
        from pytorch_optimizer import LARS, Lamb  # noqa: PLC0415  an optional extra
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"optimizer.name={wanted} needs the extra large-batch: pip install 'kronscale[large-batch]'"
        ) from None
    return {"lars": LARS, "lamb": Lamb}
