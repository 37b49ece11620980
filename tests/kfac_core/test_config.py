"""Promise: a hyperparameter that no run could use is refused; schedules depend on the step alone.

Curves are the learning rates of torch's schedulers, to 1e-12; a scheduled run equals its dense reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import LRScheduler

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.config import Costs
from kfac_core.schedule import Curve, Decay, Milestones, interval_at, interval_below, value_at
from tests.kfac_core.dense import DenseKFAC, DenseSettings
from tests.kfac_core.runs import GLOBAL_BATCH, LR, assert_same, build, data, train

TWO = [[64, 1e-4], [576, 1e-2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "comm_op"}, "strategy='comm_op' is not one of .*did you mean comm_opt"),
        ({"solver": "cholesky"}, "solver='cholesky' is not one of eigen, inverse, inverse_pi"),
        ({"assignment": "random"}, "assignment='random' is not one of"),
        ({"strategy": "hybrid_opt"}, "needs grad_worker_fraction"),
        ({"strategy": "hybrid_opt", "grad_worker_fraction": 0.0}, r"grad_worker_fraction=0.0 .*\(0, 1\]"),
        ({"grad_worker_fraction": 0.5}, "has no meaning for strategy=comm_opt"),
        ({"damping": 0.0}, r"damping=0.0 lies outside \(0, inf\)"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"factor_decay": 1.0}, r"factor_decay=1.0 lies outside \[0, 1\)"),
        ({"kl_clip": -1.0}, "kl_clip=-1.0"),
        ({"kl_clip": None, "fixed_norm": 0}, r"fixed_norm=0 lies outside \(0, inf\)"),
        ({"fixed_norm": 0.1}, r"kl_clip=0\.001 and fixed_norm=0\.1 each set the length of a step; keep one"),
        ({"factor_update_steps": 0}, "factor_update_steps=0 must be a whole number of steps >= 1"),
        ({"inverse_update_steps": True}, "inverse_update_steps=True"),
        ({"factor_update_steps": 10, "inverse_update_steps": 5}, "is below factor_update_steps=10"),
        ({"split_factors": "never", "strategy": "mem_opt"}, "has no meaning for strategy=mem_opt"),
        ({"factor_dtype": "int8"}, "factor_dtype='int8' is not one of float64"),
        ({"sequence": "sum"}, "sequence='sum' is not one of expand, reduce"),
        ({"loss_reduction": "none"}, "loss_reduction='none'"),
        ({"factor_start": "zero"}, "factor_start='zero'"),
        ({"skip": "fc"}, r"skip='fc' is one text; write a tuple of patterns: \('fc',\)"),
        ({"damping": "0.1"}, "damping='0.1' must be a number, a schedule or a function of the step"),
        ({"kl_clip": "1"}, "kl_clip='1' must be a number"),
        ({"factor_decay": True}, "factor_decay=True must be a number"),
        ({"factor_batch_fraction": "1"}, "factor_batch_fraction='1' must be a number$"),
        ({"skip": ("[",)}, r"skip pattern '\[' must be a regular expression: "),
        ({"costs": {}}, r"costs=\{\} must be a mapping of inverse_seconds to pairs of a size and seconds"),
        ({"max_factor_dim": 0}, "max_factor_dim=0"),
        ({"max_factor_dim": 1.5}, r"max_factor_dim=1\.5"),
        ({"eigen_rank": 0}, "eigen_rank=0"),
        ({"eigen_rank": 8, "solver": "inverse"}, "eigen_rank=8"),
        ({"loss_terms": "word"}, "loss_terms='word'"),
        ({"batch_dim": 2}, "batch_dim=2"),
        ({"batch_dim": True}, "batch_dim=True"),
        ({"overlap_factors": 1}, "overlap_factors=1"),
        ({"skip": 5}, "skip=5"),
        ({"skip": (None,)}, "skip="),
        ({"costs": 5}, "costs=5 must be a mapping of inverse_seconds"),
        ({"costs": {"inverse_seconds": TWO, "links": 1}}, r"costs=\{.*'links': 1\} must be a mapping of"),
        ({"costs": {"inverse_seconds": TWO[:1]}}, "two or more, each size once"),
        ({"costs": {"inverse_seconds": [[64, 1e-4], [8, 0]]}}, r"are not pairs of a size and seconds"),
        ({"costs": {"inverse_seconds": [[64, 1e-4], [1.5, 1e-5]]}}, r"are not pairs of a size and seconds"),
        ({"costs": {"inverse_seconds": [*TWO, [64, 2e-4]]}}, "two or more, each size once"),
        ({"costs": {"inverse_seconds": 3}}, "inverse_seconds=3 are not pairs of a size and seconds"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        KFACConfig.sc20(**options)


def test_the_limits_themselves_are_allowed():
    KFACConfig.sc20(strategy="hybrid_opt", grad_worker_fraction=1.0, factor_decay=0.0, kl_clip=None)


def test_costs_are_taken_as_a_file_holds_them_and_can_be_a_key():
    config = KFACConfig.sc20(costs={"inverse_seconds": TWO[::-1]})
    assert config.costs == Costs(inverse_seconds=((64, 1e-4), (576, 1e-2)))
    assert {config: 1}[KFACConfig.sc20(costs=config.costs)] == 1


HALVED = Milestones(initial=0.04, factor=0.5, at=(2, 4))


def test_milestones_multiply_once_each_however_often_they_are_evaluated():
    values = [HALVED.value(step, 10) for step in (0, 19, 20, 39, 40, 400) for _ in range(3)][::3]
    assert values == [0.04, 0.04, 0.02, 0.02, 0.01, 0.01]
    assert HALVED.value(0, 10) == 0.04  # a resumed run may evaluate an earlier step


def test_milestones_count_in_steps_or_in_parts_of_an_epoch():
    assert Milestones(initial=1.0, factor=2.0, at=(3,), unit="steps").value(3, None) == 2.0
    assert Milestones(initial=1.0, factor=2.0, at=(0.5,)).value(5, 10) == 2.0


def test_callables_get_the_step_and_intervals_are_truncated_to_whole_steps():
    assert value_at(lambda step: 1 / (1 + step), 3, None) == 0.25
    assert interval_at(lambda step: 12.9, 0, None) == 12
    assert interval_at(Milestones(initial=10, factor=0.01, at=(1,), unit="steps"), 1, None) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 0, "factor": 2, "at": (1,)}, r"initial=0 lies outside \(0, inf\)"),
        ({"initial": 1, "factor": -2, "at": (1,)}, "factor=-2"),
        ({"initial": 1, "factor": 2, "at": ()}, r"at=\[\] is not an ascending list"),
        ({"initial": 1, "factor": 2, "at": (3, 1)}, r"at=\[3, 1\]"),
        ({"initial": 1, "factor": 2, "at": (1,), "unit": "days"}, "unit='days' is not one of epochs, steps"),
    ],
)
def test_invalid_milestones_raise_a_config_error(options, message):
    with pytest.raises(ConfigError, match=message):
        Milestones(**options)


@pytest.mark.parametrize("name", ["damping", "factor_update_steps", "inverse_update_steps"])
def test_a_schedule_in_epochs_without_steps_per_epoch_is_an_error_at_construction(name):
    with pytest.raises(ConfigError, match="needs steps_per_epoch"):
        KFAC(build("mlp"), KFACConfig.sc20(**{name: HALVED}), lr=LR)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_callable_that_leaves_the_range_is_an_error_at_that_step(value):
    model = build("mlp")
    kfac = KFAC(model, KFACConfig.sc20(damping=lambda step: value if step else 1.0), lr=LR)
    train(model, kfac, "mlp", [0])
    with pytest.raises(ConfigError, match=r"a schedule gives .* at step 1, which lies outside"):
        train(model, kfac, "mlp", [1])


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_a_scheduled_run_equals_the_dense_reference(solver):
    """Two steps an epoch; damping halves, F goes from 1 to 2 and E from 2 to 4 on the way."""
    schedules = {
        "damping": HALVED,
        "factor_update_steps": lambda step: 1 if step < 4 else 2.5,
        "inverse_update_steps": Milestones(initial=2, factor=2, at=(2.0,)),
    }
    model = build("mlp")
    kfac = KFAC(model, KFACConfig.sc20(solver=solver, **schedules), lr=LR, steps_per_epoch=2)
    got = train(model, kfac, "mlp", range(10))
    settings = DenseSettings(solver, 0.04, 0.95, 0.001, 1, 2, LR)
    dense = DenseKFAC(build("mlp"), settings)
    seen = {name: range(GLOBAL_BATCH) for name in ("0", "2", "4")}
    for step, gradients in enumerate(got):
        if step == 4:
            settings.damping, settings.factor_update_steps, settings.inverse_update_steps = 0.02, 2, 4
        if step == 8:
            settings.damping = 0.01
        assert_same(gradients, dense.step(*data("mlp", step), seen), 1e-8)


PEAK, STEPS_PER_EPOCH, EPOCHS, WARMUP = 0.3, 7, 9, 2
STEPS, RISE = EPOCHS * STEPS_PER_EPOCH, WARMUP * STEPS_PER_EPOCH
FALL = STEPS - RISE
Scheduler = Callable[[torch.optim.Optimizer], LRScheduler]


def rates_of(make: Scheduler, steps: int) -> list[float]:
    """What torch's scheduler sets for each step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def warmed(after: Scheduler) -> Scheduler:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        up = torchs.LinearLR(optimizer, start_factor=0.2, total_iters=RISE)
        return torchs.SequentialLR(optimizer, [up, after(optimizer)], milestones=[RISE])

    return make


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return torchs.OneCycleLR(
        optimizer, PEAK, total_steps=STEPS, pct_start=RISE / STEPS, div_factor=25, final_div_factor=100,
        cycle_momentum=False,
    )  # fmt: skip


