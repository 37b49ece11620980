"""Promise: the Poisson network's Laplacian is autograd's, and its Gauss-Newton factors are exact."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from harness.cell import Cell
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import EvalRecord, Record
from harness.training.train import Trainer
from harness.training.world import World
from harness.workloads.poisson.poisson import ForwardLaplacian, build
from harness.workloads.workload import Share
from kfac_core import KFAC, KFACConfig

OPTIONS = {"dimensions": 2, "network": "64", "inside": 12, "boundary": 6}


def share(rank: int = 0, world_size: int = 1) -> Share:
    return Share(rank, world_size, 18 // world_size, 3, torch.device("cpu"))


@pytest.mark.parametrize("dimensions", [2, 5])
def test_value_gradient_and_laplacian_are_autograds(dimensions):
    torch.manual_seed(0)
    net = ForwardLaplacian(dimensions, (7, 5))
    x = torch.rand(4, dimensions, dtype=torch.float64, requires_grad=True)
    out = net(x)
    (gradient,) = torch.autograd.grad(out[:, 0].sum(), x, create_graph=True)
    torch.testing.assert_close(out[:, 1:-1], gradient)
    laplacian = sum(
        torch.autograd.grad(gradient[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(dimensions)
    )
    torch.testing.assert_close(out[:, -1], laplacian)


@pytest.mark.parametrize("dimensions", [2, 5])
def test_the_solution_satisfies_the_equation_and_has_no_error(dimensions):
    workload = build({**OPTIONS, "dimensions": dimensions}, share())

    def solution(x: torch.Tensor) -> torch.Tensor:
        """Value, derivatives (which no loss reads) and Laplacian of the exact solution."""
        u = torch.sin(math.pi * x).prod(1) if dimensions == 2 else torch.cos(math.pi * x).sum(1)
        factor = 2 if dimensions == 2 else 1
        return torch.cat([u[:, None], torch.zeros_like(x), -factor * math.pi**2 * u[:, None]], 1)

    (batch,) = [next(workload.batches(0))]
    assert float(workload.loss(solution, batch)) == pytest.approx(0, abs=1e-20)
    workload.evaluate(solution)
    assert workload.score([workload.findings()]) == {"l2_error": pytest.approx(0, abs=1e-12)}
    on_a_side = (batch.boundary == 0) | (batch.boundary == 1)
    assert on_a_side.any(1).all()


def test_ranks_share_the_points_and_their_losses_mean_to_the_whole():
    torch.manual_seed(0)
    whole = build(OPTIONS, share())
    model = whole.model()
    loss = whole.loss(model, next(whole.batches(0))).item()
    parts = [build(OPTIONS, share(rank, 2)) for rank in range(2)]
    losses = [part.loss(model, next(part.batches(0))).item() for part in parts]
    assert sum(losses) / 2 == pytest.approx(loss)


def test_the_factors_are_of_the_residuals_derivatives_over_the_points_inside():
    torch.manual_seed(0)
    workload = build(OPTIONS, share())
    model, batch = workload.model(), next(workload.batches(0))
    layer, seen = model.layers[1], []

    def see(module, given, output):
        seen.append(given[0])
        output.register_hook(seen.append)

    layer.register_forward_hook(see)
    (workload.residuals(model, batch).sum() / 12**0.5).backward()
    a, g = (each.detach().flatten(0, 1) for each in seen)
    terms, rows = 12, len(a)
    kfac = KFAC(model, KFACConfig(factor_decay=0.0, factor_update_steps=1, inverse_update_steps=1))
    kfac.set_loss_terms(workload.loss_terms(batch))
    (workload.residuals(model, batch).sum() / 12**0.5).backward()
    kfac.step()
    factors = kfac.state_dict()["factors"]
    positions = rows / terms
    torch.testing.assert_close(factors["layers.1.a"][0], a.T @ a / (terms * positions**2))
    torch.testing.assert_close(factors["layers.1.g"][0], terms * positions * g.T @ g)


METHODS = {
    "lm": {
        "optimizer": {"name": "lm", "lr": 1},
        "kfac": {"damping": 1e-8, "factor_decay": 0.5, "grafting": False, "factor_update_steps": 1,
                 "inverse_update_steps": 1},
    },
    "lbfgs": {"optimizer": {"name": "lbfgs", "lr": 1}},
    "adam": {"optimizer": {"name": "adam", "lr": 0.01}},
}  # fmt: skip


def errors(rank: int, world_size: int, method: str, folder: str, epochs: int) -> list[float]:
    cell = Cell.model_validate(
        {
            "sweep": "s", "method": "m", "world_size": world_size, "workload": "poisson",
            "target": {"metric": "l2_error", "at_most": 1e-9},
            "training": {"global_batch_size": 1020, "epochs": epochs, "evaluate_every_epochs": epochs / 10},
            **METHODS[method],
        }
    )  # fmt: skip
    records: list[Record] = []
    world = World(rank, world_size, torch.device("cpu"), "gloo")
    Trainer(cell, world, HeartbeatWriter(Path(folder) / f"beat-{rank}-{world_size}"), records.append).run()
    return [record.value for record in records if isinstance(record, EvalRecord)]


@pytest.mark.slow
def test_lm_solves_the_equation_where_adam_has_hardly_begun(world, tmp_path):
    """150 steps of each."""
    found = {method: world(1).run(errors, method, str(tmp_path), 15)[0][-1] for method in ("lm", "adam")}
    assert found["lm"] < 0.01 < found["adam"]


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_train_as_one_does(world, tmp_path, method):
    (one,) = world(1).run(errors, method, str(tmp_path), 1)
    first, _ = world(2).run(errors, method, str(tmp_path), 1)
    steps = 3 if method == "lbfgs" else 10  # further line searches make rounding visible
    assert first[:steps] == pytest.approx(one[:steps], rel=1e-6)


def test_a_cell_says_what_it_needs():
    fields = {
        "sweep": "s", "method": "m", "world_size": 1, "workload": "poisson",
        "target": {"metric": "l2_error", "at_most": 0.001},
        "training": {"global_batch_size": 1020, "epochs": 2}, "optimizer": {"name": "lm", "lr": 1},
    }  # fmt: skip
    kfac = {"damping": 1e-8, "grafting": False}
    assert Cell.model_validate({**fields, "kfac": kfac}).optimizer.name == "lm"
    with pytest.raises(ValueError, match=r"optimizer\.name=lm needs a kfac section"):
        Cell.model_validate(fields)
    with pytest.raises(ValueError, match=r"kfac\.grafting=true would scale the steps of lm"):
        Cell.model_validate({**fields, "kfac": {"damping": 1e-8}})
    with pytest.raises(ValueError, match=r"kfac\.damping=None must be a number"):
        Cell.model_validate({**fields, "kfac": {"grafting": False}})
    with pytest.raises(ValueError, match=r"optimizer\.name=lbfgs has its own curvature"):
        Cell.model_validate({**fields, "optimizer": {"name": "lbfgs", "lr": 1}, "kfac": kfac})
