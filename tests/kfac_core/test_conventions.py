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


def make(model: nn.Module, lr: float = LR, **options: Any) -> KFAC:
    every_step = {"factor_update_steps": 1, "inverse_update_steps": 1}
    return KFAC(model, KFACConfig(**{**every_step, **options}), lr=lr)


def backward(model: nn.Module, seed: int = 0) -> None:
    x, y = batch(seed)
    model.zero_grad()
    functional.cross_entropy(model(x), y).backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def running(kfac: KFAC) -> list[Tensor]:
    return [factor.clone() for factor in kfac._factors.running.values()]


def statistics() -> list[Tensor]:
    """What one step adds to the factors: the running means without memory."""
    model = conv()
    kfac = make(model, factor_decay=0.0)
    backward(model)
    kfac.step()
    return running(kfac)


def after_one_step(**options: Any) -> list[Tensor]:
    model = conv()
    kfac = make(model, **options)
    backward(model)
    kfac.step()
    return running(kfac)


@pytest.mark.parametrize("decay", [0.9, 0.1])
def test_factor_decay_is_the_weight_of_the_old_factor(decay):
    for got, new in zip(after_one_step(factor_decay=decay), statistics(), strict=True):
        old = torch.eye(new.shape[-1], dtype=new.dtype)
        torch.testing.assert_close(got, decay * old + (1 - decay) * new, rtol=1e-12, atol=1e-14)
        assert not torch.allclose(got, (1 - decay) * old + decay * new, rtol=1e-3)


def test_one_minus_the_decay_turns_it_into_the_weight_of_the_new_factor():
    theirs = 0.95  # DP-KFAC's release weights the new statistics with its factor_decay
    for got, new in zip(after_one_step(factor_decay=1 - theirs), statistics(), strict=True):
        want = torch.lerp(torch.eye(new.shape[-1], dtype=new.dtype), new, theirs)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


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


def test_accumulated_damping_would_be_detected():
    model, once, five_times = conv(), [], []
    kfac = make(model, solver="inverse", damping=0.5)
    backward(model)
    kfac.step()
    once = [data.clone() for data in kfac._second_order.data.values()]
    for factor in kfac._factors.running.values():  # the effect of lzhangbv's add_ in place
        factor.diagonal(dim1=-2, dim2=-1).add_(5 * 0.5)
    kfac._update_second_order()
    five_times = list(kfac._second_order.data.values())
    assert all((a - b).norm() > 0.1 * a.norm() for a, b in zip(once, five_times, strict=True))


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
    found = solved(KFACConfig(solver="eigen"), torch.diag(values)[None])[-3:]
    want = values * torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dim", [255, 256, 300])
def test_the_eigenvectors_of_large_factors_too_make_up_the_factor_which_stays_as_it_is(dim):
    factor = torch.randn(2, dim, dim, dtype=torch.float64)
    factor = factor @ factor.mT
    before = factor.clone()
    data = solved(KFACConfig(solver="eigen"), factor)
    rows, values = data[: factor.numel()].view_as(factor), data[factor.numel() :].view(2, 1, dim)
    torch.testing.assert_close(rows.mT * values @ rows, factor, rtol=1e-10, atol=1e-8)
    assert torch.equal(factor, before)


def convolution_factors() -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Ours, the definition's, and the output positions T."""
    model = nn.Sequential(conv()[0], nn.Tanh(), nn.Flatten(), conv()[4])
    kfac = make(model, factor_decay=0.0)
    backward(model)
    kfac.step()
    (a,), (g,) = factors(model, *batch())["0"]
    return kfac._factors.running[0, "a"][0], kfac._factors.running[0, "g"][0], a, g, 9


def test_the_scale_of_a_convolution_is_kfcs():
    got_a, got_g, a, g, _ = convolution_factors()
    assert abs(float(got_a.norm() * got_g.norm() / (a.norm() * g.norm())) - 1) < 1e-10
    torch.testing.assert_close(torch.kron(got_g, got_a), torch.kron(g, a), rtol=1e-10, atol=1e-14)


def test_the_scale_that_one_release_uses_is_off_by_n_squared_t_to_the_fifth():
    got_a, got_g, _, _, positions = convolution_factors()
    # rows of a and g over T, both then averaged over N * T rows, g still that of the batch mean
    their_a, their_g = got_a / positions, got_g / (BATCH**2 * positions**4)
    ratio = float(their_a.norm() * their_g.norm() / (got_a.norm() * got_g.norm()))
    assert ratio == pytest.approx(1 / (BATCH**2 * positions**5), rel=1e-10)
    gradient = torch.randn(3, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def cosine(a: Tensor, g: Tensor) -> float:
        system = torch.kron(g, a) + 0.003 * torch.eye(gradient.numel(), dtype=a.dtype)
        solved = torch.linalg.solve(system, gradient.flatten())
        return float(functional.cosine_similarity(solved, gradient.flatten(), dim=0))

    assert cosine(their_a, their_g) > 1 - 1e-6  # K-FAC turned into a rescaled gradient
    assert cosine(got_a, got_g) < 0.999


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


def test_kl_clip_bounds_the_predicted_divergence_by_kl_clip():
    got, plain = clipped(10.0, 0.001)
    unclipped, _ = clipped(10.0, None)
    nu = float(got["0.weight"].norm() / unclipped["0.weight"].norm())
    step = sum(float((got[name] * plain[name]).sum()) for name in PRECONDITIONED)
    assert 10.0**2 * nu * step == pytest.approx(0.001, rel=1e-10)


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