SHAPES: list[tuple[dict[str, Any], Scheduler]] = [
    ({"shape": "cosine", "final": 0.01}, lambda o: torchs.CosineAnnealingLR(o, FALL, eta_min=0.01 * PEAK)),
    ({"shape": "linear", "final": 0.1}, lambda o: torchs.LinearLR(o, 1.0, 0.1, total_iters=FALL)),
    ({"shape": "polynomial", "power": 2.5}, lambda o: torchs.PolynomialLR(o, FALL, power=2.5)),
    (
        {"shape": "step", "every": 2, "factor": 0.4},
        lambda o: torchs.StepLR(o, 2 * STEPS_PER_EPOCH, gamma=0.4),
    ),
]


@pytest.mark.parametrize("unit", ["epochs", "steps"])
@pytest.mark.parametrize(("fields", "scheduler"), SHAPES, ids=[str(fields) for fields, _ in SHAPES])
def test_a_warm_up_and_a_way_down_are_torchs(fields, scheduler, unit):
    scale = 1 if unit == "epochs" else STEPS_PER_EPOCH
    spans = {"warmup": WARMUP * scale, "unit": unit}
    if "every" in fields:
        spans["every"] = fields["every"] * scale
    if unit == "steps":
        spans["length"] = STEPS
    curve = Decay(**{**fields, **spans})
    rates = [PEAK * curve.share(step, STEPS_PER_EPOCH, EPOCHS) for step in range(STEPS)]
    assert rates == pytest.approx(rates_of(warmed(scheduler), STEPS), rel=0, abs=1e-12)


