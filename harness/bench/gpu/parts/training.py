"""ResNet-32 on CIFAR-10 with SC20's settings: SGD and K-FAC by turns, as far as time goes.

Settings as in jobs/papers/sc20/full/cifar10.yaml at one GPU. Without a folder of CIFAR-10's files, the part
of it that the package contains: 2,000 training and 500 test images, so that accuracies are lower.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import nn

from harness.bench.gpu.setting import Setting
from harness.workloads import WORKLOADS
from harness.workloads.cifar.cifar import Cifar, build_cifar10
from harness.workloads.workload import Share
from kfac_core import KFAC, KFACConfig

_BATCH, _LR, _WARMUP_EPOCHS, _WARMUP_START, _DECAY = 128, 0.1, 5, 0.2, 0.1
_KFAC: Mapping[str, Any] = {
    "damping": 0.003, "factor_decay": 0.95, "kl_clip": 0.001, "factor_update_steps": 1,
    "inverse_update_steps": 10,
}  # fmt: skip
_SMALL: Mapping[str, Any] = {
    "model": "resnet20", "width": 0.25, "train_examples": 32, "test_examples": 16
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """An arm: settings of K-FAC or None, its epochs, and those at which the rate falls."""

    name: str
    kfac: Mapping[str, Any] | None
    epochs: int
    decay_epochs: tuple[int, ...]


METHODS = (
    Method("sgd", None, 200, (100, 150)),
    Method("kfac-eigen", {**_KFAC, "solver": "eigen"}, 100, (35, 75, 90)),
    Method("kfac-inverse", {**_KFAC, "solver": "inverse"}, 100, (35, 75, 90)),
)


class Run:
    """One arm's training."""

    def __init__(self, setting: Setting, method: Method, workload: Cifar) -> None:
        self.method, self._setting, self._workload = method, setting, workload
        torch.manual_seed(0)
        self._model: nn.Module = workload.model()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=_LR, momentum=0.9, weight_decay=0.0005)
        self._kfac = None
        if method.kfac is not None:
            self._kfac = KFAC(self._model, KFACConfig.sc20(**method.kfac), lr=self._optimizer)
        self.epoch, self.seconds = 0, 0.0
        self.losses: list[float] = []

    def next_epoch(self) -> None:
        """Train for one epoch, and evaluate outside of the clock."""
        steps = 1 if self._setting.small else self._workload.steps_per_epoch
        self._model.train()
        self._setting.synchronize()
        began = time.perf_counter()
        loss = torch.zeros((), device=self._setting.device)
        for step, batch in zip(range(steps), self._workload.batches(self.epoch), strict=False):
            rate = learning_rate(self.method, self.epoch + step / steps)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.zero_grad()
            current = self._workload.loss(self._model, batch)
            current.backward()
            if self._kfac is not None:
                self._kfac.step()
            self._optimizer.step()
            loss += current.detach()
        self._setting.synchronize()
        self.seconds += time.perf_counter() - began
        self.epoch += 1
        self.losses.append(float(loss) / steps)
        self._model.eval()
        with torch.no_grad():
            sums, count = self._workload.evaluate(self._model)
        self._setting.findings.row(
            "epochs", method=self.method.name, epoch=self.epoch, train_seconds=self.seconds,
            train_loss=self.losses[-1], test_accuracy=sums["accuracy"] / count, learning_rate=rate,
        )  # fmt: skip


def run(setting: Setting) -> None:
    """Give each arm an epoch in turn, until all have ended or the time has."""
    options = {
        **WORKLOADS["cifar10"].options, "data": setting.data or "embedded",
        **(_SMALL if setting.small else {}),
    }  # fmt: skip
    workload = build_cifar10(options, Share(0, 1, 16 if setting.small else _BATCH, 0, setting.device))
    source = setting.data or "the embedded part of CIFAR-10 (JPEG copy)"
    setting.findings.note(f"{options['model']} on {source}, {workload.steps_per_epoch} steps an epoch")
    runs = [Run(setting, method, workload) for method in METHODS]
    longest = 0.0
    while unfinished := [each for each in runs if each.epoch < _epochs(setting, each.method)]:
        began = time.monotonic()
        for each in unfinished:
            each.next_epoch()
        longest = max(longest, time.monotonic() - began)
        if not setting.has_time(f"epochs after {runs[0].epoch}", 1.2 * longest):
            break
    setting.complete = True  # as many epochs as fit is what this part promises
    for each in runs:
        _check(setting, each)


def learning_rate(method: Method, epoch: float) -> float:
    """Linear warm-up from a fifth of the rate, then a tenth of it at each decay (SC20, section VI)."""
    if epoch < _WARMUP_EPOCHS:
        return _LR * (_WARMUP_START + (1 - _WARMUP_START) * epoch / _WARMUP_EPOCHS)
    return float(_LR * _DECAY ** bisect_right(method.decay_epochs, epoch))


def _epochs(setting: Setting, method: Method) -> int:
    return 2 if setting.small else method.epochs


def _check(setting: Setting, run: Run) -> None:
    finite = all(isfinite(loss) for loss in run.losses)
    setting.findings.check(
        f"{run.method.name} stays finite", f"{run.epoch} epochs, loss {run.losses[-1]:.3f}", passed=finite
    )
    if not setting.small:
        setting.findings.check(
            f"{run.method.name} learns", f"loss from {run.losses[0]:.3f} to {min(run.losses):.3f}",
            passed=min(run.losses) < 0.8 * run.losses[0],
        )  # fmt: skip
