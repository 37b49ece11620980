"""Promise: each convention on which K-FAC codes differ is the documented one, with a test named after it.

The decay's meaning, the identity start, damping on a copy, KFC's scale of convolutions, one global kl-clip
with lr^2, unchanged gradients of other layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from tests.kfac_core.dense import factors
from tests.kfac_core.runs import solved

BATCH, LR = 6, 0.1


def conv() -> nn.Module:
    """One convolution with T = 3 * 3 output positions, a BatchNorm, a Linear."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)
    ).double()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, 2, 6, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (BATCH,), generator=generator)


def make(model: nn.Module, lr: float = LR, execution: Execution | None = None, **options: Any) -> KFAC:
    every_step = {"factor_update_steps": 1, "inverse_update_steps": 1}
    return KFAC(model, KFACConfig.sc20(**{**every_step, **options}), lr=lr, execution=execution)


def backward(model: nn.Module, seed: int = 0) -> None:
    x, y = batch(seed)
    model.zero_grad()
    functional.cross_entropy(model(x), y).backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def running(kfac: KFAC) -> list[Tensor]:
    return [factor.clone() for _, factor in sorted(kfac._factors.running.items())]


def statistics(seed: int = 0) -> list[Tensor]:
    """What one step adds to the factors: the running means without memory."""
    model = conv()
    kfac = make(model, factor_decay=0.0)
    backward(model, seed)
    kfac.step()
    return running(kfac)


@pytest.mark.parametrize("decay", [0.9, 0.05])  # DP-KFAC's release weights the new statistics with 0.95
def test_factor_decay_is_the_weight_of_the_old_factor(decay):
    model = conv()
    kfac = make(model, factor_decay=decay)
    backward(model)
    kfac.step()
    for got, new in zip(running(kfac), statistics(), strict=True):
        old = torch.eye(new.shape[-1], dtype=new.dtype)
        torch.testing.assert_close(got, decay * old + (1 - decay) * new, rtol=1e-12, atol=1e-14)


def test_factor_start_first_drops_the_identity_and_nothing_else():
    model = conv()
    kfac = make(model, factor_decay=0.9, factor_start="first")
    backward(model)
    kfac.step()
    first = running(kfac)
    for got, new in zip(first, statistics(), strict=True):
        torch.testing.assert_close(got, new, rtol=1e-12, atol=1e-14)
    backward(model, seed=1)
    kfac.step()
    for got, old in zip(running(kfac), first, strict=True):
        assert (got - old).norm() < 0.5 * old.norm()  # from the second step on the old weighs 0.9


@pytest.mark.parametrize("execution", list(Execution))
@pytest.mark.parametrize("stored", [None, "float32"])
def test_factor_start_mean_is_the_mean_of_the_statistics_until_the_decay_binds(execution, stored):
    model = conv()
    kfac = make(model, execution=execution, factor_decay=0.7, factor_start="mean", factor_dtype=stored)
    seen, expected = [], []
    for update in range(6):
        backward(model, seed=update)
        kfac.step()
        seen.append(statistics(seed=update))
        weight = max(0.3, 1 / (update + 1))
        expected = [
            (1 - weight) * old + weight * new for old, new in zip(expected or seen[0], seen[-1], strict=True)
        ]
        if update == 2:  # the plain mean of three
            for got, *each in zip(expected, *seen, strict=True):
                torch.testing.assert_close(got, sum(each) / 3, rtol=1e-12, atol=1e-14)
    tolerance = {"rtol": 1e-12, "atol": 1e-14} if stored is None else {"rtol": 1e-5, "atol": 1e-6}
    for got, want in zip(running(kfac), expected, strict=True):
        torch.testing.assert_close(got.double(), want, **tolerance)


@pytest.mark.parametrize("solver", ["inverse", "inverse_pi", "eigen"])
def test_damping_never_accumulates_in_the_factors(solver):
    model = conv()
    kfac = make(model, solver=solver, damping=0.5)
    backward(model)
    kfac.step()
    before = running(kfac)
    for _ in range(5):
        kfac._update_second_order()
    assert all(torch.equal(a, b) for a, b in zip(before, running(kfac), strict=True))


