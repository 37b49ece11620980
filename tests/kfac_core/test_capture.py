"""Promise: real training loops and operations around a model (freezing, probing, copying) change no factor.

Most of these crash or silently change the result in one of the published codes.
"""

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
from torch.optim.swa_utils import AveragedModel

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.schedule import Milestones
from tests.kfac_core.dense import factors
from tests.kfac_core.nets import batch, conv_net
from tests.kfac_core.runs import LR, assert_same, build, data, train

EVERY_STEP = {"factor_update_steps": 1, "inverse_update_steps": 1}
FRESH = KFACConfig.sc20(factor_decay=0.0, **EVERY_STEP)  # running factors are those of the last step alone


def running(kfac: KFAC) -> dict[str, Tensor]:
    """Copies of the running factors, by layer and kind."""
    return {
        f"{kfac.shapes[layer].name}.{kind}": factor.clone()
        for (layer, kind), factor in kfac._factors.running.items()
    }


def one_step(model: nn.Module, x: Tensor, y: Tensor, config: KFACConfig = FRESH) -> dict[str, Tensor]:
    """Factors after one step."""
    kfac = KFAC(model, config, lr=LR)
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    kfac.remove()
    return running(kfac)


def assert_by_definition(model: nn.Module, got: dict[str, Tensor], x: Tensor, y: Tensor) -> None:
    want = factors(model, x, y)
    assert {name.rpartition(".")[0] for name in got} == set(want)
    for name, (a, g) in want.items():
        torch.testing.assert_close(got[f"{name}.a"], torch.stack(a), rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(got[f"{name}.g"], torch.stack(g), rtol=1e-10, atol=1e-14)


def test_channels_last_models_keep_their_memory_format_and_their_factors():
    x, y = batch(6, seed=0)
    model = conv_net().to(memory_format=torch.channels_last)
    got = one_step(model, x.to(memory_format=torch.channels_last), y)
    assert_by_definition(conv_net(), got, x, y)
    assert model[2].weight.grad.is_contiguous(memory_format=torch.channels_last)


class OwnAttention(nn.MultiheadAttention):
    """A subclass, which may compute something else."""


def test_attention_of_an_unknown_class_keeps_plain_gradients():
    kfac = KFAC(nn.Sequential(nn.Linear(4, 4), OwnAttention(4, 2)), FRESH, lr=LR)
    assert kfac.plain_modules == ["1 (OwnAttention)", "1.out_proj (NonDynamicallyQuantizableLinear)"]
    assert [shape.name for shape in kfac.shapes] == ["0"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_forward_passes_without_gradients_or_without_backward_add_nothing(context):
    x, y = data("mlp", 0)
    want = one_step(build("mlp"), x, y)
    model = build("mlp")
    kfac = KFAC(model, FRESH, lr=LR)
    with context():
        model(x * 3)
    model(x * 5)  # its graph is dropped
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    assert_same(running(kfac), want, 0)


def test_evaluation_between_steps_adds_nothing():
    want, got = [], []
    for history, evaluates in ((want, False), (got, True)):
        model = build("mlp")
        kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
        for step in range(3):
            if evaluates:
                model.eval()
                x, y = data("mlp", 99)
                functional.cross_entropy(model(x), y).backward()
                model.train()
            history.extend(train(model, kfac, "mlp", [step]))
    for one, other in zip(got, want, strict=True):
        assert_same(one, other, 0)


def test_a_graph_run_through_twice_gives_each_pass_its_own_statistics():
    model, (x, y) = build("tokens"), data("tokens", 0)
    kfac = KFAC(model, FRESH, lr=LR)
    loss = functional.cross_entropy(model(x), y) / 2
    loss.backward(retain_graph=True)
    loss.backward()
    kfac.step()
    assert_same(running(kfac), one_step(build("tokens"), x, y), 1e-12)


@pytest.mark.parametrize("used", ["never", "later"])
def test_a_layer_that_takes_no_part_in_a_step_keeps_its_factors_and_is_named_once(used, recwarn):
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "aside": nn.Linear(4, 3)}).double()
    kfac = KFAC(model, FRESH, lr=LR)
    for step in range(3):
        x, y = data("mlp", step)
        model.zero_grad()
        outputs = model["used"](x)
        if used == "later" and step == 2:
            outputs = outputs + model["aside"](x)
        functional.cross_entropy(outputs, y).backward()
        kfac.step()
        took_part = used == "later" and step == 2
        assert (model["aside"].weight.grad is not None) == took_part
        identity = torch.eye(5, dtype=torch.float64)
        assert torch.equal(running(kfac)["aside.a"][0], identity) != took_part
    assert all(p.grad.isfinite().all() for p in model["used"].parameters())
    (said,) = (str(warning.message) for warning in recwarn)
    assert "no statistics of aside by step 0" in said


