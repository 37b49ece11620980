"""Which arm of a study to use at a world size, why, and how sure that is.

Candidates are the study's arms and, for each of its K-FAC arms, the other members of KAISA's family: the same
mathematics with another number of gradient workers, so the same epochs. They are compared by the time to the
target where the study knows the epochs to it, else by the step. Nothing is said about other update intervals
than those of the study's arms: there is no theory of the epochs that staleness costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from analysis.cost_model.arms import described
from analysis.cost_model.errors import CostModelError
from analysis.cost_model.prediction import Seconds
from analysis.study_prediction.bounds import LEVEL
from analysis.study_prediction.measured import Arm
from analysis.study_prediction.memory import predicted_peak
from analysis.study_prediction.prediction import StepPrediction, StudyModel
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
        ran: whether the study has runs of this strategy and fraction, on any world size.
        peak_bytes: memory of the rank with most; NaN if the study recorded none.
    """

    name: str
    step: StepPrediction
    epochs: float | None
    total: Seconds | None
    ran: bool
    peak_bytes: float = math.nan


@dataclass(frozen=True)
class Choice:
    """What to use at a world size.

    Attributes:
        candidates: fastest first.
        to_target: whether they are compared by the time to the target, else by the step.
        sureness: probability that the first is faster than the second; None if there is only one.
        notes: a sentence for every arm that is left out, and for what the epochs rest on.
    """

    world_size: int
    candidates: tuple[Candidate, ...]
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


def choose(
    model: StudyModel, world_size: int, *, only_ran: bool = False, memory_bytes: int | None = None
) -> Choice:
    """The fastest of all candidates, or of the study's arms alone, that fit in `memory_bytes` of a rank.

    Raises:
        CostModelError: nothing can be predicted at this world size, or nothing fits.
    """
    found, left = candidates(model, world_size, only_ran=only_ran)
    if not found:
        raise CostModelError(f"nothing can be predicted at {world_size} ranks: {'; '.join(left)}")
    found, too_big = fitting(found, memory_bytes)
    if not found:
        raise CostModelError(f"nothing fits at {world_size} ranks: {'; '.join(too_big)}")
    left = [*left, *too_big]
    known = [one for one in found if one.total is not None]
    notes = [f"left out: {reason}" for reason in left]
    if known:
        missed = (one.name for one in found if one.total is None)
        notes += [f"left out: {name}: fewer than half of its runs reached the target" for name in missed]
        notes += _about_epochs(known, world_size)
    compared = known or found
    choice = Choice(world_size, tuple(compared), bool(known), None, tuple(notes))
    ordered = sorted(compared, key=lambda one: choice.seconds(one).central)
    sureness = None
    if len(ordered) > 1:
        sureness = faster(choice.seconds(ordered[0]), choice.seconds(ordered[1]))
    return replace(choice, candidates=tuple(ordered), sureness=sureness)


def fitting(found: Sequence[Candidate], memory_bytes: int | None) -> tuple[list[Candidate], list[str]]:
    """The candidates within the memory of a rank, and why others are not.

    Raises:
        CostModelError: there is a limit, and the study recorded no memory.
    """
    if memory_bytes is None:
        return list(found), []
    if any(math.isnan(one.peak_bytes) for one in found):
        raise CostModelError("its runs recorded no memory, so a limit cannot be compared with anything")
    small = [one for one in found if one.peak_bytes <= memory_bytes]
    too_big = [
        f"{one.name}: needs {one.peak_bytes / _GIB:.3g} GiB on a rank, of {memory_bytes / _GIB:.3g} GiB"
        for one in found
        if one.peak_bytes > memory_bytes
    ]
    return small, too_big


def faster(one: Seconds, other: Seconds) -> float:
    """Probability that `one`, the smaller, is: normal logs, bounds as they face each other, errors apart.

    Errors of one study's predictions have causes in common, such as its links, which cancel between two arms.
    Counting them apart is on the safe side.
    """
    gap = math.log(other.central / one.central)
    widths = math.log(one.high / one.central), math.log(other.central / other.low)
    spread = math.hypot(*widths) / _SIDE
    return _NORMAL.cdf(gap / spread) if spread else float(gap > 0)


def _about_epochs(known: Sequence[Candidate], world_size: int) -> Iterator[str]:
    grows = any(one.step.arm.training.scaling == "weak" for one in known)
    if grows and any(world_size not in one.step.arm.epochs for one in known):
        yield (
            "epochs are those of the nearest measured world; with a fixed local batch, more ranks make the "
            "global batch larger, which can cost epochs"
        )


