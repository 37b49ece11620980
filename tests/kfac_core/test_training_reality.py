"""Promise: K-FAC stays exact in real training loops, without crashes and silent errors.

Most of these crash or silently change the result in one of the published codes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kfac_core import KFAC, KFACConfig
from tests.kfac_core.nets import batch, conv_net
from tests.kfac_core.per_example import factors
from tests.kfac_core.runs import LR, assert_same, build, data, train

EVERY_STEP = {"factor_update_steps": 1, "inverse_update_steps": 1}
FRESH = KFACConfig(factor_decay=0.0, **EVERY_STEP)  # running factors are those of the last step alone


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


def attention_net() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x, x, x)[0]).mean(1)

    torch.manual_seed(0)
    return Net().double()


class OwnAttention(nn.MultiheadAttention):
    """A subclass, which may compute something else."""


def test_attention_of_an_unknown_class_keeps_plain_gradients_and_the_layer_after_it_is_exact():
    model, x, y = attention_net(), torch.randn(5, 3, 4).double(), torch.arange(5) % 3
    model.inner.__class__ = OwnAttention
    functional.cross_entropy(model(x), y).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    kfac = KFAC(model, FRESH, lr=LR)
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    kfac.remove()
    assert kfac.plain_modules == [
        "inner (OwnAttention)",
        "inner.out_proj (NonDynamicallyQuantizableLinear)",
    ]
    assert_by_definition(model, running(kfac), x, y)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain[name]) == name.startswith("inner"), name


class Checkpointed(nn.Module):
    """A stem, a block that is called twice and a head, the block run through `call`."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self._call = call
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.tanh(self.stem(x)))  # once outside, once inside the checkpoint
        return self.head(self._call(lambda z: torch.tanh(self.block(torch.tanh(z))), x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_no_statistic(reentrant):
    x, y = data("mlp", 0)
    want = one_step(Checkpointed(lambda block, z: block(z)), x, y)
    got = one_step(Checkpointed(lambda block, z: checkpoint(block, z, use_reentrant=reentrant)), x, y)
    assert_same(got, want, 1e-14)


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
        kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=LR)
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


def test_tied_weights_keep_their_plain_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    model[2].weight = model[0].weight
    kfac = KFAC(model, FRESH, lr=LR)
    assert [shape.name for shape in kfac.shapes] == ["3"]
    assert kfac.plain_modules == ["0 (Linear)", "2 (Linear)"]


@pytest.mark.filterwarnings("ignore:K-FAC. no statistics of aside")  # tested in test_compile
@pytest.mark.parametrize("used", ["never", "later"])
def test_a_layer_that_takes_no_part_in_a_step_keeps_its_factors(used):
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


def test_kl_clip_can_be_left_out():
    x, y = data("mlp", 0)
    clipped, free = ({"kl_clip": clip, "damping": 0.01, **EVERY_STEP} for clip in (1e-9, None))
    norms = []
    for options in (clipped, free):
        model = build("mlp")
        one_step(model, x, y, KFACConfig(**options))
        norms.append(model[0].weight.grad.norm())
    assert norms[1] > 10 * norms[0]


def test_a_copied_model_trains_without_touching_the_original():
    model, (x, y) = build("mlp"), data("mlp", 0)
    kfac = KFAC(model, FRESH, lr=LR)
    average = copy.deepcopy(model)
    functional.cross_entropy(average(x * 3), y).backward()
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    assert_same(running(kfac), one_step(build("mlp"), x, y), 0)
