"""Promise: a mistake around K-FAC is refused, or reported once, by a message that names it and the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.config import Execution
from kfac_core.gradient_check import _directions
from tests.kfac_core.runs import LR, build, train

EVERY_STEP = {"factor_update_steps": 1, "inverse_update_steps": 1}
BOTH = pytest.mark.parametrize("execution", list(Execution))


def net(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layers or (nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))))


def backward(model: nn.Module, seed: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    model.zero_grad()
    (functional.cross_entropy(model(x), y) * scale).backward()


def warned(step: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(warning.message) for warning in caught]


def stepped(model: nn.Module, kfac: KFAC, steps: int = 3) -> list[str]:
    """The warnings of some steps."""
    said = []
    for step in range(steps):
        backward(model, step)
        said += warned(kfac.step)
    return said


@BOTH
def test_a_sound_model_is_told_nothing(execution):
    model = net()
    assert stepped(model, KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR, execution=execution)) == []


@pytest.mark.parametrize(
    ("execution", "options"),
    [
        (Execution.BATCHED, {"kl_clip": 0.01}), (Execution.SEQUENTIAL, {"kl_clip": 0.01}),
        (Execution.BATCHED, {"kl_clip": None}), (Execution.BATCHED, {"grafting": True, "kl_clip": None}),
        (Execution.BATCHED, {"fixed_norm": 0.1, "kl_clip": None}),
    ],
)  # fmt: skip
def test_one_gradient_that_is_infinite_spreads_to_no_other(execution, options):
    model = net()
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP, **options), lr=LR, execution=execution)
    backward(model)
    kfac.step()
    backward(model, 1)
    model[3].weight.grad[0, 0] = torch.inf
    said = warned(kfac.step)
    for layer in (model[0], model[3]):
        assert layer.weight.grad.count_nonzero() == layer.bias.grad.count_nonzero() == 0
    said += stepped(model, kfac, 2)
    assert len(said) == 1
    assert "gradients that are not finite in 1 of the steps" in said[0]
    assert all(p.grad.isfinite().all() and p.grad.count_nonzero() for p in model.parameters())
    assert kfac.nonfinite_steps == 1


def test_on_a_cpu_a_plain_gradient_that_is_not_finite_stops_the_whole_step():
    model = net()
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
    backward(model)
    model[2].weight.grad[0] = torch.nan
    with pytest.warns(RuntimeWarning, match="not finite in 1 of the steps up to 1"):  # not at the next update
        kfac.step()
    assert kfac.nonfinite_steps == 1
    assert all(parameter.grad.count_nonzero() == 0 for parameter in model.parameters())


def test_gradients_that_stay_not_finite_are_named_as_often_as_their_number_doubles():
    model = net()
    kfac = KFAC(model, lr=LR)
    said = stepped(model, kfac, 3)
    model[0].weight.data[0] = torch.nan
    said += stepped(model, kfac, 9)
    assert kfac.nonfinite_steps == 9
    assert [text.split(" of the steps")[0].split()[-1] for text in said] == ["1", "2", "4", "8"]


@pytest.mark.parametrize("order", ["kfac first", "optimizer first"])
def test_a_step_after_the_optimizer_s_is_named_once(order, recwarn):
    model = net()
    kfac, optimizer = KFAC(model, KFACConfig(**EVERY_STEP)), torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(3):
        backward(model, seed)
        for each in (kfac, optimizer) if order == "kfac first" else (optimizer, kfac):
            each.step()
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == (order == "optimizer first")
    assert all("call kfac.step() before optimizer.step()" in text for text in said)


@pytest.mark.parametrize("mistake", ["no zero_grad", "a step in every micro-batch", ""])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_added_to_preconditioned_ones_are_named_once(mistake, set_to_none, recwarn):
    model = net()
    kfac, optimizer = KFAC(model), torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    for step in range(6):
        functional.cross_entropy(model(x), y).backward()
        if step % 2 or mistake:
            kfac.step()
        if step % 2:
            optimizer.step()
            if mistake != "no zero_grad":
                optimizer.zero_grad(set_to_none=set_to_none)
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == bool(mistake)
    assert all("added to gradients that step() had preconditioned" in text for text in said)


class Scaler(torch.amp.GradScaler):
    """A scaler on the CPU, of a fixed scale."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=1024.0, growth_interval=1000)


