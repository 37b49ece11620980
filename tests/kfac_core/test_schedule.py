"""Promise: hyperparameters depend on the step alone, and a scheduled run equals its dense reference."""

from __future__ import annotations

import pytest

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.schedule import Milestones, interval_at, value_at
from tests.kfac_core.dense import DenseKFAC, DenseSettings
from tests.kfac_core.runs import GLOBAL_BATCH, LR, assert_same, build, data, train

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
        KFAC(build("mlp"), KFACConfig(**{name: HALVED}), lr=LR)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_callable_that_leaves_the_range_is_an_error_at_that_step(value):
    model = build("mlp")
    kfac = KFAC(model, KFACConfig(damping=lambda step: value if step else 1.0), lr=LR)
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
    kfac = KFAC(model, KFACConfig(solver=solver, **schedules), lr=LR, steps_per_epoch=2)
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