def test_without_a_warm_up_the_way_down_starts_at_the_peak_and_ends_at_the_last_step():
    curve = Decay(shape="cosine", final=0.05)
    expected = rates_of(lambda o: torchs.CosineAnnealingLR(o, STEPS, eta_min=0.05 * PEAK), STEPS + 1)
    found = [PEAK * curve.share(step, STEPS_PER_EPOCH, EPOCHS) for step in range(STEPS + 1)]
    assert found == pytest.approx(expected, rel=0, abs=1e-12)
    assert curve.share(10 * STEPS, STEPS_PER_EPOCH, EPOCHS) == 0.05  # and stays there


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_one_cycle_is_torchs(unit):
    scale = 1 if unit == "epochs" else STEPS_PER_EPOCH
    cycle = Decay(
        shape="one_cycle", warmup=WARMUP * scale, length=EPOCHS * scale, unit=unit, warmup_start=1 / 25,
        final=1 / 2500,
    )  # fmt: skip
    found = [PEAK * cycle.share(step, STEPS_PER_EPOCH) for step in range(STEPS)]
    assert found == pytest.approx(rates_of(one_cycle, STEPS)[:STEPS], rel=0, abs=1e-12)


def test_one_cycle_whose_warm_up_takes_all_steps_ends_at_the_peak():
    cycle = Decay(shape="one_cycle", warmup=STEPS_PER_EPOCH, unit="steps")
    found = [cycle.share(step, STEPS_PER_EPOCH, epochs=1) for step in range(STEPS_PER_EPOCH)]
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (pytest.approx(0.2), 1.0)


