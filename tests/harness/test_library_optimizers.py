"""Promise: optimizers follow their papers from the first step, and resume exactly."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from harness.cell import Optimizer
from harness.training.optimizers import Muon, build_optimizer, learning_rate
from kfac_core.collectives import SingleCommunicator
from kfac_core.schedule import Decay

LR = 0.05


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def backward(model: nn.Module, step: int, *shape: int) -> None:
    model.zero_grad()
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, *(shape or (6,)), generator=generator, dtype=torch.float64)
    (model(inputs) - 1).square().mean().backward()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def build(model: nn.Module, name: str, **fields: object) -> torch.optim.Optimizer:
    spec = Optimizer(name=name, lr=LR, **fields)
    return build_optimizer(spec, model.parameters(), None, SingleCommunicator())


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Tensor:
    for step in steps:
        backward(model, step)
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize(
    ("name", "fields", "theirs"),
    [
        ("sgd", {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01}, torch.optim.SGD),
        ("adam", {"weight_decay": 0.01}, torch.optim.AdamW),
        ("rmsprop", {"momentum": 0.5, "weight_decay": 0.01}, torch.optim.RMSprop),
    ],
)
def test_torchs_own_get_all_fields_and_nothing_else(name, fields, theirs):
    ours, other = network(), network()
    assert torch.equal(
        trained(ours, build(ours, name, **fields), range(5)),
        trained(other, theirs(other.parameters(), lr=LR, **fields), range(5)),
    )


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)
    return nn.Sequential(*layers).double()


def test_matrices_take_torchs_muon_and_the_rest_adamw():
    settings = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    ours, theirs = convolutional(), convolutional()
    optimizer = Muon(ours.parameters(), lr=0.02, **settings)
    matrices = [nn.Parameter(p.detach().clone().flatten(1)) for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw", **settings)
    adamw = torch.optim.AdamW(vectors, lr=0.02, weight_decay=0.01)
    for step in range(3):
        backward(ours, step, 3, 4, 4)
        backward(theirs, step, 3, 4, 4)
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
    assert (flat(ours) - flat(convolutional())).abs().min() > 0


def test_a_torch_without_muon_is_named(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"muon needs torch >= 2.9, got"):
        build(network(), "muon")


def test_muon_takes_a_new_rate():
    model = network()
    optimizer = build(model, "muon")
    trained(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"] = LR / 100
    before = flat(model)
    assert 0 < (trained(model, optimizer, range(1, 2)) - before).abs().max() < LR / 50


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_version_3_of_its_paper_from_the_first_step_on(decay):
    """Algorithm 2 of arXiv:1904.00962 without bias correction, the norm of a weight at most 10.

    The library takes decoupled decay off the weight itself and not into what the trust ratio scales.
    """
    ours, model = network(), network()
    optimizer = build(ours, "lamb", weight_decay=decay)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
    for step in range(10):
        trained(ours, optimizer, range(step, step + 1))
        backward(model, step)
        with torch.no_grad():
            for parameter, (mean, square) in zip(model.parameters(), moments, strict=True):
                mean.mul_(0.9).add_(0.1 * parameter.grad)
                square.mul_(0.999).add_(0.001 * parameter.grad**2)
                parameter.mul_(1 - LR * decay)
                update = mean / (square.sqrt() + 1e-6)
                parameter.sub_(LR * parameter.norm().clamp(max=10) / update.norm() * update)
        torch.testing.assert_close(flat(ours), flat(model), rtol=1e-4, atol=1e-5)


def inverse_root(statistics: Tensor, power: int) -> Tensor:
    """By an eigendecomposition; the library iterates, with a ridge of 1e-6 of the largest eigenvalue."""
    values, vectors = torch.linalg.eigh(statistics)
    return vectors @ torch.diag((values + 1e-6 * values[-1]) ** (-1 / power)) @ vectors.T


def test_shampoo_is_its_algorithm_with_roots_every_ten_steps_grafted_onto_sgd():
    """Algorithm 1 of arXiv:1802.09568 with running means, grafting and Nesterov (arXiv:2002.09018)."""
    shape = (24, 32)
    torch.manual_seed(1)
    ours = nn.Linear(shape[1], shape[0], bias=False).double()
    weight = ours.weight.detach().clone()
    optimizer = build(ours, "shampoo")
    optimizer.shape_interpretation = False  # the dimensions of so small a matrix would be merged into one
    left, right = 1e-6 * torch.eye(24).double(), 1e-6 * torch.eye(32).double()
    momentum, plain = torch.zeros_like(weight), torch.zeros_like(weight)
    roots = torch.eye(24).double(), torch.eye(32).double()
    for step in range(1, 43):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        gradient *= torch.logspace(0, -1.5, 24)[:, None] * torch.logspace(0, -1, 32)
        ours.weight.grad = gradient.clone()
        optimizer.step()
        left = 0.999 * left + 0.001 * gradient @ gradient.T
        right = 0.999 * right + 0.001 * gradient.T @ gradient
        if step % 10 == 0:
            roots = inverse_root(left, 4), inverse_root(right, 4)
        update = roots[0] @ gradient @ roots[1]
        update *= gradient.norm() / update.norm()
        momentum, plain = 0.9 * momentum + update, 0.9 * plain + gradient
        weight -= LR * (0.9 * momentum + update if step >= 25 else 0.9 * plain + gradient)
        torch.testing.assert_close(ours.weight.detach(), weight, rtol=1e-2, atol=2e-3)
    assert (update - gradient).norm() > 0.3 * gradient.norm()  # far from SGD by now


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop", "lars", "lamb", "muon", "soap", "shampoo"])
def test_a_checkpoint_on_disk_resumes_to_the_bit(name, at=31):  # after roots and preconditioners were made
    model = network()
    optimizer = build(model, name)
    trained(model, optimizer, range(at))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)  # as a run's checkpoints are read
    other = network()
    other.load_state_dict(saved["model"])
    resumed = build(other, name)
    resumed.load_state_dict(copy.deepcopy(saved["optimizer"]))
    later = range(at, at + 12)
    assert torch.equal(trained(model, optimizer, later), trained(other, resumed, later))


def test_shampoos_state_of_another_model_is_refused():
    model, other = network(), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = build(model, "shampoo")
    trained(model, optimizer, range(2))
    with pytest.raises(ValueError, match="momentum of parameter 0 has another shape"):
        build(other, "shampoo").load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(("scaling", "peak"), [("linear", 0.8), ("none", 0.1)])
def test_a_learning_rate_is_its_peak_times_the_curve(scaling, peak):
    spec = Optimizer(lr=0.1, lr_scaling=scaling, schedule=Decay(shape="linear"))
    assert learning_rate(spec, 8, 21, 7, 9) == pytest.approx(peak * 2 / 3)
