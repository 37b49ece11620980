"""Promise: a weight that embeds words and scores them has one block, of both uses, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution

WORDS, WIDTH, LENGTH, DAMPING = 7, 3, 4, 0.01
NOW = {
    "factor_decay": 0.0,
    "factor_update_steps": 1,
    "inverse_update_steps": 1,
    "damping": DAMPING,
    "kl_clip": None,
}


class Tied(nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH).double()
        self.mix = nn.Linear(WIDTH, WIDTH).double()
        self.head = nn.Linear(WIDTH, WORDS, bias=bias).double()
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


def tokens_of(world_size: int) -> tuple[Tensor, Tensor]:
    """Rank r has r + 1 sequences."""
    generator = torch.Generator().manual_seed(2)
    size = (world_size * (world_size + 1) // 2, LENGTH)
    return tuple(torch.randint(0, WORDS, size, generator=generator) for _ in range(2))  # type: ignore[return-value]


def stepped(
    rank: int, world_size: int, options: dict[str, Any], execution: Execution
) -> tuple[dict[str, Tensor], Tensor]:
    model, (x, y) = Tied(), tokens_of(world_size)
    mine = slice(rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2)
    kfac = KFAC(model, KFACConfig(**NOW, **options), lr=0.1, execution=execution)
    functional.cross_entropy(model(x[mine]).flatten(0, 1), y[mine].flatten()).backward()
    for parameter in model.parameters():
        parameter.grad *= len(x[mine]) / len(x)  # a mean over the world's tokens
        if world_size > 1:
            dist.all_reduce(parameter.grad)
    kfac.step()
    index = [shape.name for shape in kfac.shapes].index("embedding")
    running = {kind: kfac._factors.running.get((index, kind)) for kind in "ag"}
    kfac.remove()
    return {
        kind: factor for kind, factor in running.items() if factor is not None
    }, model.embedding.weight.grad


def reference(world_size: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """The words' diagonal, the features' factor, the gradient, and the trace of the sum of both uses."""
    model, (x, y) = Tied(), tokens_of(world_size)
    count = x.numel()
    inner = model.embedding(x)
    inner.retain_grad()
    hidden = torch.tanh(model.mix(inner))
    scores = hidden @ model.head.weight.T
    scores.retain_grad()
    functional.cross_entropy(scores.flatten(0, 1), y.flatten()).backward()
    g, delta = inner.grad.reshape(-1, WIDTH) * count, scores.grad.reshape(-1, WORDS) * count
    hidden = hidden.detach().reshape(-1, WIDTH)
    uses = [
        (torch.bincount(x.flatten(), minlength=WORDS).double() / count, g.T @ g / count),
        (delta.square().sum(0) / count, hidden.T @ hidden / count),
    ]
    trace = sum(float(u.sum() * w.trace()) for u, w in uses)
    words = sum(u * w.trace() for u, w in uses) / trace
    return words, sum(w * u.sum() for u, w in uses), model.embedding.weight.grad, trace


CASES = [
    (1, {}), (1, {"solver": "inverse"}), (2, {"strategy": "mem_opt"}), (3, {}),
    (3, {"overlap_factors": True}), (4, {"strategy": "hybrid_opt", "grad_worker_fraction": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize(("world_size", "options"), CASES)
def test_the_block_has_the_partial_traces_of_both_uses_whatever_the_ranks(
    world, world_size, options, execution
):
    words, features, gradient, trace = reference(world_size)
    seen = set()
    for running, got in world(world_size).run(stepped, options, execution):
        if "a" in running:
            torch.testing.assert_close(running["a"].flatten(), words, rtol=1e-10, atol=1e-14)
        if "g" in running:
            torch.testing.assert_close(running["g"][0], features, rtol=1e-10, atol=1e-14)
            assert float(running["g"][0].trace()) == pytest.approx(trace, rel=1e-10)
        seen |= running.keys()
        if options.get("solver") == "inverse":
            eye = torch.eye(WIDTH, dtype=torch.float64)
            want = torch.linalg.solve(features + DAMPING * eye, gradient.T).T / (words + DAMPING)[:, None]
        else:
            system = torch.kron(words.diag(), features) + DAMPING * torch.eye(
                WORDS * WIDTH, dtype=torch.float64
            )
            want = torch.linalg.solve(system, gradient.flatten()).view_as(gradient)
        assert (got - want).norm() <= 1e-8 * want.norm()
    assert seen == {"a", "g"}


def test_the_heads_bias_and_a_skipped_tie_stay_plain():
    model = Tied(bias=True)
    kfac = KFAC(model, KFACConfig(), lr=0.1)
    assert [shape.name for shape in kfac.shapes] == ["embedding", "mix"]
    assert kfac.plain_modules == ["head (Linear)"]  # its bias
    kfac.remove()
    for skip in ("head", "embedding"):
        kfac = KFAC(model, KFACConfig(skip=(skip,)), lr=0.1)
        assert [shape.name for shape in kfac.shapes] == ["mix"]
        kfac.remove()


def test_a_tie_of_other_modules_stays_plain():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    kfac = KFAC(model, KFACConfig(), lr=0.1)
    assert [shape.name for shape in kfac.shapes] == ["3"]
