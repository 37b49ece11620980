"""Promise: passes beside the one of the loss neither add to the factors nor are counted in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from tests.kfac_core.dense import factors

CONFIG = KFACConfig.sc20(
    factor_decay=0.0, factor_update_steps=1, inverse_update_steps=1, kl_clip=None, loss_terms="example"
)
Closure = Callable[[nn.Module, Tensor, Tensor], None]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(size: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (size,), generator=generator)


def assert_factors(kfac: KFAC, want: dict[str, tuple[list[Tensor], list[Tensor]]]) -> None:
    for index, shape in enumerate(kfac.shapes):
        for kind, blocks in zip("ag", want[shape.name], strict=True):
            got = kfac._factors.running[index, kind]
            torch.testing.assert_close(got, torch.stack(blocks), rtol=1e-10, atol=1e-16)


def input_gradient(model: nn.Module, scores: Tensor, x: Tensor, y: Tensor) -> None:
    """R1: the slope of the scores by the input."""
    torch.autograd.grad(scores.sum(), x, create_graph=True)


def hessian_product(model: nn.Module, scores: Tensor, x: Tensor, y: Tensor) -> None:
    weights = list(model.parameters())
    slopes = torch.autograd.grad(functional.cross_entropy(scores, y), weights, create_graph=True)
    torch.autograd.grad(sum((each * each.detach()).sum() for each in slopes), weights, retain_graph=True)


def derivatives(model: nn.Module, scores: Tensor, x: Tensor, y: Tensor) -> None:
    """A PINN's first and second derivatives."""
    (first,) = torch.autograd.grad(scores[:, 0].sum(), x, create_graph=True)
    torch.autograd.grad(first[:, 1].sum(), x, create_graph=True)


def plain_influence(model: nn.Module, scores: Tensor, x: Tensor, y: Tensor) -> None:
    """A saliency map: no graph of its own."""
    torch.autograd.grad(scores.max(), x, retain_graph=True)


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize("inner", [input_gradient, hessian_product, derivatives, plain_influence])
def test_an_inner_backward_pass_in_paused_adds_nothing(inner, execution, recwarn):
    model, (x, y) = net(), batch()
    want = factors(model, x, y)
    kfac = KFAC(model, CONFIG, execution=execution)
    for _ in range(2):  # the first step's check of gradients speaks in the second
        model.zero_grad()
        points = x.clone().requires_grad_()
        scores = model(points)
        with kfac.paused():
            inner(model, scores, points, y)
        functional.cross_entropy(scores, y).backward()
        kfac.step()
        assert_factors(kfac, want)
    assert [str(each.message) for each in recwarn if "K-FAC" in str(each.message)] == []


