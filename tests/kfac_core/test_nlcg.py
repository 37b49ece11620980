"""Promise: NLCG is linear CG where that is defined, and the published arithmetic everywhere else.

References: textbook CG on quadratics, and `scalar_nlcg.py`, a loop over floats.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from kfac_core.optimizers import NLCG
from tests.kfac_core.scalar_nlcg import ScalarNLCG, ScalarSettings

BETAS = ["FR", "PR", "HS", "DY"]
N = 8


def quadratic(seed: int) -> tuple[Tensor, Tensor]:
    """A `[N, N]` with eigenvalues in [1, 3] and b `[N]`.

    So well conditioned that no beta of CG leaves [0, 1], and so large that eps = 1e-8 stays below rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(N, N, dtype=torch.float64, generator=generator))
    spectrum = torch.linspace(1, 3, N, dtype=torch.float64)
    return q @ torch.diag(spectrum) @ q.T, 1e8 * torch.randn(N, dtype=torch.float64, generator=generator)


def linear_cg(a: Tensor, b: Tensor) -> tuple[list[Tensor], list[float]]:
    """Iterates and betas of Hestenes & Stiefel 1952 from zero."""
    x = torch.zeros_like(b)
    r = b - a @ x
    p, iterates, betas = r, [], []
    for _ in range(len(b)):
        alpha = (r @ r) / (p @ a @ p)
        x = x + alpha * p
        r_new = r - alpha * (a @ p)
        betas.append(float((r_new @ r_new) / (r @ r)))
        p, r = r_new + betas[-1] * p, r_new
        iterates.append(x)
    return iterates, betas


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("seed", [0, 1])
def test_exact_line_search_on_a_quadratic_is_linear_cg(beta, seed):
    a, b = quadratic(seed)
    iterates, betas = linear_cg(a, b)
    assert all(0 < value < 1 for value in betas), "the premise: clipping must not bite"
    theta = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (3, N - 3)]
    optimizer = NLCG(theta, lr=1.0, beta=beta, precondition="none", step_control=False)
    d = torch.zeros_like(b)
    for step, want in enumerate(iterates):
        x = torch.cat([p.detach() for p in theta])
        g = a @ x - b
        for p, part in zip(theta, g.split([3, N - 3]), strict=True):
            p.grad = part.clone()
        d = -g + (betas[step - 1] * d if step else 0)
        optimizer.param_groups[0]["lr"] = float(-(g @ d) / (d @ a @ d))
        optimizer.step()
        got = torch.cat([p.detach() for p in theta])
        assert (got - want).norm() <= 1e-10 * want.norm()
    solution = torch.linalg.solve(a, b)
    assert (got - solution).norm() <= 1e-10 * solution.norm()


LONG_STEP = 0.9  # overshoots: after short steps g barely turns, and PR and HS are clipped to zero throughout
START = [1.2, -0.7, 0.4, 0.9, -1.1]


def valley_value(x: Tensor) -> Tensor:
    """Smooth, not convex, not quadratic: curved valleys between neighbours, plus log-cosh."""
    smooth = sum(0.1 * (x[i + 1] - x[i] ** 2) ** 2 for i in range(len(START) - 1))
    return smooth + sum(torch.log(torch.cosh(x[i] - 0.3 * i)) for i in range(len(START)))


def valley_gradient(x: list[float]) -> list[float]:
    """The same by hand."""
    g = [math.tanh(x[i] - 0.3 * i) for i in range(len(x))]
    for i in range(len(x) - 1):
        residual = x[i + 1] - x[i] ** 2
        g[i + 1] += 0.2 * residual
        g[i] -= 0.4 * residual * x[i]
    return g


def compare(settings: ScalarSettings, losses: list[float] | None, steps: int = 30) -> ScalarNLCG:
    """Both implementations side by side; `losses`, if given, replace the valley's own for step control."""
    parts = [nn.Parameter(torch.tensor(START[i:j], dtype=torch.float64)) for i, j in ((0, 2), (2, 5))]
    optimizer = NLCG(
        parts,
        settings.lr,
        beta=settings.beta,
        precondition="bfgs" if settings.bfgs else "none",
        step_control=settings.control,
        restart_steps=settings.restart_steps,
    )
    reference = ScalarNLCG(list(START), settings)
    for step in range(steps):
        loss = valley_value(torch.cat(parts))
        optimizer.zero_grad()
        loss.backward()
        used = float(loss.detach()) if losses is None else losses[step]
        reference.step(valley_gradient(reference.theta), used)
        optimizer.step(used)
        got = torch.cat([p.detach() for p in parts])
        want = torch.tensor(reference.theta, dtype=torch.float64)
        assert (got - want).abs().max() <= 1e-12, f"step {step}"
        assert optimizer.scale == pytest.approx(reference.scale, rel=1e-12)
    return reference


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("bfgs", "control"), [(False, True), (True, False), (True, True)])
def test_thirty_steps_equal_the_scalar_transcription(beta, bfgs, control):
    reference = compare(ScalarSettings(LONG_STEP, beta, bfgs, control), None)
    assert sum(0 < value < 1 for value in reference.betas) > 5, (
        "the premise: beta is at work, not only clipped"
    )
    assert not bfgs or reference.renewals > 5, "the premise: h is renewed"


