"""Promise: with K-FAC, NLCG's z is -F^-1 g as from a dense solve, and all else uses the raw gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.optimizers import NLCG
from tests.kfac_core.dense import DenseKFAC, DenseSettings
from tests.kfac_core.scalar_nlcg import ScalarNLCG, ScalarSettings

STEPS, LR = 12, 0.1
SHARED = {"damping": 0.05, "factor_decay": 0.6, "factor_update_steps": 1, "inverse_update_steps": 2}


class Scale(nn.Module):
    """A layer that K-FAC does not support."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def net() -> nn.Module:
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
    model = net()
    parameters = list(model.parameters())
    # A learning rate of zero: the dense K-FAC only computes, the transcription moves the model.
    dense = DenseKFAC(model, DenseSettings(solver, **SHARED, kl_clip=None, lr=0.0))
    reference = ScalarNLCG(flat(parameters), ScalarSettings(LR, beta, control=True))
    path = []
    for step in range(STEPS):
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


@pytest.mark.parametrize("solver", ["eigen", "inverse_pi"])
@pytest.mark.parametrize("beta", ["FR", "PR", "HS", "DY"])
def test_the_path_equals_the_transcription_with_dense_solves(solver, beta):
    model = net()
    kfac = KFAC(model, KFACConfig(solver=solver, kl_clip=None, **SHARED), lr=LR)
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


def test_the_gradients_end_preconditioned_and_the_raw_copy_does_not():
    model = net()
    kfac = KFAC(model, KFACConfig(kl_clip=None, **SHARED), lr=LR)
    optimizer = NLCG(model.parameters(), LR, kfac=kfac)
    x, labels = batch(0)
    loss = functional.cross_entropy(model(x), labels)
    loss.backward()
    raw = torch.tensor(flat([p.grad for p in model.parameters()]), dtype=torch.float64)
    optimizer.step(loss)
    state = optimizer.state[next(model.parameters())]
    assert torch.equal(state["g"], raw)
    assert torch.equal(state["d"], -torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert not torch.equal(state["d"], -raw)
    kfac.remove()


@pytest.mark.parametrize("stop", [1, 5])
def test_with_the_states_of_both_a_resumed_run_is_the_same_to_the_bit(stop):
    def advance(model: nn.Module, optimizer: NLCG, steps: range) -> list[float]:
        for step in steps:
            x, labels = batch(step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step(loss)
        return flat(list(model.parameters()))

    def build() -> tuple[nn.Module, KFAC, NLCG]:
        model = net()
        kfac = KFAC(model, KFACConfig(kl_clip=None, **SHARED), lr=LR)
        return model, kfac, NLCG(model.parameters(), LR, kfac=kfac)

    straight, _, optimizer = build()
    want = advance(straight, optimizer, range(STEPS))
    model, kfac, optimizer = build()
    advance(model, optimizer, range(stop))
    resumed_model, resumed_kfac, resumed = build()
    resumed_model.load_state_dict(model.state_dict())
    resumed_kfac.load_state_dict(kfac.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert advance(resumed_model, resumed, range(stop, STEPS)) == want
