"""Promise: NLCG resumes to the bit, handles groups and missing gradients, and checks its arguments."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.optimizers import NLCG


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def train(model: nn.Module, optimizer: NLCG, steps: range) -> Tensor:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 4, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), torch.arange(6) % 3)
        loss.backward()
        optimizer.step(loss)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(  # each pair of two of them at least once
    ("dtype", "beta", "stop"),
    [
        (dtype, beta, (0, 1, 7, 10)[(place + turn) % 4])
        for turn, dtype in enumerate([torch.float64, torch.float32, torch.bfloat16, torch.float64])
        for place, beta in enumerate(["FR", "PR", "HS", "DY"])
    ],
)
def test_a_resumed_run_is_the_same_to_the_bit(dtype, beta, stop):
    straight = net(dtype)
    want = train(straight, NLCG(straight.parameters(), 0.5, beta=beta), range(20))
    model = net(dtype)
    optimizer = NLCG(model.parameters(), 0.5, beta=beta)
    train(model, optimizer, range(stop))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = net(dtype)
    other.load_state_dict(saved["model"])
    resumed = NLCG(other.parameters(), 9.9, beta=beta)
    resumed.load_state_dict(saved["optimizer"])
    got = train(other, resumed, range(stop, 20))
    assert torch.equal(got, want)


def test_loading_copies_so_that_two_resumed_runs_do_not_share_memory():
    model = net()
    optimizer = NLCG(model.parameters(), 0.1)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    other = net()
    resumed = NLCG(other.parameters(), 0.1)
    resumed.load_state_dict(saved)
    resumed.state[next(other.parameters())]["d"].zero_()
    assert saved["state"][0]["d"].any()


def test_each_group_has_its_rate_and_schedulers_change_it():
    first, second = (nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "lr": 0.01}]
    optimizer = NLCG(groups, 0.1, precondition="none", step_control=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for rates in ((0.1, 0.01), (0.05, 0.005)):
        before = first.detach().clone(), second.detach().clone()
        for p in (first, second):
            p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step()
        d = optimizer.state[first]["d"]
        for p, old, part, rate in zip((first, second), before, d.split(2), rates, strict=True):
            torch.testing.assert_close(p.detach() - old, rate * part, rtol=1e-12, atol=0)
    # beta is global: equal gradients twice make FR's beta 1 for both groups
    assert optimizer.state[first]["d"].tolist() == pytest.approx([-2.0] * 4)


def test_a_gradient_that_is_none_counts_as_zeros():
    def run(missing: bool) -> Tensor:
        p, idle = (nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64)) for _ in range(2))
        optimizer = NLCG([p, idle], 0.1)
        for _ in range(7):
            p.grad = p.detach() ** 3
            idle.grad = None if missing else torch.zeros_like(idle)
            optimizer.step(p.detach().square().sum())
        return torch.cat([p.detach(), idle.detach()])

    assert torch.equal(run(missing=True), run(missing=False))
    assert run(missing=True)[2:].tolist() == [1.0, -2.0]


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned():
    p = nn.Parameter(torch.tensor([3.0]))
    optimizer = NLCG([p], 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert float(p.detach()) == pytest.approx(3 - 0.1 * 6)


def kfac(**options: Any) -> tuple[nn.Module, KFAC]:
    model = net()
    return model, KFAC(model, KFACConfig(**options), lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": "PRP"}, "beta='PRP' is not one of FR, PR, HS, DY.*did you mean PR"),
        ({"precondition": "bgfs"}, "precondition='bgfs' is not one of bfgs, kfac, none.*did you mean bfgs"),
        ({"lr": -0.1}, r"lr=-0.1 of parameter group 0 lies outside \[0, inf\)"),
        ({"lr": float("nan")}, "lr=nan of parameter group 0"),
        ({"restart_steps": 0}, "restart_steps=0 is not a whole number of steps >= 1"),
        ({"restart_steps": True}, "restart_steps=True"),
        ({"lars": 0.0}, r"lars=0.0 lies outside \(0, inf\)"),
        ({"lars": float("inf")}, "lars=inf"),
        ({"precondition": "kfac"}, "precondition='kfac' needs kfac"),
    ],
)
def test_bad_values_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        NLCG(net().parameters(), **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("kfac_options", "options", "message"),
    [
        ({}, {}, r"kl_clip=0.001 .* use KFACConfig\(kl_clip=None\)"),
        ({"kl_clip": None}, {"precondition": "bfgs"}, "precondition='bfgs' leaves kfac unused"),
        ({"kl_clip": None}, {"lars": 0.001}, "lars=0.001 .* remove lars or kfac"),
    ],
)
def test_values_that_conflict_with_a_kfac_are_errors(kfac_options, options, message):
    model, preconditioner = kfac(**kfac_options)
    with pytest.raises(ConfigError, match=message):
        NLCG(model.parameters(), 0.1, kfac=preconditioner, **options)


def test_parameters_of_mixed_dtype_or_device_are_errors():
    def one(dtype: torch.dtype, device: str = "cpu") -> nn.Parameter:
        return nn.Parameter(torch.zeros(2, dtype=dtype, device=device))

    with pytest.raises(ConfigError, match=r"dtype torch.float32, torch.float64"):
        NLCG([one(torch.float32), one(torch.float64)], 0.1)
    with pytest.raises(ConfigError, match=r"device cpu, meta"):
        NLCG([one(torch.float32), one(torch.float32, "meta")], 0.1)
    with pytest.raises(ConfigError, match=r"dtype=torch.complex64 is not a real"):
        NLCG([one(torch.complex64)], 0.1)


def test_unused_group_options_are_errors():
    groups = [{"params": list(net().parameters()), "weight_decay": 0.1}]
    with pytest.raises(ConfigError, match=r"weight_decay=0.1 of parameter group 0 is unknown; use lr"):
        NLCG(groups, 0.1)
    optimizer = NLCG(net().parameters(), 0.1)
    with pytest.raises(ConfigError, match="one vector over all parameters; make a new NLCG"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_with_step_control_a_missing_or_negative_loss_is_an_error_and_nothing_moves():
    p = nn.Parameter(torch.tensor([1.0]))
    p.grad = torch.tensor([1.0])
    optimizer = NLCG([p], 0.1)
    with pytest.raises(ConfigError, match=r"step_control=True needs the loss: step\(loss\)"):
        optimizer.step()
    assert p.item() == 1.0
    for _ in range(5):
        optimizer.step(-1.0)
    with pytest.raises(ConfigError, match=r"needs a positive loss, .* is -1.0 at step 5"):
        optimizer.step(-1.0)
    NLCG([p], 0.1, step_control=False).step()
    assert p.item() < 1.0


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (3, {}, "state of 2 parameters .* does not fit this NLCG of 3"),
        (2, {"beta": "PR"}, "use the options it was saved under"),
        (2, {"precondition": "none"}, "use the options it was saved under"),
        (2, {"step_control": False}, "use the options it was saved under"),
    ],
)
def test_a_state_saved_under_other_options_is_an_error(size, options, message):
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    saved = NLCG([p], 0.1)
    saved.step(1.0)
    other = NLCG([nn.Parameter(torch.ones(size))], 0.1, **options)
    with pytest.raises(ConfigError, match=message):
        other.load_state_dict(saved.state_dict())