def candidates(
    model: StudyModel, world_size: int, *, only_ran: bool = False
) -> tuple[list[Candidate], list[str]]:
    """All candidates at a world size, and why others are not among them."""
    found: list[Candidate] = []
    left: list[str] = []
    taken: set[tuple[KFACConfig | None, str]] = set()
    for name, fitted in model.arms.items():
        arm = fitted.arm
        try:
            own = model.predict(name, world_size)
        except (CostModelError, PlacementError) as error:
            left.append(f"{name}: {error}")
            continue
        found.append(_candidate(model, own, name, ran=True))
        taken.add((own.config, _recipe(arm)))
    fastest = sorted(found, key=lambda one: (one.total is None, (one.total or one.step.seconds).central))
    for name in [] if only_ran else [one.name for one in fastest]:
        fitted = model.arms[name]
        for config in _family(fitted.arm, world_size):
            key = config, _recipe(fitted.arm)
            if key in taken:
                continue
            taken.add(key)
            try:
                other = model.predict(name, world_size, config)
            except (CostModelError, PlacementError):  # its arm said why
                continue
            found.append(_candidate(model, other, f"{described(config)} (otherwise as {name})", ran=False))
    return found, left


def _recipe(arm: Arm) -> str:
    """What makes two arms the same but for K-FAC's settings."""
    return f"{arm.training!r} {arm.model.shapes if arm.config else arm.name!r}"


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
        steps = epochs * model.measured.examples / arm.training.batch_sizes(step.world_size)[0]
        total = Seconds(*(steps * getattr(step.seconds, bound) for bound in ("low", "central", "high")))
    peak = predicted_peak(arm, step.world_size, step.config)
    return Candidate(name, step, epochs, total, ran, peak)


def sentence(choice: Choice) -> str:
    """The recommendation in one sentence: what, how fast, why, and how sure."""
    best = choice.best
    unit = "to the target" if choice.to_target else "a step"
    parts = [f"At {choice.world_size} ranks use {best.name}{_intervals(best.step.config)}: "]
    parts.append(f"{_spelt(choice.seconds(best))} {unit}")
    parts.append(f", {'as measured' if best.step.measured else f'most of it {_phase(best)}'}")
    against = _first_order(choice)
    if against is not None:
        parts.append(f"; {_against(choice, against)}")
    if len(choice.candidates) > 1:
        parts.append(f"; {_sureness(choice)}")
    return "".join(parts) + "."


def _first_order(choice: Choice) -> Candidate | None:
    """The fastest without K-FAC if the best has it, or the other way round."""
    has_kfac = choice.best.step.config is not None
    return next((one for one in choice.candidates if (one.step.config is not None) != has_kfac), None)


def _against(choice: Choice, other: Candidate) -> str:
    ratio = choice.seconds(other).central / choice.seconds(choice.best).central
    steps = choice.best.step.seconds.central / other.step.seconds.central
    text = f"{other.name} takes {ratio:.3g} times as long"
    if choice.to_target:
        mine, theirs = choice.best.epochs or 0.0, other.epochs or 0.0
        text += (
            f" ({theirs:.3g} epochs instead of {mine:.3g}, of steps that take {1 / steps:.3g} times as long)"
        )
    return text


def _sureness(choice: Choice) -> str:
    second, sureness = choice.candidates[1], choice.sureness or 0.0
    name = second.name
    if sureness >= SURE:
        return f"sure ({sureness:.0%}) to be faster than {name}, the next"
    if sureness >= LIKELY:
        return f"likely ({sureness:.0%}) faster than {name}, the next"
    return f"not sure: {name} could be as fast ({sureness:.0%} for this one), so run both"


def _intervals(config: KFACConfig | None) -> str:
    if config is None:
        return ""
    return f" with F = {config.factor_update_steps} and E = {config.inverse_update_steps}"


def _phase(candidate: Candidate) -> str:
    return str(candidate.step.largest_phase)


def _spelt(seconds: Seconds) -> str:
    factor, unit = (1e3, "ms") if seconds.central < 1 else (1.0, "s")
    low, central, high = (factor * value for value in (seconds.low, seconds.central, seconds.high))
    return f"{central:.3g} {unit} ({low:.3g} to {high:.3g})"