def test_a_penalty_whose_inner_pass_is_paused_is_part_of_the_outer_gradient():
    model, (x, y) = net(), batch()
    kfac = KFAC(model, CONFIG)
    seen: list[Tensor] = []
    points = x.clone().requires_grad_()
    scores = model(points)
    with kfac.paused():
        (slope,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
    scores.register_hook(lambda gradient: seen.append(gradient.detach().clone()))
    (functional.cross_entropy(scores, y) + slope.square().sum(1).mean()).backward()
    kfac.step()
    (g,) = seen
    torch.testing.assert_close(kfac._factors.running[1, "g"][0], len(x) * g.T @ g, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("inner", [input_gradient, hessian_product, derivatives])
def test_an_inner_backward_pass_that_counts_is_named_once(inner):
    model, (x, y) = net(), batch()
    kfac = KFAC(model, CONFIG)
    for step in range(3):
        points = x.clone().requires_grad_()
        scores = model(points)
        inner(model, scores, points, y)
        model.zero_grad()
        functional.cross_entropy(scores, y).backward()
        if step == 0:
            with pytest.warns(RuntimeWarning, match=r"create_graph=True counts .* in kfac.paused\(\)"):
                kfac.step()
        else:
            kfac.step()


def test_one_backward_pass_with_a_graph_is_the_loss_s_own():
    model, (x, y) = net(), batch()
    want = factors(model, x, y)
    kfac = KFAC(model, CONFIG)
    functional.cross_entropy(model(x), y).backward(create_graph=True)
    kfac.step()
    assert_factors(kfac, want)


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("before", [1, 20])
def test_steps_of_the_optimizer_alone_leave_no_statistics(before, optimizer, execution):
    model, optimizers = net(), {"lr": 0.05}
    plain = optimizer(model.parameters(), **optimizers)
    kfac = KFAC(model, CONFIG, execution=execution)
    for step in range(before):
        x, y = batch(seed=step)
        plain.zero_grad(set_to_none=step % 2 == 0)
        functional.cross_entropy(model(x), y).backward()
        plain.step()
    plain.zero_grad()
    x, y = batch(5, seed=99)
    want = factors(copy.deepcopy(model), x, y)
    kfac.set_loss_terms(5)  # what was stated of the next pass holds
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    assert_factors(kfac, want)


def test_a_step_in_every_fourth_iteration_has_the_statistics_of_that_iteration():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, CONFIG)
    for step in range(8):
        x, y = batch(seed=step)
        optimizer.zero_grad()
        want = factors(copy.deepcopy(model), x, y)
        functional.cross_entropy(model(x), y).backward()
        if step % 4 == 3:
            kfac.step()
            assert_factors(kfac, want)
        optimizer.step()


def test_gradients_that_accumulate_without_a_step_count_together():
    model, (x, y) = net(), batch()
    want = factors(model, x, y)
    kfac = KFAC(model, CONFIG)
    for part in (slice(0, 2), slice(2, 8)):
        (functional.cross_entropy(model(x[part]), y[part], reduction="sum") / len(x)).backward()
    kfac.step()
    assert_factors(kfac, want)


def _late(rank: int, world_size: int, options: dict[str, object]) -> dict[tuple[int, str], Tensor]:
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kfac = KFAC(wrapped, KFACConfig.sc20(**{**vars(CONFIG), **options}))
    for step in range(4):
        x, y = batch(seed=step)
        share = slice(rank * 8 // world_size, (rank + 1) * 8 // world_size)
        optimizer.zero_grad()
        functional.cross_entropy(wrapped(x[share]), y[share]).backward()
        if step == 3:
            kfac.step()
        optimizer.step()
    return dict(kfac._factors.running)


@pytest.mark.parametrize("options", [{}, {"overlap_factors": True}])
def test_every_rank_forgets_the_same_passes(world, options):
    (alone,) = world(1).run(_late, {})
    for rank in world(2).run(_late, options):
        for key, factor in rank.items():
            torch.testing.assert_close(factor, alone[key], rtol=1e-9, atol=1e-15)


def test_a_second_step_on_the_same_gradients_is_named_once():
    model, (x, y) = net(), batch()
    kfac = KFAC(model, CONFIG)
    for step in range(3):
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        kfac.step()
        if step == 1:
            with pytest.warns(RuntimeWarning, match=r"step\(\) was called again without a backward pass"):
                kfac.step()


def test_two_losses_of_two_backward_passes_have_the_curvature_of_their_sum_with_half_of_the_terms():
    (real, ones), (fake, zeros) = batch(seed=1), batch(seed=2)
    factors_of = []
    for split in (False, True):
        model = net()
        kfac = KFAC(model, CONFIG)
        if split:
            kfac.set_loss_terms(len(real) / 2)
            functional.cross_entropy(model(real), ones).backward()
            functional.cross_entropy(model(fake), zeros).backward()
        else:
            scores = model(real), model(fake)
            (
                functional.cross_entropy(scores[0], ones) + functional.cross_entropy(scores[1], zeros)
            ).backward()
        kfac.step()
        running = kfac._factors.running
        factors_of.append([torch.kron(running[layer, "a"][0], running[layer, "g"][0]) for layer in (0, 1)])
    for got, want in zip(*factors_of, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-16)