def test_where_the_curvature_is_negative_the_diagonal_keeps_its_value():
    generator = torch.Generator().manual_seed(0)
    theta = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = NLCG([theta], 0.1, step_control=False)
    reference = ScalarNLCG([0.0] * 5, ScalarSettings(0.1))
    for step in range(12):  # gradients of no function: y.s has either sign
        theta.grad = torch.randn(5, dtype=torch.float64, generator=generator)
        reference.step(theta.grad.tolist())
        optimizer.step()
        want = torch.tensor(reference.theta, dtype=torch.float64)
        assert (theta.detach() - want).norm() <= 1e-12 * want.norm(), f"step {step}"
    assert 2 < reference.renewals < 10, "the premise: both branches are taken"


def losses_with_ratio(ratio: float, steps: int) -> list[float]:
    """Losses whose moving average is multiplied by `ratio` from one control step to the next."""
    growth = ratio**0.2
    averages = [growth**k for k in range(steps)]
    return [1.0, *((now - 0.7 * before) / 0.3 for before, now in pairwise(averages))]


@pytest.mark.parametrize(
    ("ratio", "row"),
    [(1.2, 0.5), (1.13, 0.7), (1.11, 0.8), (1.08, 0.9), (1.06, 0.95), (1.03, 0.975), (1.02, 1.0), (0.9, 0.0)],
)
def test_each_row_of_the_step_control_equals_the_transcription(ratio, row):
    reference = compare(ScalarSettings(0.1, "FR", bfgs=True, control=True), losses_with_ratio(ratio, 30))
    assert reference.rows == [row] * 5


@pytest.mark.parametrize(
    ("ratio", "limit"), [(1.5, 1e-4), (0.99, 1.0)], ids=["smallest scale", "largest scale"]
)
def test_the_scale_stays_between_its_limits(ratio, limit):
    reference = compare(ScalarSettings(1e-3, "FR", False, control=True), losses_with_ratio(ratio, 90), 90)
    assert reference.scale == limit


def test_the_scale_recovers_after_a_rise():
    falling = losses_with_ratio(0.9, 20)
    rise = losses_with_ratio(1.2, 11)
    reference = compare(
        ScalarSettings(0.1, "FR", False, control=True), [*rise, *(rise[-1] * loss for loss in falling[1:])]
    )
    assert reference.rows[:2] == [0.5, 0.5]
    assert reference.rows[-1] == 0.0
    assert 0.25 < reference.scale < 1.0


def test_a_restart_drops_the_old_direction_at_its_interval():
    reference = compare(ScalarSettings(LONG_STEP, bfgs=False, restart_steps=4), None)
    assert all(value == 0 for value in reference.betas[::4])
    assert any(value > 0 for value in reference.betas[1::4])


def test_lars_scales_each_parameters_gradient_by_its_own_norms():
    eta, w, zero = 0.001, [3.0, 4.0], [0.0, 0.0]
    theta = [nn.Parameter(torch.tensor(values, dtype=torch.float64)) for values in (w, zero)]
    optimizer = NLCG(theta, 0.5, precondition="none", step_control=False, lars=eta)
    theta[0].grad = torch.tensor([6.0, 8.0], dtype=torch.float64)
    theta[1].grad = torch.tensor([1.0, 2.0], dtype=torch.float64)
    optimizer.step()
    ratio = eta * 5 / (10 + 0.1 * eta * 5 + 1e-8)
    want = torch.tensor([3 - 0.5 * ratio * 6, 4 - 0.5 * ratio * 8], dtype=torch.float64)
    torch.testing.assert_close(theta[0].detach(), want, rtol=1e-14, atol=0)
    unscaled = torch.tensor(
        [-0.5, -1.0], dtype=torch.float64
    )  # from zero, no ratio of norms would ever leave it
    torch.testing.assert_close(theta[1].detach(), unscaled, rtol=1e-14, atol=0)
