"""Which arm of a study to use at a world size, why, and how sure that is.

Candidates are the study's arms and, for each of its K-FAC arms, the other members of KAISA's family: the same
mathematics with another number of gradient workers, so the same epochs. They are compared by the time to the
target where the study knows the epochs to it, else by the step. Nothing is said about other update intervals
than those of the study's arms: there is no theory of the epochs that staleness costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

from analysis.prediction.arms import Arm
from analysis.prediction.bounds import LEVEL
from analysis.prediction.errors import PredictionError
from analysis.prediction.laws import Seconds
from analysis.prediction.prediction import StepPrediction, StudyModel
from kfac_core.config import KFACConfig
from kfac_core.errors import PlacementError

SURE, LIKELY = 0.95, 0.8
"""Probabilities of being faster than the next that are called so (our choice)."""

_FAMILY = ("comm_opt", "hybrid_opt", "mem_opt")
_NORMAL = NormalDist()
_GIB = 2**30
_SIDE = _NORMAL.inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        name: the arm, or the strategy that an arm would have instead.
        step: seconds a step.
        epochs: to the target; None if the study does not know them.
        total: seconds to the target with the step's bounds; None without epochs.
        ran: whether it is an arm of the study.
        peak_bytes: memory of the rank with most; NaN if the study recorded none.
    """

    name: str
    step: StepPrediction
    epochs: float | None
    total: Seconds | None
    ran: bool
    peak_bytes: float


@dataclass(frozen=True)
class Choice:
    """What to use at a world size.

    Attributes:
        candidates: fastest first.
        others: whose epochs to the target are not known, while those of the candidates are.
        to_target: whether they are compared by the time to the target, else by the step.
        sureness: probability that the first is faster than the second; None if there is only one.
        notes: a sentence for every arm that is left out, and for what the epochs rest on.
    """

    world_size: int
    candidates: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    to_target: bool
    sureness: float | None
    notes: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        """The fastest."""
        return self.candidates[0]

    def seconds(self, candidate: Candidate) -> Seconds:
        """What candidates are compared by."""
        return candidate.total if self.to_target and candidate.total is not None else candidate.step.seconds


def choose(model: StudyModel, world_size: int, memory_bytes: int | None = None) -> Choice:
    """The fastest of all candidates that fit in `memory_bytes` of a rank.

    Raises:
        PredictionError: nothing can be predicted at this world size, or nothing fits.
    """
    found, left = _candidates(model, world_size)
    if not found:
        raise PredictionError(f"nothing can be predicted at {world_size} ranks: {'; '.join(left)}")
    if memory_bytes is not None:
        too_big = [_too_big(one, memory_bytes) for one in found if not one.peak_bytes <= memory_bytes]
        found = [one for one in found if one.peak_bytes <= memory_bytes]
        if not found:
            raise PredictionError(f"nothing fits at {world_size} ranks: {'; '.join(too_big)}")
        left = [*left, *too_big]
    known = [one for one in found if one.total is not None]
    others = tuple(one for one in found if known and one.total is None)
    left += [f"{one.name}: fewer than half of its runs reached the target" for one in others]
    notes = [*(f"left out: {reason}" for reason in left), *_about_epochs(known, world_size)]
    choice = Choice(world_size, (), others, bool(known), None, tuple(notes))
    ordered = sorted(known or found, key=lambda one: choice.seconds(one).central)
    sureness = None
    if len(ordered) > 1:
        sureness = faster(choice.seconds(ordered[0]), choice.seconds(ordered[1]))
    return replace(choice, candidates=tuple(ordered), sureness=sureness)


def _too_big(one: Candidate, memory_bytes: int) -> str:
    if math.isnan(one.peak_bytes):
        raise PredictionError("its runs recorded no memory, so a limit cannot be compared with anything")
    return f"{one.name}: needs {one.peak_bytes / _GIB:.3g} GiB on a rank, of {memory_bytes / _GIB:.3g} GiB"


def faster(one: Seconds, other: Seconds) -> float:
    """Probability that `one`, the smaller, is: normal logs, bounds as they face each other, errors apart.

    Errors of one study's predictions have causes in common, such as its links, which cancel between two arms.
    Counting them apart is on the safe side.
    """
    gap = math.log(other.central / one.central)
    widths = math.log(one.high / one.central), math.log(other.central / other.low)
    spread = math.hypot(*widths) / _SIDE
    return _NORMAL.cdf(gap / spread) if spread else float(gap > 0)


def _about_epochs(known: list[Candidate], world_size: int) -> Iterator[str]:
    grows = any(one.step.arm.training.scaling == "weak" for one in known)
    if grows and any(world_size not in one.step.arm.epochs for one in known):
        yield (
            "epochs are those of the nearest measured world; with a fixed local batch, more ranks make the "
            "global batch larger, which can cost epochs"
        )


