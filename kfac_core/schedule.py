"""When a setting has which value: curves over the steps, milestones, and the intervals of updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from kfac_core.errors import ConfigError

# ------------------------------------------------------------
# Curves: how a learning rate or a damping rises and falls over a training (no torch).
#
# A value is a peak times a factor that depends on the step alone, so evaluating it twice, or resuming,
# changes nothing. The factors are those of torch's schedulers, see `Decay`.


READ_BY: dict[str, tuple[str, ...]] = {
    "final": ("cosine", "linear", "polynomial", "one_cycle"),
    "power": ("polynomial",),
    "every": ("step",),
    "factor": ("step",),
}
"""Fields that only these shapes read."""

START = 0.2  # SC20 starts the warm-up from a fifth of the peak


@dataclass(frozen=True, kw_only=True)
class Decay:
    """A warm-up to a peak and the way down, as a share of the peak.

    With S steps in all, of which W are the warm-up, and p steps since its end, of R = S - W:

    - `cosine`: f + (1 - f) (1 + cos(pi p / R)) / 2, as torch's CosineAnnealingLR
    - `linear`: 1 - (1 - f) p / R, as LinearLR
    - `polynomial`: f + (1 - f) (1 - p / R) ** power, as PolynomialLR where f = 0; BERT's is of power 1
    - `step`: factor ** (whole multiples of `every` in p), as StepLR
    - `one_cycle`: half a cosine up over the first W steps and another one down to f, as OneCycleLR

    All but `one_cycle` warm up along a straight line, as torch's LinearLR, and stay at f after S steps.
    """

    shape: Literal["cosine", "linear", "polynomial", "one_cycle", "step"]
    """The way down: `cosine`, `linear`, `polynomial`, `step`, or `one_cycle`, whose warm-up is half a cosine
    too. Example: `cosine`."""

    unit: Literal["epochs", "steps"] = "epochs"
    """What `length`, `warmup` and `every` count: `epochs` (in code this needs the steps per epoch) or
    `steps`. Example: `steps`."""

    length: float | None = None
    """The whole curve, warm-up included; null lasts until the end of the training, for the learning rate
    only. Range: (0, inf). Example: `90`."""

    warmup: float = 0.0
    """The warm-up, shorter than `length`; `one_cycle` needs one. Range: [0, inf). Example: `5`."""

    warmup_start: float = START
    """Share of the peak from which the warm-up starts; the default is SC20's. Range: [0, 1].
    Example: `0.04`."""

    final: float | None = None
    """Share of the peak at the end, for all shapes but `step`; null is 0. Range: [0, 1]. Example: `0.01`."""

    power: float | None = None
    """Power of `polynomial`; null is 1. Range: (0, inf). Example: `2`."""

    every: float | None = None
    """Interval of `step`, which needs it. Range: (0, inf). Example: `30`."""

    factor: float | None = None
    """Multiplier at each interval of `step`; null is 0.1. Range: (0, 1). Example: `0.5`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is out of range, or the shape does not read it.
        """
        shapes = ("cosine", "linear", "polynomial", "one_cycle", "step")
        if self.shape not in shapes:
            raise ConfigError(f"shape={self.shape!r} is not one of {', '.join(shapes)}")
        if self.unit not in ("epochs", "steps"):
            raise ConfigError(f"unit={self.unit!r} is not one of epochs, steps")
        for name, readers in READ_BY.items():
            if getattr(self, name) is not None and self.shape not in readers:
                raise ConfigError(
                    f"{name}={getattr(self, name):g} has no meaning for shape={self.shape}; leave it out"
                )
        for name in ("length", "power", "every"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} lies outside (0, inf)")
        for name in ("final", "warmup_start"):
            if (value := getattr(self, name)) is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name}={value} lies outside [0, 1]")
        if self.factor is not None and not 0 < self.factor < 1:
            raise ConfigError(f"factor={self.factor} lies outside (0, 1)")
        if not 0 <= self.warmup < (self.length if self.length is not None else math.inf):
            raise ConfigError(f"warmup={self.warmup:g} lies outside [0, length)")
        if self.shape == "one_cycle" and not self.warmup:
            raise ConfigError("warmup must be > 0 for shape=one_cycle, which rises before it falls")
        if self.shape == "step" and self.every is None:
            raise ConfigError("every must be given for shape=step")

    def __str__(self) -> str:
        """`cosine length=90 warmup=5`: for names and tables."""
        set_here = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(Decay)
            if field.name != "shape" and getattr(self, field.name) != field.default
        ]
        return " ".join([self.shape, *set_here])

    def share(self, step: float, steps_per_epoch: int | None, epochs: float | None = None) -> float:
        """The share of the peak at `step`.

        Args:
            step: steps taken so far.
            steps_per_epoch: needed if `unit` is `epochs`, or if `length` is null.
            epochs: of the training, the length where `length` is null.

        Raises:
            ConfigError: what is needed is missing.
        """
        in_steps = self._steps_per_unit(steps_per_epoch)
        if self.length is not None:
            whole = self.length * in_steps
        elif epochs is not None and steps_per_epoch is not None:
            whole = epochs * steps_per_epoch
        else:
            raise ConfigError("length must be given: nothing else says where this curve ends")
        warmup = self.warmup * in_steps
        if self.shape == "one_cycle":
            return self._cycle(step, warmup - 1, whole - 1)  # OneCycleLR ends its halves on these steps
        if step < warmup:
            return self.warmup_start + (1 - self.warmup_start) * step / warmup
        return self._decayed(step - warmup, whole - warmup, in_steps)

    def _steps_per_unit(self, steps_per_epoch: int | None) -> int:
        if self.unit == "steps":
            return 1
        if steps_per_epoch is None:
            raise ConfigError("a curve in epochs needs steps_per_epoch; pass it to KFAC, or use unit=steps")
        return steps_per_epoch

    def _decayed(self, passed: float, whole: float, in_steps: int) -> float:
        if self.shape == "step":
            interval = (self.every or 0.0) * in_steps  # never missing, see __post_init__
            return float((self.factor if self.factor is not None else 0.1) ** (passed // interval))
        final, left = self.final or 0.0, 1.0 - min(passed / whole, 1.0)
        if self.shape == "cosine":
            return final + (1 - final) * (1 - math.cos(math.pi * left)) / 2
        return float(final + (1 - final) * left ** (self.power if self.power is not None else 1.0))

    def _cycle(self, step: float, top: float, end: float) -> float:
        if step < top:
            return _half_cosine(self.warmup_start, 1.0, step / top)
        if end <= top:  # the warm-up lasts until the end of the training
            return 1.0
        return _half_cosine(1.0, self.final or 0.0, min((step - top) / (end - top), 1.0))


@dataclass(frozen=True, kw_only=True)
class Curve(Decay):
    """A value that rises to a peak and falls: `initial` times the share of a `Decay`.

    Raises:
        ConfigError: a value is out of range, or the curve would reach zero.
    """

    initial: float
    """The peak, and without a warm-up the value at the start. Range: (0, inf). Example: `0.03`."""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if not 0 < self.initial < math.inf:
            raise ConfigError(f"initial={self.initial} lies outside (0, inf)")
        if self.length is None:
            raise ConfigError("length must be given: nothing else says where this curve ends")
        if self.shape != "step" and not self.final:
            raise ConfigError("final must be > 0: this value may not become zero")
        if self.warmup and not self.warmup_start:
            raise ConfigError("warmup_start must be > 0: this value may not be zero")

    def __str__(self) -> str:
        """`0.03 cosine length=90 final=0.1`: for names and tables."""
        return f"{self.initial:g} {super().__str__()}"

    def value(self, step: float, steps_per_epoch: int | None) -> float:
        """The value at `step`."""
        return self.initial * self.share(step, steps_per_epoch)


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


# ------------------------------------------------------------
# Schedules: hyperparameters that change during training (no torch).
#
# Damping, factor decay, kl-clip and both update intervals are a number, a `Milestones`, or any callable
# from the step to a value; all but the intervals may be a `Curve` too.


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