def test_damping_follows_the_same_curves():
    curve = Curve(initial=0.03, shape="cosine", length=EPOCHS, final=0.1)
    config = KFACConfig.sc20(damping=curve)
    expected = rates_of(lambda o: torchs.CosineAnnealingLR(o, STEPS, eta_min=0.1 * PEAK), STEPS)
    found = [value_at(config.damping, step, STEPS_PER_EPOCH) for step in range(STEPS)]
    assert found == pytest.approx([0.03 / PEAK * rate for rate in expected], rel=1e-12)
    with pytest.raises(ConfigError, match="needs steps_per_epoch"):
        value_at(config.damping, 0, None)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"shape": "cosine", "power": 2.0}, "power=2 has no meaning for shape=cosine; leave it out"),
        ({"shape": "step"}, "every must be given for shape=step"),
        ({"shape": "step", "every": 0.0}, r"every=0.0 lies outside \(0, inf\)"),
        ({"shape": "one_cycle"}, "warmup must be > 0 for shape=one_cycle"),
        ({"shape": "linear", "warmup": 5.0, "length": 5.0}, r"warmup=5 lies outside \[0, length\)"),
        ({"shape": "linear", "final": 1.5}, r"final=1.5 lies outside \[0, 1\]"),
        ({"shape": "triangle"}, "shape='triangle' is not one of cosine, linear"),
    ],
)
def test_what_has_no_meaning_is_refused(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Decay(**fields)


def test_damping_may_not_become_zero_and_says_where_it_ends():
    with pytest.raises(ConfigError, match="final must be > 0"):
        Curve(initial=0.1, shape="linear", length=3.0)
    with pytest.raises(ConfigError, match="length must be given"):
        Curve(initial=0.1, shape="linear", final=0.1)


def test_names_hold_what_differs_from_the_defaults():
    assert str(Decay(shape="cosine", warmup=5.0)) == "cosine warmup=5.0"
    assert (
        str(Curve(initial=0.03, shape="cosine", length=9.0, final=0.1)) == "0.03 cosine length=9.0 final=0.1"
    )


def test_scheduled_intervals_that_cross_are_an_error_before_the_first_step():
    steps = Milestones(initial=60, factor=0.1, at=(30,), unit="steps")
    crossing = KFACConfig.sc20(
        factor_update_steps=Milestones(initial=2, factor=10, at=(2,)), inverse_update_steps=steps
    )
    with pytest.raises(ConfigError, match="=6 is below factor_update_steps=20 from step 30 on"):
        KFAC(build("mlp"), crossing, lr=LR, steps_per_epoch=10)
    KFAC(build("mlp"), replace(crossing, factor_update_steps=6), lr=LR, steps_per_epoch=10)
    with pytest.raises(ConfigError, match="=10 is below factor_update_steps=20 from step 20 on"):
        KFAC(build("mlp"), replace(crossing, inverse_update_steps=10), lr=LR, steps_per_epoch=10)
    in_epochs = interval_below(10, Milestones(initial=2, factor=10, at=(2,)))  # as of a sweep's file
    assert in_epochs == "=10 is below factor_update_steps=20 from epoch 2 on"
