"""Promise: NLCG with K-FAC, on ranks, in groups and after a resume takes the path that its definition gives.

With K-FAC z is -F^-1 g as from a dense solve, and all else uses the raw gradient. With averaged gradients
every world size takes the same path, whatever each rank's own loss.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.collectives import SingleCommunicator
from kfac_core.optimizers import NLCG
from tests.kfac_core.dense import DenseKFAC, DenseSettings
from tests.kfac_core.runs import GLOBAL_BATCH, average_gradients, build, data
from tests.kfac_core.scalar_nlcg import ScalarNLCG, ScalarSettings

KFAC_STEPS, LR = 12, 0.1
SHARED = {"damping": 0.05, "factor_decay": 0.6, "factor_update_steps": 1, "inverse_update_steps": 2}


class Scale(nn.Module):
    """A layer that K-FAC does not support."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scaled_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Scale(6), nn.Linear(6, 3, bias=False)).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(10, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (10,), generator=generator)


def flat(tensors: list[Tensor]) -> list[float]:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()


def dense_path(solver: str, beta: str) -> tuple[list[list[float]], ScalarNLCG]:
    """Parameters after every step of the scalar transcription with z from the dense solve."""
    model = scaled_net()
    parameters = list(model.parameters())
    # A learning rate of zero: the dense K-FAC only computes, the transcription moves the model.
    dense = DenseKFAC(model, DenseSettings(solver, **SHARED, kl_clip=None, lr=0.0))
    reference = ScalarNLCG(flat(parameters), ScalarSettings(LR, beta, control=True))
    path = []
    for step in range(KFAC_STEPS):
        x, labels = batch(step % 2)
        everyone = {"0": range(len(x)), "3": range(len(x))}
        solved = dense.step(x, labels, everyone)
        raw = flat([p.grad for p in parameters])
        z = [-value for value in flat([solved[name] for name, _ in model.named_parameters()])]
        loss = float(functional.cross_entropy(model(x), labels).detach())
        reference.step(raw, loss, z)
        moved = torch.tensor(reference.theta, dtype=torch.float64).split([p.numel() for p in parameters])
        with torch.no_grad():
            for parameter, value in zip(parameters, moved, strict=True):
                parameter.copy_(value.view_as(parameter))
        path.append(list(reference.theta))
    return path, reference


@pytest.mark.parametrize(("solver", "beta"), [("eigen", "FR"), ("inverse_pi", "PR"), ("eigen", "HS")])
def test_the_path_equals_the_transcription_with_dense_solves(solver, beta):
    model = scaled_net()
    kfac = KFAC(model, KFACConfig.sc20(solver=solver, kl_clip=None, **SHARED), lr=LR)
    optimizer = NLCG(model.parameters(), LR, beta=beta, kfac=kfac)
    want_path, reference = dense_path(solver, beta)
    for step, want in enumerate(want_path):
        x, labels = batch(step % 2)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step(loss)
        got = torch.tensor(flat(list(model.parameters())), dtype=torch.float64)
        error = (got - torch.tensor(want, dtype=torch.float64)).norm() / got.norm()
        assert error < 1e-8, f"step {step}: relative error {error:.2e}"
    assert sum(0 < value < 1 for value in reference.betas) > 2, "the premise: beta is at work"
    kfac.remove()


STEPS = 12


def bias_of(rank: int, world_size: int, step: int) -> float:
    """Offset of this rank's loss from the mean: sums to zero over ranks, and grows with the step."""
    if world_size == 1:
        return 0.0
    return 0.04 * step * (1 if rank < world_size // 2 else -1)


def walk(
    rank: int, world_size: int, options: dict[str, Any], alone: bool = False
) -> tuple[list[Tensor], float, float]:
    """Parameters after every step, the last scale and average; with `alone` the loss is not averaged."""
    model = build("mlp")
    with_kfac = options.get("precondition") == "kfac"
    config = KFACConfig.sc20(kl_clip=None, damping=0.1, factor_update_steps=1, inverse_update_steps=2)
    kfac = KFAC(model, config, lr=0.1) if with_kfac else None
    optimizer = NLCG(model.parameters(), 0.3, kfac=kfac, **options)
    if alone:
        optimizer._communicator = SingleCommunicator()
    mine = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
    path = []
    for step in range(STEPS):
        x, labels = data("mlp", step % 3)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[mine]), labels[mine])
        loss.backward()
        average_gradients(model, world_size)
        optimizer.step(loss.detach() + bias_of(rank, world_size, step))
        path.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return path, optimizer.scale, float(optimizer.state[next(model.parameters())]["loss_ema"])


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {}),
        (4, {"beta": "PR", "precondition": "none"}),
        (2, {"beta": "DY"}),
        (4, {"precondition": "kfac"}),
    ],
)
def test_every_world_size_takes_the_path_of_one_rank(world, world_size, options):
    one, one_scale, one_average = walk(0, 1, options)
    for path, scale, average in world(world_size).run(walk, options):
        assert scale == one_scale
        assert average == pytest.approx(one_average, rel=1e-12), "a state must resume on another world size"
        for got, want in zip(path, one, strict=True):
            assert (got - want).norm() <= 1e-12 * want.norm()


