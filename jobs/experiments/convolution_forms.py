"""What each form of a convolution's A factor buys on a CPU.

    python jobs/experiments/convolution_forms.py results/core/convolution_forms.csv

One thread, one process. For each layer all forms that can compute its factor run in turn on the same input;
figures are medians with quartiles in milliseconds per call. `chosen` marks the form that `patch_gram` picks.
`error` is the largest error of an element against im2col in float64, relative to the norms of its two rows.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_core.kernels.convolution import patches
from kfac_core.kernels.convolution.geometry import Geometry


class Layer(NamedTuple):
    """A convolution and its input."""

    name: str
    batch: int
    channels: int
    size: int
    kernel: tuple[int, int] = (3, 3)
    stride: int = 1
    groups: int = 1


LAYERS = [
    Layer("ResNet-32, stage 1", 128, 16, 32),
    Layer("ResNet-32, stage 2", 128, 32, 16),
    Layer("ResNet-32, stage 3", 128, 64, 8),
    Layer("ResNet-32, first of stage 2", 128, 16, 32, stride=2),
    Layer("ResNet-32, first layer", 128, 3, 32),
    Layer("ResNet-50, stage 1", 32, 64, 56),
    Layer("ResNet-50, stage 2", 32, 128, 28),
    Layer("ResNet-50, stage 3", 32, 256, 14),
    Layer("ResNet-50, stage 4", 32, 512, 7),
    Layer("ResNet-50, stage 4, batch 2", 2, 512, 7),
    Layer("ResNet-50, stem", 8, 3, 224, (7, 7), stride=2),
    Layer("Inception, 1 x 7", 32, 192, 17, (1, 7)),
    Layer("grey digits, 5 x 5", 128, 1, 28, (5, 5)),
    Layer("depthwise", 32, 128, 28, groups=128),
]


def forms_of(layer: Layer, images: Tensor, geometry: Geometry) -> dict[str, Callable[[], Tensor]]:
    """The forms that can compute this layer's factor."""
    forms: dict[str, Callable[[], Tensor]] = {
        "im2col": lambda: patches.im2col(images, geometry),
        "by_row_shift": lambda: patches.by_row_shift(images, geometry),
    }
    if layer.stride == layer.groups == 1:
        given = images, geometry.kernel, geometry.padding
        forms["by_displacement"] = lambda: patches.by_displacement(*given).unsqueeze(0)
        forms["by_spectrum"] = lambda: patches.by_spectrum(*given).unsqueeze(0)
    return forms


def chosen(images: Tensor, geometry: Geometry) -> str:
    """The form that `patch_gram` calls."""
    called = []
    names = ("im2col", "by_row_shift", "by_displacement", "by_spectrum")
    real = {name: getattr(patches, name) for name in names}
    try:
        for name in names:

            def recorded(*operands: object, name: str = name) -> Tensor:
                called.append(name)
                found: Tensor = real[name](*operands)
                return found

            setattr(patches, name, recorded)
        patches.patch_gram(images, geometry)
    finally:
        for name in names:
            setattr(patches, name, real[name])
    return called[0]


def measure(layer: Layer, repeats: int) -> list[list[object]]:
    """A row for each form."""
    torch.manual_seed(0)
    images = torch.randn(layer.batch, layer.channels, layer.size, layer.size).relu()
    down, across = (taps // 2 for taps in layer.kernel)
    geometry = Geometry(
        layer.kernel, (layer.stride, layer.stride), groups=layer.groups, padding=(across, across, down, down)
    )
    exact = patches.im2col(images.double(), geometry)
    norms = exact.diagonal(dim1=1, dim2=2).sqrt()
    scale = (norms.unsqueeze(2) * norms.unsqueeze(1)).clamp_min(1e-30)
    forms, pick = forms_of(layer, images, geometry), chosen(images, geometry)
    errors = {name: float(((form() - exact).abs() / scale).max()) for name, form in forms.items()}
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeats):
        for name, form in forms.items():
            began = time.perf_counter()
            form()
            times[name].append(1e3 * (time.perf_counter() - began))
    rows: list[list[object]] = []
    for name, found in times.items():
        low, median, high = statistics.quantiles(found, n=4)
        figures = [f"{value:.4g}" for value in (median, low, high, errors[name])]
        rows.append([layer.name, name, "yes" if name == pick else "", *figures])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["layer", "form", "chosen", "milliseconds", "low", "high", "error"])
        for layer in LAYERS:
            for row in measure(layer, given.repeats):
                writer.writerow(row)
                print(*row, sep="\t", flush=True)


if __name__ == "__main__":
    main()
