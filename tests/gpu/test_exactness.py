"""Promise: on a GPU K-FAC trains as in float64 on a CPU: every strategy, solver, kind of layer and option.

The reference works on one factor and one layer after another, and the suite holds it against dense solves of
the Kronecker system; on the device everything is batched, so that the two share neither kernels nor order.
Without a GPU some cases run batched on the CPU, so that this file does not age unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kfac_core.config import SOLVERS, STRATEGIES
from kfac_core.device_grams import DeviceGrams
from tests.gpu.trained import CPU, error_of, reference, trained

CUDA = torch.device("cuda", 0)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"factor_start": "first"},
    {"factor_start": "mean", "grafting": True, "kl_clip": None},
    {"damping": None, "relative_damping": 0.3},
    {"kl_clip": None},
    {"fixed_norm": 0.1, "kl_clip": None},
    {"eigen_rank": 8},
    {"eigen_start": "warm"},
    {"factor_batch_fraction": 0.5},
    {"overlap_factors": True},
    {"sequence": "reduce"},
    {"factor_dtype": "float64", "inverse_dtype": "float64"},
)  # fmt: skip
DOUBLE, SINGLE, HALF = 1e-8, 1e-3, 0.1
WARM = 1e-2
"""Allowed relative errors. Batched on CPUs: 2e-10 in float64, 6e-6 in float32. One orthogonal iteration
depends on the basis that it starts from, which is arbitrary where eigenvalues are equal: 2e-4."""


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each net with each strategy and solver, then with one option after another."""
    for net in ("conv", "transformer"):
        for strategy in STRATEGIES:
            fraction = {"grad_worker_fraction": 1.0} if strategy == "hybrid_opt" else {}
            for solver in SOLVERS:
                yield net, {"strategy": strategy, "solver": solver, **fraction}
        for options in OPTIONS:
            yield net, options


def on_devices(every: list[Any], rehearsed: list[Any]) -> list[Any]:
    return [pytest.param(CUDA, *each, marks=pytest.mark.gpu) for each in every] + [
        pytest.param(CPU, *each) for each in rehearsed
    ]


EVERY = list(cases())


@pytest.fixture(autouse=True)
def _exact_products():
    """Convolutions and products of the networks in IEEE float32; cuDNN rounds to TF32 by default."""
    convolutions, products = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = convolutions.fp32_precision, products.fp32_precision
    convolutions.fp32_precision = products.fp32_precision = "ieee"
    yield
    convolutions.fp32_precision, products.fp32_precision = before


@pytest.mark.parametrize(("device", "net", "config"), on_devices(EVERY, EVERY[::9]), ids=str)
def test_training_in_float64_is_that_of_the_reference(device, net, config):
    error = error_of(trained(net, torch.float64, device, config), reference(net, config))
    assert error <= (WARM if "eigen_start" in config else DOUBLE)


@pytest.mark.parametrize(
    ("device", "net", "solver"),
    on_devices([(n, s) for n in ("conv", "transformer") for s in SOLVERS], [("conv", "eigen")]),
    ids=str,
)
def test_training_in_float32_is_close_to_it(device, net, solver):
    config = {"solver": solver}
    assert error_of(trained(net, torch.float32, device, config), reference(net, config)) <= SINGLE


@pytest.mark.gpu
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("net", ["conv", "transformer"])
def test_the_defaults_round_and_refine_within_their_bounds(net, solver):
    defaults = {"eigen_start": None, "gram_precision": None, "product_precision": None, "solver": solver}
    got = trained(net, torch.float32, CUDA, defaults)
    assert SINGLE / 100 < error_of(got, reference(net, {"solver": solver})) <= WARM


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("net", "dtype", "options", "limit"),
    [
        ("conv", torch.float64, {"channels_last": True}, DOUBLE),
        ("transformer", torch.float32, {"half": torch.bfloat16}, HALF),
        ("transformer", torch.float32, {"half": torch.float16}, HALF),
    ],
    ids=["channels last", "bfloat16", "float16 with a GradScaler"],
)
def test_layouts_and_half_precision(net, dtype, options, limit):
    assert error_of(trained(net, dtype, CUDA, {}, **options), reference(net, {})) <= limit


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "limit"), [("ieee", 1e-6), ("tf32", 2e-3), ("bfloat16", 2e-3)])
def test_the_precision_of_a_gram(precision, limit):
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    exact = rows.double().mT @ rows.double()
    gram = DeviceGrams(torch.float32, precision).of_rows(rows.to(CUDA))[0]
    assert error_of({"": gram.cpu()}, {"": exact}) <= limit