def test_with_their_own_losses_the_ranks_would_diverge(world):
    results = world(2).run(walk, {}, True)
    assert results[0][1] < results[-1][1], "the premise of the test above: the losses lead to two branches"


def traffic(rank: int, world_size: int, step_control: bool) -> tuple[int, int]:
    optimizer = NLCG(build("mlp").parameters(), 0.3, step_control=step_control)
    for _ in range(STEPS):
        optimizer.step(1.0)
    counted = optimizer._communicator.traffic
    return counted.calls, counted.sent_bytes


def test_traffic_is_one_scalar_per_step_and_nothing_without_control(world):
    assert world(2).run(traffic, True) == [(STEPS, 8 * STEPS)] * 2
    assert world(2).run(traffic, False) == [(0, 0)] * 2


def train(model: nn.Module, optimizer: NLCG, steps: range) -> Tensor:
    for step in steps:
        x, labels = data("mlp", step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), labels)
        loss.backward()
        optimizer.step(loss)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("dtype", "beta", "stop", "with_kfac"),
    [
        (torch.float64, "FR", 0, False), (torch.float32, "PR", 1, False), (torch.bfloat16, "HS", 7, False),
        (torch.float64, "DY", 10, False), (torch.float64, "FR", 5, True),
    ],
)  # fmt: skip
def test_a_resumed_run_is_the_same_to_the_bit(dtype, beta, stop, with_kfac):
    def start(lr: float = 0.5) -> tuple[nn.Module, NLCG, KFAC | None]:
        model = build("mlp").to(dtype)
        config = KFACConfig.sc20(kl_clip=None, damping=0.1, factor_update_steps=1, inverse_update_steps=2)
        kfac = KFAC(model, config, lr=0.5) if with_kfac else None
        return model, NLCG(model.parameters(), lr, beta=beta, kfac=kfac), kfac

    straight, optimizer, _ = start()
    want = train(straight, optimizer, range(20))
    model, optimizer, kfac = start()
    train(model, optimizer, range(stop))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), kfac and kfac.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed, other_kfac = start(lr=9.9)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    if other_kfac is not None:
        other_kfac.load_state_dict(saved[2])
    assert torch.equal(train(other, resumed, range(stop, 20)), want)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": "PRP"}, "beta='PRP' is not one of FR, PR, HS, DY.*did you mean PR"),
        ({"precondition": "bgfs"}, "precondition='bgfs' is not one of bfgs, kfac, none.*did you mean bfgs"),
        ({"lr": -0.1}, r"lr=-0.1 of parameter group 0 lies outside \[0, inf\)"),
        ({"restart_steps": 0}, "restart_steps=0 is not a whole number of steps >= 1"),
        ({"lars": 0.0}, r"lars=0.0 lies outside \(0, inf\)"),
        ({"precondition": "kfac"}, "precondition='kfac' needs kfac"),
    ],
)
def test_bad_values_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        NLCG(build("mlp").parameters(), **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("kfac_options", "options", "message"),
    [
        ({}, {}, r"kl_clip=0.001 .* use KFACConfig\(grafting=False\)"),
        ({"kl_clip": None, "grafting": True}, {}, r"grafting=true .* use KFACConfig\(grafting=False\)"),
        ({"kl_clip": None}, {"precondition": "bfgs"}, "precondition='bfgs' leaves kfac unused"),
        ({"kl_clip": None}, {"lars": 0.001}, "lars=0.001 .* remove lars or kfac"),
    ],
)
def test_values_that_conflict_with_a_kfac_are_errors(kfac_options, options, message):
    model = build("mlp")
    kfac = KFAC(model, KFACConfig.sc20(**kfac_options), lr=0.1)
    with pytest.raises(ConfigError, match=message):
        NLCG(model.parameters(), 0.1, kfac=kfac, **options)


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
    groups = [{"params": list(build("mlp").parameters()), "weight_decay": 0.1}]
    with pytest.raises(ConfigError, match=r"weight_decay=0.1 of parameter group 0 is unknown; use lr"):
        NLCG(groups, 0.1)
    optimizer = NLCG(build("mlp").parameters(), 0.1)
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