def factors_after(around: Callable[[nn.Module, KFAC], object]) -> list[Tensor]:
    """Factors of one step on one vectors, with something done to the model before its backward pass."""
    model = build("mlp")
    kfac = KFAC(model, FRESH, lr=0.1)
    around(model, kfac)
    x, y = data("mlp", 1)
    model.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    return list(kfac._factors.running.values())


def another_backward(model: nn.Module) -> None:
    x, y = data("mlp", 2)
    functional.cross_entropy(model(3 * x), y).backward()


def frozen_meanwhile(model: nn.Module, kfac: KFAC) -> None:
    """As a discriminator is while its generator learns."""
    model.requires_grad_(False)
    model(data("mlp", 2)[0].requires_grad_()).sum().backward()
    model.requires_grad_(True)


def thrown_away(model: nn.Module, kfac: KFAC) -> None:
    another_backward(model)
    kfac.discard()


def probed(model: nn.Module, kfac: KFAC) -> None:
    x = data("mlp", 2)[0].requires_grad_()
    with kfac.paused():
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        loss = torch.func.grad(lambda w, v: torch.func.functional_call(model, w, (v,)).square().sum())
        torch.func.vmap(loss, in_dims=(None, 0))(weights, data("mlp", 2)[0])


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


@pytest.mark.parametrize("parts", [(11, 1), (3, 8, 1)])
def test_calls_of_different_sizes_count_by_their_examples_in_any_order(parts):
    layer, (x, y) = nn.Linear(4, 3).double(), data("mlp", 1)
    kfac = KFAC(layer, FRESH, lr=0.1)
    functional.cross_entropy(torch.cat([layer(part) for part in x.split(parts)]), y).backward()
    kfac.step()
    examples, positions = max(parts), 12 / max(parts)
    rows = torch.cat([x, torch.ones(12, 1)], 1)
    want = rows.mT @ rows / positions**2 / examples
    torch.testing.assert_close(kfac._factors.running[0, "a"][0], want)
    g = (layer(x).softmax(1) - functional.one_hot(y, 3)) / 12
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
    kfac = KFAC(layers, replace(FRESH, overlap_factors=overlap), lr=0.1)
    x, y = data("mlp", 1)
    functional.cross_entropy(NoGradient.apply(layers[0](x)) + layers[1](x), y).backward()
    with pytest.warns(RuntimeWarning, match=r"no statistics of 0 "):
        kfac.step()
    assert [int(count) for count in kfac._factors.updates.values()] == [0, 0, 1, 1]


def test_complex_layers_keep_their_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3, dtype=torch.complex64))
    kfac = KFAC(model, FRESH, lr=0.1)
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
    kfac = KFAC(model, FRESH, lr=0.1)
    x, y = data("mlp", 1)
    functional.cross_entropy(model(x.float()), y).backward()
    kfac.step()
    assert {factor.dtype for factor in kfac._factors.running.values()} == {torch.float64}
    assert [weight.grad.dtype for weight in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2


def test_an_overflow_in_replaced_parameters_is_detected():
    model = build("mlp")
    scaler = torch.amp.GradScaler("cpu")
    kfac = KFAC(model, FRESH, lr=0.1, grad_scaler=scaler)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    x, y = data("mlp", 1)
    scaler.scale(functional.cross_entropy(model(x), y)).backward()
    model[0].weight.grad.fill_(math.inf)
    kfac.step()
    assert (kfac.skipped_steps, kfac.steps) == (1, 0)


def test_kfac_cannot_be_pickled():
    kfac = KFAC(build("mlp"), FRESH, lr=0.1)
    with pytest.raises(TypeError, match="load_state_dict"):
        torch.save(kfac, io.BytesIO())


def test_a_second_kfac_on_a_layer_warns_until_the_first_is_removed():
    layer = nn.Linear(4, 3)
    model = nn.Sequential(nn.Linear(5, 4), layer)
    first = KFAC(layer, FRESH, lr=0.1)
    with pytest.warns(RuntimeWarning, match=r"another KFAC still has hooks on 1:.*remove\(\)") as warned:
        KFAC(model, FRESH, lr=0.1).remove()
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFAC(model, replace(FRESH, skip=("1",)), lr=0.1).remove()
        KFAC(copy.deepcopy(model), FRESH, lr=0.1)  # a copy is not captured
        first.remove()
        KFAC(model, FRESH, lr=0.1)
    with pytest.warns(RuntimeWarning, match="has hooks on the model:"):
        KFAC(layer, FRESH, lr=0.1)


def test_a_failed_constructor_leaves_no_hooks():
    model = build("mlp")
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        KFAC(model, replace(FRESH, damping=Milestones(initial=0.1, factor=0.5, at=(2,))), lr=0.1)
    assert not any(module._forward_hooks for module in model.modules())