@BOTH
@pytest.mark.parametrize(("unscales", "passed"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_loss_scale_that_was_left_in_is_named(execution, unscales, passed, layers, recwarn):
    model, scaler = net() if layers == 2 else net(nn.Linear(4, 3)), Scaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kfac = KFAC(
        model,
        KFACConfig.sc20(**EVERY_STEP),
        lr=LR,
        grad_scaler=scaler if passed else None,
        execution=execution,
    )
    for step in range(3):
        backward(model, step, scale=float(scaler.scale(torch.ones(()))))
        if unscales:
            scaler.unscale_(optimizer)
        kfac.step()
        scaler._per_optimizer_states.clear()
    said = [str(warning.message) for warning in recwarn]
    want = "call scaler.unscale_" if not unscales else "pass KFAC(grad_scaler=scaler)"
    assert len(said) == (not (unscales and passed))
    assert all(want in text for text in said)


class Tied(nn.Module):
    """The embedding's weight is used a second time, as a function."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle, self.head = (
            nn.Embedding(4, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 4, bias=False),
        )
        self.tied = tied

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.middle(self.embedding(tokens)).tanh()
        return functional.linear(x, self.embedding.weight) if self.tied else self.head(x)


@BOTH
@pytest.mark.parametrize("tied", [True, False])
def test_a_weight_that_is_used_without_calling_its_layer_is_named(execution, tied, recwarn):
    model = Tied(tied=tied)
    kfac = KFAC(model, KFACConfig.sc20(skip=("head",), **EVERY_STEP), lr=LR, execution=execution)
    for step in range(2):
        tokens = torch.arange(16).add(step).remainder(4)
        model.zero_grad()
        functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
        kfac.step()
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == tied
    assert all("the gradient of embedding is not the sum over the calls" in text for text in said)
    assert all(text.endswith("skip=('embedding$',)") for text in said)  # and no embedding_2


def test_a_loss_of_its_own_that_uses_the_weights_in_a_pass_that_does_not_count_is_told_nothing():
    model = net(nn.Linear(4, 3))
    kfac, x = KFAC(model), torch.randn(8, 4)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
        with kfac.paused():
            functional.linear(x, model[0].weight).square().sum().backward()
        assert warned(kfac.step) == []


@pytest.mark.parametrize("seed", range(2))
def test_a_head_that_shares_an_embedding_with_a_padding_token_is_told_nothing(seed):
    """The head gives the padding token a gradient, the embedding does not."""
    torch.manual_seed(seed)
    embedding, head = nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model.zero_grad()
            tokens = torch.randint(0, 5, (16,))
            functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
            kfac.step()


def test_directions_of_the_gradient_check_are_hashes_that_no_rounding_changes():
    """A sine's last bit differs between vector lengths; times 43,758 it changed a direction by half."""

    def expected(place: int, seed: int) -> float:
        mixed = (place + (seed + 1) * 0x1E3779B9) % 2**32
        for _ in range(2):
            mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) % 2**32
        return (mixed % 2**24) / 2**23 - 1

    found = _directions(torch.zeros(300, 40), padding=None)
    for seed, direction in enumerate(found):
        assert direction.flatten().tolist() == [expected(place, seed) for place in range(12_000)]
    assert torch.corrcoef(torch.stack([each.flatten() for each in found])).triu(1).abs().max() < 0.05


def test_the_gradient_check_changes_no_number_and_leaves_no_hook():
    model, other = net(), net()
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
    unchecked = KFAC(other, KFACConfig.sc20(**EVERY_STEP), lr=LR)
    unchecked._gradient_check.remove()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    backward(model)
    assert torch.equal(before, torch.get_rng_state())
    backward(other)
    kfac.step()
    unchecked.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    assert len(model[0]._forward_hooks) == 1
    assert not model[0].weight._backward_hooks


def test_a_layer_whose_gradient_was_dropped_has_none_after_the_first_steps_check():
    model = net()
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
    for _ in range(2):
        backward(model)
        model[0].weight.grad = None
        kfac.step()
        assert (model[0].weight.grad is None, model[3].weight.grad is None) == (True, False)


def test_freezing_a_taken_layer_for_a_while_is_no_mistake():
    model = net()
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
    assert stepped(model, kfac, 1) == []
    model[3].requires_grad_(requires_grad=False)
    assert stepped(model, kfac, 1) == []
    model[3].requires_grad_()
    assert stepped(model, kfac, 1) == []


def test_training_in_eval_mode_is_named_once():
    model = net()
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
    assert stepped(model, kfac, 1) == []
    model.eval()
    (said,) = stepped(model, kfac)
    assert "the model was in eval mode in a training pass" in said


@BOTH
def test_a_clip_that_always_binds_is_logged_once(execution, logged):
    model = net()
    config = KFACConfig.sc20(kl_clip=1e-9, **EVERY_STEP)
    kfac = KFAC(model, config, lr=1.0, execution=execution)
    stepped(model, kfac, 9)
    assert "kl-clip has scaled" not in logged.text
    stepped(model, kfac, 15)
    assert logged.text.count("the kl-clip has scaled the step down at 10 second-order updates in a row") == 1


@pytest.mark.parametrize(("kind", "named"), [(torch.optim.AdamW, True), (torch.optim.SGD, False)])
def test_adam_behind_kfac_is_named(kind, named, logged):
    model = net()
    KFAC(model, lr=kind(model.parameters(), lr=0.1))
    assert ("use SGD behind K-FAC" in logged.text) == named


def test_a_model_of_which_little_is_taken_is_a_warning_with_the_reasons(logged):
    model = net(nn.Linear(4, 3), nn.LSTM(3, 30))
    KFAC(model, lr=LR)
    assert "K-FAC preconditions 15 of 4,215 trained parameters (0.4%)" in logged.text
    assert "LSTM" in logged.text
    logged.messages.clear()
    KFAC(net(nn.Linear(4, 30), nn.LayerNorm(6)), lr=LR)
    assert logged.text == ""


def test_the_summary_says_what_is_taken_by_whom_and_why_the_rest_is_plain():
    class Own(nn.Linear):
        pass

    model = net(
        nn.Linear(4, 6), Own(6, 6), parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 5),
        nn.LayerNorm(5), nn.Conv2d(2, 2, 1, groups=2),
    )  # fmt: skip
    kfac = KFAC(model, KFACConfig.sc20(skip=("3",)), lr=LR)
    summary = kfac.summary()
    assert [(each.name, each.a, each.g, each.owners) for each in summary.layers] == [
        ("0", "5", "6", ((0,), (0,))), ("5", "2 x 2", "2, diagonal", ((0,), (0,))),
    ]  # fmt: skip
    assert sum(each.state_bytes for each in summary.layers) == sum(
        kfac.memory()[kind] for kind in ("factors", "second_order")
    )
    assert summary.taken_parameters == 30 + 4
    assert summary.trained_parameters == sum(p.numel() for p in model.parameters())
    computed = "the weight is computed from these (weight norm or another parametrisation)"
    reasons = {each.name: each.reason for each in summary.plain}
    assert reasons == {
        "1": "a subclass of a supported layer, which may compute something else",
        "2": computed,
        "2.parametrizations.weight": computed,
        "3": "skip",
        "4": "not of a kind of layer that K-FAC supports",
    }
    for text in ("layer  kind", "0 ", "2 x 2", "skip"):
        assert text in str(kfac)


