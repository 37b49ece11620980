"""Registry of the parts of an acceptance run (no torch here).

To add one: a module with `run(setting)`, see `harness.bench.gpu.setting`, and its line in `PARTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Part:
    """One part: the module that runs it, seconds that it may take on a GPU, and what it finds."""

    module: str
    seconds: int
    about: str


PARTS: Mapping[str, Part] = MappingProxyType({
    "exactness": Part(
        "exactness", 180, "strategies, solvers and layer kinds on the device against float64 on the CPU"
    ),
    "timer": Part("timer", 60, "whether the phases of a step add up to its wall time, and what timing costs"),
    "resnet32": Part("networks", 120, "ResNet-32, batch 128: steps with K-FAC beside plain training"),
    "resnet50": Part("networks", 210, "ResNet-50, batch 32, 224 pixels: the same"),
    "bert": Part("networks", 210, "BERT-base, batch 32, 128 tokens: the same"),
    "decompositions": Part("decompositions", 180, "eigh and Cholesky by size, driver and grouping"),
    "kernels": Part("factor_kernels", 90, "sums of outer products by layer, form and precision"),
    "training": Part("training", 270, "ResNet-32 on CIFAR-10 with SC20's settings, SGD and K-FAC in turn"),
    "ranks": Part("ranks", 120, "two ranks: over NCCL on two GPUs, else over Gloo on one device"),
})  # fmt: skip
"""In the order in which they run: 24 minutes."""
