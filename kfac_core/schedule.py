"""Schedules: hyperparameters that change during training (no torch).

Damping, factor decay, kl-clip and both update intervals are a number, a `Milestones`, or any callable from
the step to a value; all but the intervals may be a `Curve` too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kfac_core.curve import Curve
from kfac_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Milestones:
    """`initial * factor ** (milestones passed)`, as the SC20 code schedules damping and intervals.

    The value depends on the step alone, so evaluating it twice, or resuming, changes nothing.
    """

    initial: float
    """Value before the first milestone. Range: (0, inf). Example: `0.003`."""

    factor: float
    """Multiplier at each milestone; the papers halve damping and multiply intervals by 10. Range: (0, inf).
    Example: `0.5`."""

    at: tuple[float, ...]
    """Milestones, ascending, in `unit`. Example: `[40, 80]`."""

    unit: Literal["epochs", "steps"] = "epochs"
    """What `at` counts: `epochs` (in code this needs the steps per epoch) or `steps`. Example: `steps`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("initial", "factor"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} lies outside (0, inf)")
        if not self.at or list(self.at) != sorted(set(self.at)) or self.at[0] < 0:
            raise ConfigError(f"at={list(self.at)} is not an ascending list of milestones >= 0")
        if self.unit not in ("epochs", "steps"):
            raise ConfigError(f"unit={self.unit!r} is not one of epochs, steps")

    def __str__(self) -> str:
        """`0.001 x 0.5 at epochs 40, 80`: for names and tables."""
        return f"{self.initial:g} x {self.factor:g} at {self.unit} {', '.join(f'{at:g}' for at in self.at)}"

    def value(self, step: float, steps_per_epoch: int | None) -> float:
        """The value at `step`."""
        if self.unit == "epochs" and steps_per_epoch is None:
            raise ConfigError(
                "a schedule in epochs needs steps_per_epoch; pass it to KFAC, or use unit=steps"
            )
        position = step / steps_per_epoch if self.unit == "epochs" and steps_per_epoch else step
        passed = sum(position >= milestone for milestone in self.at)
        return self.initial * self.factor**passed


Hyperparameter = float | Milestones | Curve | Callable[[int], float]
Interval = int | Milestones | Callable[[int], float]


def value_at(hyperparameter: Hyperparameter, step: int, steps_per_epoch: int | None) -> float:
    """A hyperparameter's value at `step`.

    Raises:
        ConfigError: the schedule's value is not in (0, inf), or it is in epochs without `steps_per_epoch`.
    """
    if isinstance(hyperparameter, Milestones | Curve):
        return hyperparameter.value(step, steps_per_epoch)
    if not callable(hyperparameter):
        return hyperparameter
    value = hyperparameter(step)
    if not 0 < value < math.inf:
        raise ConfigError(f"a schedule gives {value} at step {step}, which lies outside (0, inf)")
    return value


def decay_at(decay: Hyperparameter, step: int, steps_per_epoch: int | None) -> float:
    """A weight of the old mean at `step`.

    Raises:
        ConfigError: as `value_at`; or a schedule's value is not in [0, 1).
    """
    if not callable(decay) and not isinstance(decay, Milestones | Curve):
        return decay
    value = decay(step) if callable(decay) else value_at(decay, step, steps_per_epoch)
    if not 0 <= value < 1:
        raise ConfigError(
            f"a schedule of factor_decay gives {value} at step {step}, which lies outside [0, 1)"
        )
    return value


def interval_at(interval: Interval, step: int, steps_per_epoch: int | None) -> int:
    """An interval at `step`, in whole steps >= 1, truncated as in the SC20 code."""
    return max(1, int(value_at(interval, step, steps_per_epoch)))


def interval_below(inverses: Interval, factors: Interval, steps_per_epoch: int | None = None) -> str | None:
    """Where the inverse interval is below the factor interval: `=5 is below factor_update_steps=10`.

    Returns:
        The end of a sentence about `inverse_update_steps`, or None if it is nowhere below. Callables, and
        schedules in different units without `steps_per_epoch`, are not examined.
    """
    if callable(inverses) or callable(factors):
        return None
    schedules = [interval for interval in (inverses, factors) if isinstance(interval, Milestones)]
    units = {schedule.unit for schedule in schedules}
    if len(units) > 1 and steps_per_epoch is None:
        return None
    in_steps = steps_per_epoch or 1  # or in the schedules' common unit
    changes = {
        math.ceil(milestone * in_steps) if steps_per_epoch and schedule.unit == "epochs" else milestone
        for schedule in schedules
        for milestone in schedule.at
    }
    for change in sorted({0, *changes}):
        inverse, factor = (_whole_steps(interval, change, in_steps) for interval in (inverses, factors))
        if inverse < factor:
            where = f" from {'step' if steps_per_epoch else units.pop()[:-1]} {change:g} on" if change else ""
            return f"={inverse} is below factor_update_steps={factor}{where}"
    return None


def _whole_steps(interval: int | Milestones, position: float, steps_per_epoch: int) -> int:
    if isinstance(interval, Milestones):
        return max(1, int(interval.value(position, steps_per_epoch)))
    return interval
