"""Promise: Muon is torch's Muon on every matrix and AdamW on the rest, and resumes bit for bit."""

import copy

import pytest
import torch
from torch import Tensor, nn

from harness.training.optimizers import Muon

SETTINGS = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    inputs = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(step))
    model(inputs).square().mean().backward()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_matrices_take_torchs_muon_and_the_rest_adamw():
    ours, theirs = network(), network()
    optimizer = Muon(ours.parameters(), lr=0.02, **SETTINGS)
    matrices = [nn.Parameter(p.detach().clone().flatten(1)) for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw", **SETTINGS)
    adamw = torch.optim.AdamW(vectors, lr=0.02, weight_decay=0.01)
    for step in range(3):
        backward(ours, step)
        backward(theirs, step)
        for matrix, parameter in zip(matrices, [p for p in theirs.parameters() if p.ndim > 1], strict=True):
            matrix.grad = parameter.grad.flatten(1)
        optimizer.step()
        muon.step()
        adamw.step()
        with torch.no_grad():
            for matrix, parameter in zip(
                matrices, [p for p in theirs.parameters() if p.ndim > 1], strict=True
            ):
                parameter.copy_(matrix.view_as(parameter))
    assert torch.equal(flat(ours), flat(theirs))
    assert (flat(ours) - flat(network())).abs().min() > 0


def test_a_new_rate_counts_and_a_saved_state_resumes_bit_for_bit():
    model = network()
    optimizer = Muon(model.parameters(), lr=0.02, **SETTINGS)
    backward(model, 0)
    optimizer.step()
    other = copy.deepcopy(model)
    resumed = Muon(other.parameters(), lr=0.5, **SETTINGS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, trained in ((optimizer, model), (resumed, other)):
        each.param_groups[0]["lr"] = 0.001
        backward(trained, 1)
        before = flat(trained)
        each.step()
        assert 0 < (flat(trained) - before).abs().max() < 0.002
    assert torch.equal(flat(model), flat(other))
    assert len(optimizer.state) == len(list(model.parameters()))


def test_a_torch_without_muon_is_named(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"muon needs torch >= 2.9, got"):
        Muon(network().parameters(), lr=0.1, **SETTINGS)