@pytest.mark.parametrize("option", [{"sparse": True}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_an_embedding_whose_options_change_its_gradient_or_weight_stays_plain(option):
    model = net(nn.Embedding(9, 4, **option), nn.Linear(4, 3))
    summary = KFAC(model, lr=LR).summary()
    assert [each.name for each in summary.layers] == ["1"]
    assert [each.reason for each in summary.plain] == ["an option that K-FAC does not support"]


def test_the_summary_names_the_head_of_a_tied_embedding():
    model = net(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    model[1].weight = model[0].weight
    summary = KFAC(model, lr=LR).summary()
    assert [(each.name, each.kind) for each in summary.layers] == [("0", "Embedding + Linear")]
    assert summary.plain == ()


def test_a_weight_that_is_a_number_is_no_obstacle():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = 0.5, nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x + self.bias

    kfac = KFAC(net(nn.Linear(4, 6), Scaled()), lr=LR)
    assert kfac.plain_modules == ["1 (Scaled)"]


def averaged(rank: int, world_size: int, execution: Execution) -> tuple[list[str], int]:
    """Sound training on several ranks is told nothing."""
    model = build("mlp")
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR, execution=execution)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, kfac, "mlp", range(3), rank, world_size)
    return [str(warning.message) for warning in caught], kfac.nonfinite_steps


def test_several_ranks_are_told_nothing(world):
    assert world(2).run(averaged, Execution.BATCHED) == [([], 0)] * 2


def preconditioned(model: nn.Module, **arguments: Any) -> list[Tensor]:
    """The weights' gradients after one step."""
    kfac = KFAC(model, **arguments)
    backward(model)
    kfac.step()
    kfac.remove()
    return [model[index].weight.grad.clone() for index in (0, 3)]


@BOTH
def test_the_clip_reads_the_rate_of_each_parameter_group(execution):
    model = net().double()
    model.forward = lambda x, forward=model.forward: forward(x.double())
    clipped = {"config": KFACConfig.sc20(kl_clip=1e-6, **EVERY_STEP), "execution": execution}
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.5}]
    got = preconditioned(model, lr=torch.optim.SGD(groups), **clipped)
    raw = [model[index] for index in (0, 3)]
    backward(model)
    plain = [(layer.weight.grad.clone(), layer.bias.grad.clone()) for layer in raw]
    free = KFAC(model, KFACConfig.sc20(kl_clip=None, **EVERY_STEP), execution=execution)
    backward(model)
    free.step()
    change = sum(
        rate**2 * ((layer.weight.grad * weight).sum() + (layer.bias.grad * bias).sum())
        for rate, layer, (weight, bias) in zip((0.1, 0.5), raw, plain, strict=True)
    )
    nu = (1e-6 / change).sqrt()
    assert nu < 1
    for layer, clipped_gradient in zip(raw, got, strict=True):
        torch.testing.assert_close(clipped_gradient, layer.weight.grad * nu, rtol=1e-10, atol=0)


