"""The first-order optimizer of a cell and its learning-rate schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from harness.cell import OPTIMIZER_FIELDS, Optimizer
from harness.training.muon import Muon
from kfac_core import KFAC
from kfac_core.collectives import Communicator
from kfac_core.optimizers import NLCG
from kfac_core.schedule import START

Kind = Callable[..., torch.optim.Optimizer]

_TORCH: dict[str, Kind] = {
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.AdamW,
    "muon": Muon,
}


def build_optimizer(
    spec: Optimizer, parameters: Iterable[nn.Parameter], kfac: KFAC | None, communicator: Communicator
) -> torch.optim.Optimizer:
    """The optimizer that `spec` names; NLCG steps `kfac` itself, the others step after it."""
    own = {field: getattr(spec, field) for field in OPTIMIZER_FIELDS[spec.name]}
    if spec.name == "nlcg":
        return NLCG(parameters, lr=spec.lr, kfac=kfac, communicator=communicator, **own)
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
