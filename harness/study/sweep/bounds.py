"""Settings that are valid alone but not for their run: past its end, out of order, in conflict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from harness.cell import OPTIMIZER_FIELDS, Optimizer, Target, Training, Workload
from harness.workloads import WORKLOADS
from kfac_core.config import STRATEGIES, KFACConfig
from kfac_core.curve import Curve, Decay
from kfac_core.schedule import Milestones, interval_below

Wrong = tuple[str, str]
"""A dotted path, and the rest of the sentence: `("training.kfac_start_epoch", "=9 must be < epochs=5")`."""


class Run(Protocol):
    """What of a cell is compared with the rest of it."""

    @property
    def method(self) -> str: ...
    @property
    def workload(self) -> Workload: ...
    @property
    def target(self) -> Target: ...
    @property
    def training(self) -> Training: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def kfac(self) -> KFACConfig | None: ...


def wrong(run: Run) -> Iterator[Wrong]:
    """Every setting that cannot be meant, the first one first."""
    yield from _name(run)
    yield from _target(run.workload, run.target)
    yield from _training(run.training)
    yield from _optimizer(run.optimizer, run.training)
    if run.kfac is not None:
        yield from _kfac(run.kfac, run.training)


def _name(run: Run) -> Iterator[Wrong]:
    """A method named after a strategy or an optimizer is that one."""
    if run.method in STRATEGIES:
        if run.kfac is None:
            yield (
                "method",
                f"={run.method!r} is a strategy of K-FAC but the method has no kfac section, so it would be "
                f"{run.optimizer.name} alone; write {{name: {run.method}, kfac: {{strategy: {run.method}}}}}",
            )
        elif run.kfac.strategy != run.method:
            yield "method", f"={run.method!r} has strategy={run.kfac.strategy}; give it another name"
    elif run.method in OPTIMIZER_FIELDS and run.method != run.optimizer.name:
        yield (
            "method",
            f"={run.method!r} has optimizer.name={run.optimizer.name}; set optimizer.name: {run.method}, or "
            "give it another name",
        )


def _target(workload: Workload, target: Target) -> Iterator[Wrong]:
    low, high = WORKLOADS[workload.name].metric_range(target.metric)
    if not low < target.value <= high:
        field = "at_least" if target.direction == "higher" else "at_most"
        yield f"target.{field}", f"={target.value:g} must be in ({low:g}, {high:g}], as {target.metric} is"


def _training(training: Training) -> Iterator[Wrong]:
    for field in ("kfac_start_epoch", "evaluate_every_epochs"):
        value = getattr(training, field)
        if value > training.epochs or (field == "kfac_start_epoch" and value == training.epochs):
            sign = "<" if field == "kfac_start_epoch" else "<="
            yield f"training.{field}", f"={value:g} must be {sign} epochs={training.epochs}"


def _optimizer(optimizer: Optimizer, training: Training) -> Iterator[Wrong]:
    epochs = training.epochs
    if optimizer.warmup_epochs > epochs:
        yield "optimizer.warmup_epochs", f"={optimizer.warmup_epochs:g} must be <= epochs={epochs}"
    if optimizer.schedule is not None:
        yield from _rate_schedule(optimizer.schedule, epochs)
    listed = list(optimizer.decay_epochs)
    if listed != sorted(set(listed)):
        yield "optimizer.decay_epochs", f"={listed} must be ascending, each epoch once"
    for epoch in listed:
        if not 0 < epoch < epochs:
            yield "optimizer.decay_epochs", f"={listed} must be > 0 and < epochs={epochs}, got {epoch:g}"
    if listed and optimizer.decay_factor == 1:
        yield "optimizer.decay_factor", "=1 leaves decay_epochs without effect; remove both"
    if optimizer.lr_scaling == "linear" and training.scaling == "strong":
        yield (
            "optimizer.lr_scaling",
            "=linear multiplies lr by world_size, but the global batch stays as it is (global_batch_size); "
            "use local_batch_size, or lr_scaling: none",
        )
    if optimizer.nesterov and "nesterov" in OPTIMIZER_FIELDS[optimizer.name] and not optimizer.momentum:
        yield "optimizer.nesterov", " needs momentum > 0"


def _rate_schedule(schedule: Decay, epochs: int) -> Iterator[Wrong]:
    if schedule.unit == "epochs":
        if schedule.warmup >= epochs:
            yield "optimizer.schedule", f".warmup={schedule.warmup:g} must be < epochs={epochs}"
        if schedule.length is not None and schedule.length > epochs:
            yield "optimizer.schedule", f".length={schedule.length:g} must be <= epochs={epochs}"


def _kfac(config: KFACConfig, training: Training) -> Iterator[Wrong]:
    for field in ("damping", "factor_update_steps", "inverse_update_steps"):
        schedule = getattr(config, field)
        left = training.epochs - training.kfac_start_epoch
        if isinstance(schedule, Curve) and schedule.unit == "epochs" and schedule.warmup >= left:
            yield f"kfac.{field}", f".warmup={schedule.warmup:g} must be < the {left:g} epochs with K-FAC"
        if not isinstance(schedule, Milestones):
            continue
        if schedule.factor == 1:
            yield f"kfac.{field}", f".factor=1 changes nothing; write {field}: {schedule.initial:g}"
        if schedule.unit == "epochs" and schedule.at[0] >= left:
            yield (
                f"kfac.{field}",
                f".at={list(schedule.at)} has no milestone in the {left:g} epochs with K-FAC",
            )
        if field != "damping" and schedule.initial < 1:
            yield f"kfac.{field}", f".initial={schedule.initial:g} must be >= 1 step"
    crossing = interval_below(config.inverse_update_steps, config.factor_update_steps)
    if crossing is not None:
        yield "kfac.inverse_update_steps", f"{crossing}: the same factors would be inverted again"
    if len(set(config.skip)) < len(config.skip):
        yield "kfac.skip", f"={list(config.skip)} names a pattern twice"