@BOTH
@pytest.mark.parametrize("scale", [{"grafting": True}, {"fixed_norm": 0.1}])
def test_a_norm_that_is_given_leaves_the_direction_of_kfac(execution, scale):
    model = net()
    config = KFACConfig.sc20(kl_clip=None, **scale, **EVERY_STEP)
    got = preconditioned(model, config=config, execution=execution)
    bias = [model[index].bias.grad.clone() for index in (0, 3)]
    free = preconditioned(model, config=KFACConfig.sc20(kl_clip=None, **EVERY_STEP), execution=execution)
    backward(model)
    for index, weight, other, direction in zip((0, 3), got, bias, free, strict=True):
        plain = torch.cat([model[index].weight.grad, model[index].bias.grad[:, None]], 1).norm()
        wanted = plain if "grafting" in scale else plain.new_tensor(0.1 * len(other) ** 0.5)
        torch.testing.assert_close(torch.cat([weight, other[:, None]], 1).norm(), wanted)
        torch.testing.assert_close(
            functional.cosine_similarity(weight.flatten(), direction.flatten(), 0), torch.ones(())
        )


@BOTH
def test_of_a_gradient_of_zero_no_norm_is_made(execution):
    model = net()
    kfac = KFAC(model, KFACConfig(fixed_norm=100.0, **EVERY_STEP), execution=execution)
    backward(model)
    kfac.step()
    backward(model, 1)
    for parameter in model[3].parameters():
        parameter.grad.zero_()
    kfac.step()
    assert model[0].weight.grad.any()
    assert not model[3].weight.grad.any()


@BOTH
def test_the_clip_and_the_decay_may_be_scheduled(execution):
    def after(config: KFACConfig) -> list[Tensor]:
        model = net()
        stepped(model, kfac := KFAC(model, config, lr=LR, execution=execution), 1)
        kfac.config = config
        stepped(model, kfac, 2)
        return [parameter.grad.clone() for parameter in model.parameters()]

    constant = after(KFACConfig.sc20(kl_clip=1e-5, factor_decay=0.5, **EVERY_STEP))
    scheduled = after(KFACConfig.sc20(kl_clip=lambda step: 1e-5, factor_decay=lambda step: 0.5, **EVERY_STEP))
    other = after(KFACConfig.sc20(kl_clip=1e-5, factor_decay=lambda step: 0.5 / (step + 1), **EVERY_STEP))
    for one, two in zip(constant, scheduled, strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(constant[0], other[0])
    with pytest.raises(ConfigError, match=r"factor_decay gives 1 at step 0, which lies outside \[0, 1\)"):
        KFAC(net(), KFACConfig.sc20(factor_decay=lambda step: 1), lr=LR)
