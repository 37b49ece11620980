"""Promise: steps of least squares minimise the exact quadratic model, lower the loss or are taken back."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.optimizers import AdaptiveDamping, LevenbergMarquardt

EVERY_STEP = {"factor_update_steps": 1, "inverse_update_steps": 1}


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return net, torch.randn(24, 3, dtype=torch.float64), torch.randn(24, dtype=torch.float64)


def started(net: nn.Module, damping: float = 1e-3, lr: float = 1.0) -> tuple[KFAC, LevenbergMarquardt]:
    kfac = KFAC(net, KFACConfig(damping=AdaptiveDamping(damping), grafting=False, **EVERY_STEP))
    return kfac, LevenbergMarquardt(net.parameters(), kfac=kfac, lr=lr)


def residuals_of(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    return lambda: (net(x).squeeze(-1) - y) / len(x) ** 0.5


def train(
    net: nn.Module,
    kfac: KFAC,
    optimizer: LevenbergMarquardt,
    x: Tensor,
    y: Tensor,
    steps: int,
    known: bool = False,
) -> list[float]:
    """Exact Gauss-Newton factors from a pass over the sum of residuals, then the loss's own pass."""
    residuals, losses = residuals_of(net, x, y), []
    size = dist.get_world_size() if dist.is_initialized() else 1
    for _ in range(steps):
        kfac.set_loss_terms(len(x))
        (residuals().sum() / len(x) ** 0.5).backward()
        optimizer.zero_grad()
        with kfac.paused():
            (0.5 * residuals().square().sum()).backward()
        for parameter in net.parameters() if size > 1 else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        now = residuals().detach() if known else None
        losses.append(float(optimizer.step(residuals, now)))
    return losses


def jacobian(net: nn.Module, residuals: Callable[[], Tensor]) -> Tensor:
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(r, net.parameters(), retain_graph=True)])
        for r in residuals()
    ]
    return torch.stack(rows)


def test_a_step_minimises_the_quadratic_model_over_the_direction_and_the_last_step():
    net, x, y = problem()
    kfac, optimizer = started(net)
    train(net, kfac, optimizer, x, y, 3)
    last = optimizer.state[next(net.parameters())]["s"].clone()
    residuals = residuals_of(net, x, y)
    j, damping = jacobian(net, residuals), kfac.damping
    gradient = j.T @ residuals().detach()
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    train(net, kfac, optimizer, x, y, 1)
    step = torch.cat([p.detach().flatten() for p in net.parameters()]) - before
    slope = gradient + j.T @ (j @ step) + damping * step
    for direction in (last, step):
        cosine = direction @ slope / (direction.norm() * gradient.norm())
        assert float(cosine) == pytest.approx(0, abs=1e-6)


def test_the_loss_falls_in_every_step_and_far():
    net, x, y = problem()
    losses = train(net, *started(net), x, y, 60)
    assert all(later <= sooner for sooner, later in pairwise(losses))
    assert losses[-1] < 0.05 * losses[0]


def test_residuals_that_are_known_save_a_pass_a_step_and_change_nothing():
    passes, found = [], []
    for known in (False, True):
        net, x, y = problem()
        net.register_forward_pre_hook(lambda *_, known=known: passes.append(known))
        found.append((train(net, *started(net), x, y, 5, known), [p.detach() for p in net.parameters()]))
    assert passes.count(False) == passes.count(True)  # `train` computes them once more
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_a_step_that_does_not_lower_the_loss_is_taken_back_and_the_damping_rises():
    net, x, y = problem()
    kfac, optimizer = started(net, damping=1e-6, lr=1e6)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    train(net, kfac, optimizer, x, y, 1)
    assert all(torch.equal(now, then) for now, then in zip(net.parameters(), before, strict=True))
    assert optimizer.rejected == 1
    assert kfac.damping == pytest.approx(4e-6)


def test_the_damping_falls_where_the_model_is_right():
    net, x, y = problem()
    kfac, optimizer = started(net, damping=1.0)
    train(net, kfac, optimizer, x, y, 10)
    assert kfac.damping == pytest.approx(0.95**10)


def run(rank: int, world_size: int) -> tuple[list[float], list[Tensor]]:
    net, x, y = problem()
    share = slice(rank * len(x) // world_size, (rank + 1) * len(x) // world_size)
    losses = train(net, *started(net), x[share], y[share], 8)
    return losses, [parameter.detach() for parameter in net.parameters()]


def test_two_ranks_step_as_one_does(world):
    losses, parameters = run(0, 1)
    for others, theirs in world(2).run(run):
        assert others == pytest.approx(losses, rel=1e-6)
        for got, want in zip(theirs, parameters, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_state_resumes_bitwise():
    net, x, y = problem()
    kfac, optimizer = started(net)
    train(net, kfac, optimizer, x, y, 7)
    saved = net.state_dict(), kfac.state_dict(), optimizer.state_dict()
    saved = torch.load(_stored(saved), weights_only=True)
    want = train(net, kfac, optimizer, x, y, 6)
    other, _, _ = problem()
    again = started(other, damping=5.0)
    for part, state in zip((other, *again), saved, strict=True):
        part.load_state_dict(state)
    assert train(other, *again, x, y, 6) == want


def _stored(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def test_what_would_scale_or_damp_twice_is_refused():
    net, _, _ = problem()
    kfac = KFAC(net, KFACConfig(damping=AdaptiveDamping(1e-3)))
    with pytest.raises(ConfigError, match="sets the length of the step itself"):
        LevenbergMarquardt(net.parameters(), kfac=kfac)
    kfac.remove()
    kfac = KFAC(net, KFACConfig(damping=1e-3, grafting=False))
    with pytest.raises(ConfigError, match="adapts the damping"):
        LevenbergMarquardt(net.parameters(), kfac=kfac)
    with pytest.raises(ConfigError, match=r"damping=0 lies outside \(0, inf\)"):
        AdaptiveDamping(0)
