"""Promise: what would have no effect, or fail deep inside, is refused or reported by name, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune

from kfac_core import KFAC, ConfigError, KFACConfig
from tests.kfac_core.runs import LR
from tests.kfac_core.test_guards import backward, net, stepped

EVERY_STEP = {"factor_update_steps": 1, "inverse_update_steps": 1}


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("damping", 0.1, r"a schedule or a function of the step.*dataclasses\.replace.*damping=0\.1"),
        ("kl_clip", None, r"a schedule or a function of the step"),
        ("factor_update_steps", 5, r"a schedule or a function of the step"),
        ("solver", "inverse", r"settings are fixed when KFAC is made; make a new KFAC"),
        ("skip", ("0",), "make a new KFAC"),
        ("lr", 0.5, "pass lr= the optimizer, or a callable"),
        ("captured_share", 0.5, "pass captured_share= to a new KFAC"),
        ("config", {"damping": 0.1}, "config must be a KFACConfig, got a dict"),
    ],
)
def test_a_setting_that_is_assigned_is_refused_and_the_message_says_how_it_changes(name, value, remedy):
    kfac = KFAC(net(), KFACConfig(), lr=LR)
    with pytest.raises(ConfigError, match=remedy):
        setattr(kfac, name, value)
    assert kfac.damping == 0.001


def test_the_remedy_for_a_setting_keeps_the_factors():
    model = net()
    kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=LR)
    stepped(model, kfac)
    kfac.remove()
    other = KFAC(model, replace(kfac.config, damping=0.1), lr=LR)
    other.load_state_dict(kfac.state_dict())
    assert other.damping == 0.1
    for key, factor in kfac._factors.running.items():
        assert torch.equal(factor, other._factors.running[key])


def test_attributes_that_are_no_settings_may_be_assigned():
    kfac = KFAC(net(), KFACConfig(), lr=LR)
    kfac.steps, kfac.note, kfac.config = 3, "mine", KFACConfig(damping=0.5)
    assert (kfac.steps, kfac.note, kfac.damping) == (3, "mine", 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": [nn.Parameter(torch.ones(2))]}, r"model must be a torch\.nn\.Module, got a list"),
        ({"model": None}, r"model must be a torch\.nn\.Module, got a NoneType"),
        ({"config": {"damping": 0.1}}, "config must be a KFACConfig, got a dict"),
        ({"config": torch.optim.SGD([torch.ones(1)], 0.1)}, "got a SGD; pass it as lr="),
        ({"lr": "0.1"}, "lr must be a number, a callable or the optimizer, got a str"),
        ({"lr": lambda step: 0.1}, "lr must be .* a callable without arguments, got <function"),
        ({"lr": float("nan")}, "lr=nan must be a finite number >= 0"),
        ({"lr": True}, "lr=True must be a finite number"),
        ({"steps_per_epoch": "10"}, r"steps_per_epoch='10' must be a whole number of steps >= 1"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0 must be"),
        ({"steps_per_epoch": 2.5}, r"steps_per_epoch=2\.5 must be"),
        ({"captured_share": "0.5"}, r"captured_share='0\.5' must be a number in \(0, 1\]"),
        ({"grad_scaler": True}, r"grad_scaler must be a torch\.amp\.GradScaler, got a bool"),
        ({"cost": 3}, "cost must be a CostModel, got a int"),
        ({"timer": 3}, "timer must be a PhaseTimer, got a int"),
        ({"process_group": [0, 1]}, r"process_group must be a ProcessGroup .*, got a list"),
        ({"execution": "batched"}, "execution must be an Execution, got a str"),
        ({"is_last_pass": True}, "is_last_pass must be a callable without arguments, got a bool"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(arguments, message):
    given: dict[str, Any] = {"model": net(), "config": KFACConfig(), "lr": LR, **arguments}
    with pytest.raises(ConfigError, match=message):
        KFAC(given.pop("model"), given.pop("config"), **given)


@pytest.mark.parametrize(
    ("field", "value"),
    [("overlap_factors", "yes"), ("overlap_factors", 1), ("skip", 5), ("skip", (3,)), ("skip", (None,))],
)
def test_a_field_of_another_kind_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"{field}="):
        KFACConfig(**{field: value})


def test_a_lazy_module_is_refused_before_its_first_pass_and_taken_after_it():
    model = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(ConfigError, match=r"parameter 0\.weight .* lazy module: run one forward pass"):
        KFAC(model, lr=LR)
    model(torch.randn(2, 4))
    assert [shape.name for shape in KFAC(model, lr=LR).shapes] == ["0", "2"]


COMPUTED: dict[str, Callable[[nn.Module], object]] = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "weight norm": parametrizations.weight_norm,
    "weight norm of old": nn.utils.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("first_step", [True, False])
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_weight_that_is_computed_later_is_named_and_left_out_on_request(kind, first_step):
    model = net()
    kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=LR)
    if not first_step:
        stepped(model, kfac)
    COMPUTED[kind](model[0])
    backward(model)
    with pytest.raises(ConfigError, match=r"weight of layer 0 .* is computed now.*kfac\.refresh\(\)"):
        kfac.step()
    kfac.refresh()
    assert [shape.name for shape in kfac.shapes] == ["3"]
    assert stepped(model, kfac) == []
    assert "the weight is computed" in str(kfac)


def test_pruning_that_is_permanent_is_no_mistake():
    model = net()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    prune.remove(model[0], "weight")
    kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=LR)
    assert [shape.name for shape in kfac.shapes] == ["0", "3"]
    assert stepped(model, kfac) == []


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :] + torch.arange(3.0)[:, None]
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def test_projections_that_are_unfrozen_later_are_named_once_and_taken_on_request():
    model = Attentive()
    model.attention.requires_grad_(requires_grad=False)
    kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=LR)
    assert stepped(model, kfac) == []
    model.attention.requires_grad_()
    (said,) = stepped(model, kfac)
    assert (
        "attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj added or unfrozen" in said
    )
    assert "call kfac.refresh()" in said
    kfac.refresh()
    assert [shape.name for shape in kfac.shapes][-1] == "head"
    assert len(kfac.shapes) == 5
    assert stepped(model, kfac) == []


def test_a_bias_that_is_unfrozen_later_is_named_once_and_taken_on_request():
    model = net()
    model[0].bias.requires_grad_(requires_grad=False)
    kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=LR)
    assert stepped(model, kfac) == []
    model[0].bias.requires_grad_()
    (said,) = stepped(model, kfac)
    assert "K-FAC: the bias of 0 added or unfrozen since KFAC was made" in said
    kfac.refresh()
    assert kfac.shapes[0].a.dim == 5
    assert stepped(model, kfac) == []


def test_a_skipped_layer_that_is_unfrozen_later_is_no_mistake():
    model = net()
    model[0].requires_grad_(requires_grad=False)
    kfac = KFAC(model, KFACConfig(**EVERY_STEP, skip=("0",)), lr=LR)
    model[0].requires_grad_()
    assert stepped(model, kfac) == []


@pytest.mark.parametrize(
    ("skip", "plain"),
    [
        (("attention.q_proj",), {"attention.q_proj"}),
        (("attention.out_proj",), {"attention.out_proj"}),
        (("MultiheadAttention",), {f"attention.{part}_proj" for part in ("q", "k", "v", "out")}),
    ],
)
def test_the_summary_names_projections_that_are_skipped(skip, plain):
    model = Attentive()
    summary = KFAC(model, KFACConfig(skip=skip), lr=LR).summary()
    assert {each.name: each.reason for each in summary.plain} == dict.fromkeys(plain, "skip")
    assert summary.taken_parameters + sum(each.parameters for each in summary.plain) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def sharded_later(rank: int, world_size: int) -> str:
    model = net()
    kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=LR)
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    try:
        backward(model)
        kfac.step()
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_model_that_is_sharded_after_kfac_was_made_is_named(world):
    for said in world(2).run(sharded_later):
        assert "the weight of layer 0 was sharded since KFAC was made: make KFAC after fully_shard" in said


class Headed(nn.Module):
    """A trunk, and a head of any number of classes."""

    def __init__(self, classes: int, name: str = "head") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh())
        self.add_module(name, nn.Linear(5, classes))
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self._name)(self.trunk(x))


def fine_tuned(options: dict[str, Any]) -> tuple[KFAC, Headed, KFAC]:
    """A trained K-FAC, and the model and K-FAC of another task."""
    model, other = Headed(3), Headed(7, "classes")
    kfac = KFAC(model, KFACConfig(**EVERY_STEP, **options), lr=LR)
    stepped(model, kfac, 4)
    return kfac, other, KFAC(other, KFACConfig(**EVERY_STEP, **options), lr=LR)


@pytest.mark.parametrize("options", [{}, {"solver": "inverse"}, {"eigen_start": "warm"}])
def test_a_state_of_partly_other_layers_loads_what_matches_and_says_what_does_not(options):
    kfac, model, other = fine_tuned(options)
    found = other.load_state_dict(kfac.state_dict(), strict=False)
    assert found.missing_keys == ["classes.a", "classes.g"]
    assert found.unexpected_keys == ["head.a", "head.g"]
    assert found.mismatched_keys == []
    names = [shape.name for shape in other.shapes]
    for (layer, kind), factor in other._factors.running.items():
        want = (
            kfac._factors.running[layer, kind]
            if names[layer] != "classes"
            else torch.eye(len(factor[0]))[None]
        )
        assert torch.equal(factor, want)
    assert other.steps == 4
    assert stepped(model, other) == []


def test_a_state_of_other_layers_is_refused_with_all_their_names():
    kfac, _, other = fine_tuned({})
    with pytest.raises(ConfigError) as error:
        other.load_state_dict(kfac.state_dict())
    assert "missing classes.a, classes.g; unexpected head.a, head.g; strict=False loads" in str(error.value)
    assert other.steps == 0


def test_factors_of_another_shape_stay_as_they_are():
    kfac, _, _ = fine_tuned({})
    other = KFAC(Headed(7), KFACConfig(), lr=LR)
    found = other.load_state_dict(kfac.state_dict(), strict=False)
    assert found == ([], [], ["head.g"])
    keys = other._snapshot().keys()
    assert torch.equal(other._factors.running[keys["head.g"]][0], torch.eye(7))
    assert torch.equal(other._factors.running[keys["head.a"]], kfac._factors.running[keys["head.a"]])


def test_a_state_that_matches_loads_the_same_without_being_strict():
    model = net()
    kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=LR)
    stepped(model, kfac)
    kfac.remove()
    other = KFAC(model, KFACConfig(**EVERY_STEP), lr=LR)
    assert other.load_state_dict(kfac.state_dict(), strict=False) == ([], [], [])
    assert not other._must_solve
    for key, data in kfac._second_order.data.items():
        assert torch.equal(data, other._second_order.data[key])


def loaded_in_part(rank: int, world_size: int, strategy: str) -> list[Tensor]:
    """Gradients of the step after a state of another head was loaded."""
    kfac, model, other = fine_tuned({"strategy": strategy})
    other.load_state_dict(kfac.state_dict(), strict=False)
    backward(model)
    other.step()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", ["comm_opt", "mem_opt"])
def test_every_rank_loads_its_part_of_what_matches(world, strategy):
    (want,) = world(1).run(loaded_in_part, "comm_opt")
    for got in world(2).run(loaded_in_part, strategy):
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("state", [None, b"bytes", [1]])
def test_a_state_that_is_no_mapping_is_refused(state):
    with pytest.raises(ConfigError, match="a K-FAC state must be a mapping, got a"):
        KFAC(net(), lr=LR).load_state_dict(state)
