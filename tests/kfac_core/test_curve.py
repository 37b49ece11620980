"""Promise: curves are the learning rates of torch's schedulers, to 1e-12, and refuse what has no meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import LRScheduler

from kfac_core import KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.schedule import Curve, Decay, value_at

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
    ({"shape": "cosine"}, lambda o: torchs.CosineAnnealingLR(o, FALL)),
    ({"shape": "linear"}, lambda o: torchs.LinearLR(o, 1.0, 0.0, total_iters=FALL)),
    ({"shape": "linear", "final": 0.1}, lambda o: torchs.LinearLR(o, 1.0, 0.1, total_iters=FALL)),
    ({"shape": "polynomial"}, lambda o: torchs.PolynomialLR(o, FALL, power=1.0)),
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


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_one_cycle_whose_warm_up_takes_all_steps_ends_at_the_peak(unit):
    cycle = Decay(shape="one_cycle", warmup=1 if unit == "epochs" else STEPS_PER_EPOCH, unit=unit)
    found = [cycle.share(step, STEPS_PER_EPOCH, epochs=1) for step in range(STEPS_PER_EPOCH)]
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (pytest.approx(0.2), 1.0)


def test_damping_follows_the_same_curves():
    curve = Curve(initial=0.03, shape="cosine", length=EPOCHS, final=0.1)
    config = KFACConfig(damping=curve)
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
