"""Promise: operations around a model (freezing, probing, copying, saving) do not change its factors."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.schedule import Milestones

CONFIG = KFACConfig(factor_update_steps=1, inverse_update_steps=1, factor_decay=0.0, kl_clip=None)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(8) % 3


def factors_after(around: Callable[[nn.Module, KFAC], object]) -> list[Tensor]:
    """Factors of one step on one batch, with something done to the model before its backward pass."""
    model = net()
    kfac = KFAC(model, CONFIG, lr=0.1)
    around(model, kfac)
    x, y = batch()
    model.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    return list(kfac._factors.running.values())


def another_backward(model: nn.Module) -> None:
    x, y = batch(2)
    functional.cross_entropy(model(3 * x), y).backward()


def frozen_meanwhile(model: nn.Module, kfac: KFAC) -> None:
    """As a discriminator is while its generator learns."""
    model.requires_grad_(False)
    model(batch(2)[0].requires_grad_()).sum().backward()
    model.requires_grad_(True)


def thrown_away(model: nn.Module, kfac: KFAC) -> None:
    another_backward(model)
    kfac.discard()


def probed(model: nn.Module, kfac: KFAC) -> None:
    x = batch(2)[0].requires_grad_()
    with kfac.paused():
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        loss = torch.func.grad(lambda w, v: torch.func.functional_call(model, w, (v,)).square().sum())
        torch.func.vmap(loss, in_dims=(None, 0))(weights, batch(2)[0])


def copied(model: nn.Module, kfac: KFAC) -> None:
    another_backward(AveragedModel(model))


def saved(model: nn.Module, kfac: KFAC) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    another_backward(torch.load(file, weights_only=False))


@pytest.mark.parametrize("around", [frozen_meanwhile, thrown_away, probed, copied, saved])
def test_factors_are_those_of_the_batch_of_the_step(around):
    for got, want in zip(factors_after(around), factors_after(lambda *_: None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_a_failed_step_leaves_nothing_to_the_next(monkeypatch):
    def fails(model: nn.Module, kfac: KFAC) -> None:
        another_backward(model)
        with monkeypatch.context() as patch:
            patch.setattr(kfac._factors, "accumulate_local", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                kfac.step()

    for got, want in zip(factors_after(fails), factors_after(lambda *_: None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("parts", [(4, 4), (7, 1), (1, 7), (2, 5, 1)])
def test_calls_of_different_sizes_count_by_their_examples_in_any_order(parts):
    layer, (x, y) = nn.Linear(4, 3).double(), batch()
    kfac = KFAC(layer, CONFIG, lr=0.1)
    functional.cross_entropy(torch.cat([layer(part) for part in x.split(parts)]), y).backward()
    kfac.step()
    examples, positions = max(parts), 8 / max(parts)
    rows = torch.cat([x, torch.ones(8, 1)], 1)
    want = rows.mT @ rows / positions**2 / examples
    torch.testing.assert_close(kfac._factors.running[0, "a"][0], want)
    g = (layer(x).softmax(1) - functional.one_hot(y, 3)) / 8
    want = g.mT @ g * positions * examples**2 / examples
    torch.testing.assert_close(kfac._factors.running[0, "g"][0], want.detach())


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_layer_that_gets_no_gradient_adds_nothing(overlap):
    layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).double()
    kfac = KFAC(layers, replace(CONFIG, overlap_factors=overlap), lr=0.1)
    x, y = batch()
    functional.cross_entropy(NoGradient.apply(layers[0](x)) + layers[1](x), y).backward()
    with pytest.warns(RuntimeWarning, match=r"no statistics of 0 "):
        kfac.step()
    assert [int(count) for count in kfac._factors.updates.values()] == [0, 0, 1, 1]


def test_complex_layers_keep_their_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3, dtype=torch.complex64))
    kfac = KFAC(model, CONFIG, lr=0.1)
    assert [shape.name for shape in kfac.shapes] == ["0"]
    assert kfac.plain_modules == ["1 (Linear)"]


def test_arithmetic_is_in_the_widest_dtype_of_any_layer():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).double())

    model = Mixed()
    kfac = KFAC(model, CONFIG, lr=0.1)
    x, y = batch()
    functional.cross_entropy(model(x.float()), y).backward()
    kfac.step()
    assert {factor.dtype for factor in kfac._factors.running.values()} == {torch.float64}
    assert [weight.grad.dtype for weight in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2


def test_an_overflow_in_replaced_parameters_is_detected():
    model = net()
    scaler = torch.amp.GradScaler("cpu")
    kfac = KFAC(model, CONFIG, lr=0.1, grad_scaler=scaler)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    x, y = batch()
    scaler.scale(functional.cross_entropy(model(x), y)).backward()
    model[0].weight.grad.fill_(math.inf)
    kfac.step()
    assert (kfac.skipped_steps, kfac.steps) == (1, 0)


def test_an_invalid_learning_rate_is_an_error_at_construction():
    model = net()
    scheduler = StepLR(torch.optim.SGD(model.parameters(), 0.1), 1)
    with pytest.raises(ConfigError, match="lr must be a number, a callable or the optimizer, got a StepLR"):
        KFAC(model, CONFIG, lr=scheduler)


def compiled_in_place(model: nn.Sequential) -> nn.Module:
    model.compile(backend="eager")
    return model


def compiled_in_part(model: nn.Sequential) -> nn.Module:
    model[0].compile(backend="eager")
    return model


def compiled_elsewhere(model: nn.Sequential) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.slow  # the compiler
@pytest.mark.parametrize("how", [compiled_in_place, compiled_in_part, compiled_elsewhere])
def test_a_model_compiled_and_run_before_is_captured(how):
    torch._dynamo.reset()
    model = net()
    runs, (x, y) = how(model), batch()
    functional.cross_entropy(runs(x), y).backward()
    kfac = KFAC(model, CONFIG, lr=0.1)
    functional.cross_entropy(runs(x), y).backward()
    kfac.step()
    assert [int(count) for count in kfac._factors.updates.values()] == [1] * 4


def test_kfac_cannot_be_pickled():
    kfac = KFAC(net(), CONFIG, lr=0.1)
    with pytest.raises(TypeError, match="load_state_dict"):
        torch.save(kfac, io.BytesIO())


def test_a_second_kfac_on_a_layer_warns_until_the_first_is_removed():
    layer = nn.Linear(4, 3)
    model = nn.Sequential(nn.Linear(5, 4), layer)
    first = KFAC(layer, CONFIG, lr=0.1)
    with pytest.warns(RuntimeWarning, match=r"another KFAC still has hooks on 1:.*remove\(\)") as warned:
        KFAC(model, CONFIG, lr=0.1).remove()
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFAC(model, replace(CONFIG, skip=("1",)), lr=0.1).remove()
        KFAC(copy.deepcopy(model), CONFIG, lr=0.1)  # a copy is not captured
        first.remove()
        KFAC(model, CONFIG, lr=0.1)
    with pytest.warns(RuntimeWarning, match="has hooks on the model:"):
        KFAC(layer, CONFIG, lr=0.1)


def test_a_failed_constructor_leaves_no_hooks():
    model = net()
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        KFAC(model, replace(CONFIG, damping=Milestones(initial=0.1, factor=0.5, at=(2,))), lr=0.1)
    assert not any(module._forward_hooks for module in model.modules())
