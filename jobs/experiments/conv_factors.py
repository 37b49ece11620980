"""The A factor of ResNet-32's convolutions at batch 128: our kernel and those of two public packages.

    python jobs/experiments/conv_factors.py results/peers/conv_factors.csv \
        --gpauloski <checkout of gpauloski/kfac-pytorch> --lzhangbv <checkout of lzhangbv/kfac_pytorch>

One thread, one process, the same input; repetitions alternate between the implementations. Figures are
medians with quartiles in milliseconds of one call; the row `all layers` weights each kind of layer by its
count in the network. `error` is the largest relative error of an element against im2col in float64.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.bench.peer_imports import imports_from
from kfac_core import KFACConfig
from kfac_core.kernels.convolution.geometry import Geometry
from kfac_core.kernels.convolution.patches import im2col
from kfac_core.kernels.grams import dense
from kfac_core.layers.convolution import ConvLayer

BATCH = 128
LAYERS = {  # inputs, outputs, stride, image size: how often
    (3, 16, 1, 32): 1,
    (16, 16, 1, 32): 10,
    (16, 32, 2, 32): 1,
    (32, 32, 1, 16): 9,
    (32, 64, 2, 16): 1,
    (64, 64, 1, 8): 9,
}
Factor = Callable[[Tensor, nn.Conv2d], Tensor]


def ours(images: Tensor, conv: nn.Conv2d) -> Tensor:
    """The sum over rows, as a matrix."""
    return dense(ConvLayer("conv", conv, KFACConfig()).input_gram(images))[0]


def gpauloski(checkout: Path) -> Factor:
    with imports_from(checkout):
        from kfac.layers.modules import Conv2dModuleHelper  # noqa: PLC0415  the peer's
    return lambda images, conv: Conv2dModuleHelper(conv).get_a_factor(images)


def lzhangbv(checkout: Path) -> Factor:
    with imports_from(checkout):
        from kfac.utils import ComputeA  # noqa: PLC0415  the peer's
    return ComputeA.conv2d


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpauloski", type=Path)
    parser.add_argument("--lzhangbv", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    forms: dict[str, Factor] = {"ours": ours}
    for name, make in (("gpauloski", gpauloski), ("lzhangbv", lzhangbv)):
        if getattr(given, name):
            forms[name] = make(getattr(given, name))
    rows, whole = [], dict.fromkeys(forms, 0.0)
    for (inputs, outputs, stride, size), count in LAYERS.items():
        torch.manual_seed(0)
        conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        images = torch.randn(BATCH, inputs, size, size).relu()
        exact = im2col(images.double(), Geometry((3, 3), (stride, stride), padding=(1, 1, 1, 1)))[0]
        error = float(((ours(images, conv) - exact).abs() / exact.abs().clamp_min(1e-30)).max())
        times: dict[str, list[float]] = {name: [] for name in forms}
        for repeat in range(given.repeats + 1):
            for name, form in forms.items():
                began = time.perf_counter()
                form(images, conv)
                if repeat:  # the first is a warm-up
                    times[name].append(1e3 * (time.perf_counter() - began))
        for name, found in times.items():
            low, median, high = statistics.quantiles(found, n=4)
            whole[name] += count * median
            layer = f"{inputs} to {outputs}, {size} x {size}, stride {stride}"
            rows.append([layer, count, name, median, low, high, error if name == "ours" else ""])
    rows += [["all layers", sum(LAYERS.values()), name, total, "", "", ""] for name, total in whole.items()]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["layer", "count", "implementation", "milliseconds", "low", "high", "error"])
        for row in rows:
            writer.writerow([f"{value:.4g}" if isinstance(value, float) else value for value in row])
    for name, total in whole.items():
        print(f"{name}: {total:.0f} ms, {total / whole['ours']:.2f} times ours")


if __name__ == "__main__":
    main()