def _candidates(model: StudyModel, world_size: int) -> tuple[list[Candidate], list[str]]:
    """All candidates at a world size, and why others are not among them."""
    found: list[Candidate] = []
    left: list[str] = []
    taken: set[tuple[KFACConfig | None, str]] = set()
    for name, fitted in model.arms.items():
        try:
            own = model.predict(name, world_size)
        except (PredictionError, PlacementError) as error:
            left.append(f"{name}: {error}")
            continue
        found.append(_candidate(model, own, name, ran=True))
        taken.add((own.config, _recipe(fitted.arm)))
    fastest = sorted(found, key=lambda one: (one.total is None, (one.total or one.step.seconds).central))
    for name in [one.name for one in fastest]:
        arm = model.arms[name].arm
        for config in _family(arm, world_size):
            if (config, _recipe(arm)) in taken:
                continue
            taken.add((config, _recipe(arm)))
            try:
                other = model.predict(name, world_size, config)
            except (PredictionError, PlacementError):  # its arm said why
                continue
            fraction = f" at fraction {config.grad_worker_fraction:g}" if config.grad_worker_fraction else ""
            called = f"{config.strategy}{fraction} (otherwise as {name})"
            found.append(_candidate(model, other, called, ran=False))
    return found, left


def _recipe(arm: Arm) -> str:
    """What makes two arms the same but for K-FAC's settings."""
    return f"{arm.training!r} {arm.network.shapes if arm.config else arm.name!r}"


def _family(arm: Arm, world_size: int) -> Iterator[KFACConfig]:
    """The arm's settings with every number of gradient workers."""
    if arm.config is None or arm.config.strategy not in _FAMILY:
        return
    for workers in (m for m in range(1, world_size + 1) if world_size % m == 0):
        if workers in (1, world_size):
            strategy, fraction = ("mem_opt" if workers == 1 else "comm_opt"), None
        else:
            strategy, fraction = "hybrid_opt", workers / world_size
        yield replace(arm.config, strategy=strategy, grad_worker_fraction=fraction)


def _candidate(model: StudyModel, step: StepPrediction, name: str, *, ran: bool) -> Candidate:
    arm = step.arm
    epochs = arm.epochs_at(step.world_size)
    total = None
    if epochs is not None and model.measured.examples:
        batch = arm.training.batch_sizes(step.world_size)[0]
        total = step.seconds * (epochs * model.measured.examples / batch)
    peak = model.arms[arm.name].peak_bytes(step.world_size, step.config)
    return Candidate(name, step, epochs, total, ran, peak)


def sentence(choice: Choice) -> str:
    """The recommendation in one sentence: what, how fast, why, and how sure.

    A step alone says nothing for an arm without K-FAC, whose step is always faster: where the epochs are not
    known, the fastest K-FAC arm is named, with the share of the other's epochs below which it pays.
    """
    own = list(choice.candidates)
    if not choice.to_target:
        own = [one for one in own if one.step.config is not None] or own
    best, has_kfac = own[0], own[0].step.config is not None
    step = f"the fastest step{' with K-FAC' if has_kfac else ''} is that of"
    unit = " to the target" if choice.to_target else ""
    why = "as measured" if best.step.measured else f"most of it {best.step.largest_phase}"
    parts = [
        f"At {choice.world_size} ranks {'use' if choice.to_target else step} {best.name}"
        f"{_intervals(best.step.config)}: {_spelt(choice.seconds(best))}{unit}, {why}"
    ]
    other = next((one for one in choice.candidates if (one.step.config is not None) != has_kfac), None)
    if other is not None:
        parts.append(_against(choice, best, other))
    if len(own) > 1:
        sureness = faster(choice.seconds(best), choice.seconds(own[1]))
        parts.append(_sureness(own[1].name, sureness))
    return "; ".join(parts) + "."


def _against(choice: Choice, best: Candidate, other: Candidate) -> str:
    """The fastest without K-FAC if the best has it, or the other way round."""
    steps = other.step.seconds.central / best.step.seconds.central
    if not choice.to_target:
        return f"it pays if it needs less than {steps:.2g} of {other.name}'s epochs"
    ratio = choice.seconds(other).central / choice.seconds(best).central
    return (
        f"{other.name} takes {ratio:.3g} times as long ({other.epochs or 0:.3g} epochs instead of "
        f"{best.epochs or 0:.3g}, of steps that take {steps:.3g} times as long)"
    )


def _sureness(second: str, sureness: float) -> str:
    if sureness >= SURE:
        return f"sure ({sureness:.0%}) to be faster than {second}, the next"
    if sureness >= LIKELY:
        return f"likely ({sureness:.0%}) faster than {second}, the next"
    return f"not sure: {second} could be as fast ({sureness:.0%} for this one), so run both"


def _intervals(config: KFACConfig | None) -> str:
    if config is None:
        return ""
    return f" with F = {config.factor_update_steps} and E = {config.inverse_update_steps}"


def _spelt(seconds: Seconds) -> str:
    factor, unit = (1e3, "ms") if seconds.central < 1 else (1.0, "s")
    low, central, high = (factor * value for value in (seconds.low, seconds.central, seconds.high))
    return f"{central:.3g} {unit} ({low:.3g} to {high:.3g})"
