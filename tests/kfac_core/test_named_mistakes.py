"""Promise: what would have no effect, or fail deep inside, is refused or reported by name, with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from kfac_core import KFAC, ConfigError, KFACConfig
from tests.kfac_core.runs import LR
from tests.kfac_core.test_guards import backward, net, stepped, warned

EVERY_STEP = {"factor_update_steps": 1, "inverse_update_steps": 1}


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("damping", 0.1, r"a schedule or a function of the step.*dataclasses\.replace.*damping=0\.1"),
        ("solver", "inverse", r"settings are fixed when KFAC is made; make a new KFAC"),
        ("skip", ("0",), "make a new KFAC"),
        ("lr", 0.5, "pass lr= the optimizer, or a callable"),
        ("captured_share", 0.5, "pass captured_share= to a new KFAC"),
        ("config", {"damping": 0.1}, "config must be a KFACConfig, got a dict"),
    ],
)
def test_a_setting_that_is_assigned_is_refused_and_the_message_says_how_it_changes(name, value, remedy):
    kfac = KFAC(net(), KFACConfig.sc20(), lr=LR)
    with pytest.raises(ConfigError, match=remedy):
        setattr(kfac, name, value)
    assert kfac.damping == 0.001


def test_attributes_that_are_no_settings_may_be_assigned():
    kfac = KFAC(net(), KFACConfig.sc20(), lr=LR)
    kfac.steps, kfac.note, kfac.config = 3, "mine", KFACConfig.sc20(damping=0.5)
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
        ({"steps_per_epoch": "10"}, r"steps_per_epoch='10' must be a whole number of steps >= 1"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0 must be"),
        ({"captured_share": 1.5}, r"captured_share=.* lies outside \(0, 1\]"),
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
    given: dict[str, Any] = {"model": net(), "config": KFACConfig.sc20(), "lr": LR, **arguments}
    with pytest.raises(ConfigError, match=message):
        KFAC(given.pop("model"), given.pop("config"), **given)


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
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_weight_that_is_computed_later_is_named_and_left_out_on_request(kind):
    model = net()
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
    if "norm" in kind:  # else before the first step
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
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
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
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
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
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
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
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP, skip=("0",)), lr=LR)
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
    summary = KFAC(model, KFACConfig.sc20(skip=skip), lr=LR).summary()
    assert {each.name: each.reason for each in summary.plain} == dict.fromkeys(plain, "skip")
    assert summary.taken_parameters + sum(each.parameters for each in summary.plain) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def sharded_later(rank: int, world_size: int) -> str:
    model = net()
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
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


def with_another_config(rank: int, world_size: int) -> str:
    model = nn.Linear(4, 3 + rank) if world_size == 3 else nn.Linear(4, 3)
    options = {"factor_update_steps": 1 + rank, "damping": lambda step: 0.1} if world_size == 2 else {}
    try:
        KFAC(model, KFACConfig.sc20(**options), lr=LR)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_rank_with_another_config_or_other_layers_is_named_and_does_not_hang(world):
    assert world(2).run(with_another_config)[1] == (
        "rank 1 has factor_update_steps=2, and other ranks do not: every rank must make the same KFAC"
    )
    assert "the model's layers" in world(3).run(with_another_config)[2]


def not_averaged(rank: int, world_size: int, averages: bool) -> list[str]:
    model = net()
    kfac, said = KFAC(model), []
    for seed in range(3):
        backward(model, world_size * seed + rank)
        for parameter in model.parameters() if averages else ():
            dist.all_reduce(parameter.grad)
        said += warned(kfac.step)
    return said


def test_gradients_that_are_not_averaged_over_ranks_are_named_once(world):
    assert world(2).run(not_averaged, True) == [[], []]
    for (said,) in world(2).run(not_averaged, False):
        assert re.search(
            r"the gradients of the ranks differ: .* had norms of [\d.]+ to [\d.]+\. Average them", said
        )


def test_a_step_after_remove_is_refused_until_kfac_is_refreshed():
    model = net()
    kfac = KFAC(model)
    kfac.remove()
    backward(model)
    with pytest.raises(ConfigError, match=r"after kfac\.remove\(\): make a new KFAC"):
        kfac.step()
    kfac.refresh()
    assert stepped(model, kfac, 1) == []


def test_the_parameters_that_kfac_takes_are_known_and_those_of_frozen_layers_do_not_count():
    model = Attentive()
    kfac = KFAC(model, KFACConfig(skip=("attention.q_proj", "head")))
    taken = {name for name, each in model.named_parameters() if any(each is one for one in kfac.parameters())}
    assert taken == {name for name, _ in model.named_parameters() if name.startswith("attention.")}
    model.attention.out_proj.requires_grad_(False)
    assert 0 < kfac.summary().share <= 1


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (("0", "fc"), r"skip pattern 'fc' matches no layer; layers: 0, 3$"),
        (("",), r"no trained layer that K-FAC supports and may take; skip=\[''\] leaves out all"),
    ],
)
def test_a_pattern_that_skips_nothing_or_everything_is_an_error(skip, message):
    with pytest.raises(ConfigError, match=message):
        KFAC(net(), KFACConfig.sc20(skip=skip), lr=LR)


def test_layers_are_skipped_by_the_name_of_their_class():
    model = net(nn.Embedding(4, 3), nn.Linear(3, 2))
    assert [shape.name for shape in KFAC(model, KFACConfig.sc20(skip=("Embedding",)), lr=LR).shapes] == ["1"]


def widened(model: nn.Sequential) -> None:
    model[3].weight.data, model[3].bias.data = torch.randn(5, 6), torch.randn(5)
    model[3].out_features = 5


def replaced(model: nn.Sequential) -> None:
    model[3] = nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("change", "what", "outputs"),
    [(widened, r"layer 3 was \[3, 6\] .* is \[5, 6\]", 5), (replaced, "replaced by Linear", 3)],
)
def test_a_layer_that_is_another_now_is_refused_at_the_next_step_and_taken_on_request(change, what, outputs):
    model = net()
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
    assert stepped(model, kfac, 1) == []
    backward(model)
    change(model)
    with pytest.raises(ConfigError, match=rf"{what}.*kfac\.refresh\(\)"):
        kfac.step()
    kfac.refresh()
    assert stepped(model, kfac, 1) == []
    assert kfac.shapes[1].g.dim == outputs


def test_a_model_that_is_moved_later_is_refused():
    model = net()
    kfac = KFAC(model, lr=LR)
    model.to("meta")
    with pytest.raises(ConfigError, match="was on cpu when KFAC was made and is on meta"):
        kfac.step()


def test_layers_added_or_unfrozen_later_are_named_once_and_taken_on_request():
    model = net()
    model[0].weight.requires_grad_(requires_grad=False)
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP), lr=LR)
    assert [shape.name for shape in kfac.shapes] == ["3"]
    stepped(model, kfac)
    model[0].weight.requires_grad_()
    model.append(nn.Linear(3, 3))
    (said,) = stepped(model, kfac)
    assert "K-FAC: 0, 4 added or unfrozen" in said
    before = {name: kfac._factors.running[key].clone() for name, key in kfac._snapshot().keys().items()}
    kfac.refresh()
    assert [shape.name for shape in kfac.shapes] == ["0", "3", "4"]
    for name, factor in before.items():
        assert torch.equal(kfac._factors.running[kfac._snapshot().keys()[name]], factor)
    backward(model)
    plain = model[0].weight.grad.clone()
    kfac.step()
    assert not torch.allclose(
        functional.normalize(plain, dim=(0, 1)), functional.normalize(model[0].weight.grad, dim=(0, 1))
    )


def compiled_whole(model: nn.Module) -> nn.Module:
    model.compile(fullgraph=True, backend="eager")
    return model


@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        (lambda: nn.DataParallel(net()), "nn.DataParallel"),
        (lambda: torch.compile(net(), fullgraph=True, backend="eager"), r"torch\.compile\(fullgraph=True\)"),
        (lambda: net(nn.Linear(4, 3), compiled_whole(nn.Linear(3, 3))), r"fullgraph=False \(module 1\)"),
        (lambda: net().to("meta"), "meta device"),
    ],
)
def test_a_wrapper_that_cannot_be_exact_is_refused_by_name(wrapped, message):
    with pytest.raises(ConfigError, match=message):
        KFAC(wrapped(), lr=LR)


def joined(rank: int, world_size: int) -> str:
    """Ranks with unlike numbers of batches, inside of DDP's `join`."""
    model = nn.parallel.DistributedDataParallel(net())
    kfac = KFAC(model, lr=LR)
    try:
        with model.join():
            for step in range(1 + rank):
                backward(model, step)
                kfac.step()
    except ConfigError as error:
        return str(error)
    return "no error"


def test_ddp_join_is_refused_at_the_first_step(world):
    assert all("DistributedDataParallel.join()" in said for said in world(2).run(joined))


def test_a_rate_is_needed_for_the_clip_only():
    with pytest.raises(ConfigError, match=r"kl_clip=0\.01 needs the learning rate: pass lr="):
        KFAC(net(), KFACConfig.sc20(kl_clip=0.01))
    KFAC(net(), KFACConfig.sc20(kl_clip=None))
    KFAC(net(), KFACConfig())