def test_factors_change_only_every_factor_steps_and_from_that_step_alone():
    model = conv()
    kfac = make(model, factor_decay=0.0, factor_update_steps=2, inverse_update_steps=2)
    seen = []
    for seed in (0, 1, 2):
        backward(model, seed)
        kfac.step()
        seen.append(running(kfac))
    fresh = conv()
    alone = make(fresh, factor_decay=0.0)
    backward(fresh, seed=2)
    alone.step()
    for first, second, third, want in zip(*seen, running(alone), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(third, want, rtol=1e-12, atol=1e-14)


def test_eigenvalues_below_1e_10_count_as_zero():
    values = torch.tensor([1e-11, 2e-10, 1.0], dtype=torch.float64)
    found = solved(KFACConfig.sc20(solver="eigen"), torch.diag(values)[None])[-3:]
    want = values * torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dim", [255, 256])
def test_the_eigenvectors_of_large_factors_too_make_up_the_factor_which_stays_as_it_is(dim):
    factor = torch.randn(2, dim, dim, dtype=torch.float64)
    factor = factor @ factor.mT
    before = factor.clone()
    data = solved(KFACConfig.sc20(solver="eigen"), factor)
    rows, values = data[: factor.numel()].view_as(factor), data[factor.numel() :].view(2, 1, dim)
    torch.testing.assert_close(rows.mT * values @ rows, factor, rtol=1e-10, atol=1e-8)
    assert torch.equal(factor, before)


def test_the_scale_of_a_convolution_is_kfcs():
    model = nn.Sequential(conv()[0], nn.Tanh(), nn.Flatten(), conv()[4])
    kfac = make(model, factor_decay=0.0)
    backward(model)
    kfac.step()
    (a,), (g,) = factors(model, *batch())["0"]
    got_a, got_g = (kfac._factors.running[0, kind][0] for kind in "ag")
    torch.testing.assert_close(torch.kron(got_g, got_a), torch.kron(g, a), rtol=1e-10, atol=1e-14)


def clipped(lr: float, kl_clip: float | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = conv()
    kfac = make(model, lr=lr, kl_clip=kl_clip)
    backward(model)
    plain = gradients(model)
    kfac.step()
    return gradients(model), plain


PRECONDITIONED = ("0.weight", "0.bias", "4.weight", "4.bias")


@pytest.mark.parametrize("lr", [10.0, 1.0])
def test_kl_clip_is_one_scalar_over_all_layers_with_the_square_of_the_rate(lr):
    kl_clip = 0.001
    unclipped, plain = clipped(lr, None)
    predicted = lr**2 * sum(float((unclipped[name] * plain[name]).sum()) for name in PRECONDITIONED)
    nu = (kl_clip / predicted) ** 0.5
    assert nu < 0.9  # it bites
    got, _ = clipped(lr, kl_clip)
    for name in PRECONDITIONED:
        torch.testing.assert_close(got[name], nu * unclipped[name], rtol=1e-12, atol=0)


def test_kl_clip_never_scales_up():
    got, _ = clipped(1e-6, 0.001)
    unclipped, _ = clipped(1e-6, None)
    assert all(torch.equal(got[name], unclipped[name]) for name in got)


def test_a_gradient_of_zero_stays_zero_after_the_clip():
    model = conv()
    kfac = make(model)
    backward(model)
    for parameter in model.parameters():
        parameter.grad.zero_()
    kfac.step()
    assert all(not gradient.any() for gradient in gradients(model).values())


def test_layers_that_kfac_does_not_cover_keep_their_gradient_unscaled():
    got, plain = clipped(10.0, 0.001)
    for name in ("1.weight", "1.bias"):  # BatchNorm
        assert torch.equal(got[name], plain[name])


def test_a_skipped_layer_is_outside_the_clip():
    model = conv()
    kfac = make(model, lr=10.0, skip=("4$",))
    backward(model)
    plain = gradients(model)
    kfac.step()
    got = gradients(model)
    alone = conv()
    free = make(alone, lr=10.0, skip=("4$",), kl_clip=None)
    backward(alone)
    free.step()
    unclipped = gradients(alone)
    predicted = 100 * sum(float((unclipped[name] * plain[name]).sum()) for name in ("0.weight", "0.bias"))
    assert torch.equal(got["4.weight"], plain["4.weight"])
    torch.testing.assert_close(got["0.weight"], (0.001 / predicted) ** 0.5 * unclipped["0.weight"])
