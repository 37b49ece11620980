"""Handwritten digits (Alpaydin & Kaynak 1998, UCI): 1,797 images of 8x8 pixels in scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.workloads import WORKLOADS
from harness.workloads.workload import EpochSampler, Share, classified

SPLIT_SEED = 0  # which images are held out is part of the workload, not of a run


class Digits:
    """Ten classes, one of two ConvNets."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        self._share = share
        self._width, self._larger = int(options["width"]), options["network"] == "larger"
        (x, y), (test_x, test_y) = split_digits()
        if self._larger:
            x, test_x = (
                functional.interpolate(part, scale_factor=2.0, mode="bilinear") for part in (x, test_x)
            )
        self._train = x.to(share.device), y.to(share.device)
        self._test = test_x.to(share.device), test_y.to(share.device)
        self.steps_per_epoch = share.steps_per_epoch(len(y))

    def model(self) -> nn.Module:
        """As `meanings` of the description says."""
        width = self._width
        if self._larger:
            return nn.Sequential(
                nn.Conv2d(1, width, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(width, width, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(4),
                nn.Flatten(),
                nn.Linear(4 * width, 10),
            ).to(self._share.device)
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        ).to(self._share.device)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled anew each epoch; the incomplete last batch is dropped."""
        x, y = self._train
        for indices in EpochSampler(self._share, len(x), epoch, first_step, x.device):
            yield x[indices], y[indices]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy."""
        x, y = batch
        return functional.cross_entropy(model(x), y)

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Correct predictions and summed loss over every world_size-th held-out image."""
        x, y = (part[self._share.rank :: self._share.world_size] for part in self._test)
        return classified(model(x), y), len(y)


def split_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and held-out digits: brightness from 0 to 1 `[N, 1, 8, 8]`, and classes `[N]`."""
    table = torch.as_tensor(read_table(), dtype=torch.float32)
    x, y = table[:, :-1].view(-1, 1, 8, 8) / 16.0, table[:, -1].long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SPLIT_SEED))
    x, y = x[order], y[order]
    count = WORKLOADS["digits"].train_examples
    return (x[:count], y[:count]), (x[count:], y[count:])


def read_table() -> np.ndarray:
    """Scikit-learn's own file, `[1797, 65]`: 64 pixels of 0 to 16, then the class.

    `sklearn.datasets.load_digits` reads the same file, but importing it is slow on every rank.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("workload digits needs scikit-learn, which contains the images")
    return np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")


def build(options: Mapping[str, Any], share: Share) -> Digits:
    """The workload as the rank of `share` sees it."""
    return Digits(options, share)
