"""A study's arms at any world size: measured where they were measured, predicted elsewhere, with bounds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from analysis.cost_model.errors import CostModelError
from analysis.cost_model.prediction import Seconds
from analysis.study_prediction.bounds import Errors, HeldOut, errors
from analysis.study_prediction.fitted import FittedArm, fit_arm
from analysis.study_prediction.links import Links, fit_links
from analysis.study_prediction.measured import Arm, Measured, at_fraction, same_gradient_exchange
from kfac_core.config import KFACConfig
from kfac_core.errors import PlacementError


@dataclass(frozen=True)
class StepPrediction:
    """Seconds a step of one arm at one world size.

    Attributes:
        config: of K-FAC at this world size; of hybrid_opt, the fraction may be another than the arm's.
        seconds: with bounds of `bounds.LEVEL`, for one run.
        phases: seconds a step by phase, as the laws have them.
        measured: whether the study has runs of this world, so that nothing is predicted.
        doublings: from the nearest measured world.
    """

    arm: Arm
    config: KFACConfig | None
    world_size: int
    seconds: Seconds
    phases: Mapping[str, float]
    measured: bool
    doublings: float

    @property
    def largest_phase(self) -> str:
        """The phase with the largest share of a step."""
        return max(self.phases, key=lambda phase: self.phases[phase])


@dataclass(frozen=True)
class StudyModel:
    """The fitted laws of a study's arms, and how far off they are.

    Attributes:
        stretch: doublings by which the links are faster or slower than those that were measured; they count
            like doublings of the ranks, and nothing is measured then.
    """

    measured: Measured
    links: Links
    arms: Mapping[str, FittedArm]
    errors: Errors
    stretch: float = 0.0

    def at_speed(self, speed: float) -> StudyModel:
        """The same machine with links of another bandwidth, over that of the study's; latency stays."""
        links = self.links.at_speed(speed)
        arms = {name: replace(fitted, links=links) for name, fitted in self.arms.items()}
        return replace(self, links=links, arms=arms, stretch=self.stretch + abs(math.log2(speed)))

    def predict(self, name: str, world_size: int, config: KFACConfig | None = None) -> StepPrediction:
        """One arm at one world size, with its own settings of K-FAC or others.

        Other settings count as one more doubling: the arm's own exchanges were measured, and theirs were not.

        Raises:
            CostModelError: the batch is too small for the world, or its exchanges are unknown.
            PlacementError: the strategy does not support this world size.
        """
        fitted = self.arms[name]
        arm = fitted.arm
        if arm.local_batch_size(world_size) < 1:
            batch = arm.training.global_batch_size
            raise CostModelError(f"a global batch of {batch} has no example for each of {world_size} ranks")
        own = config or at_fraction(arm.config, world_size)
        phases = fitted.phases(world_size, own)
        central = {phase: seconds.central for phase, seconds in phases.items()}
        is_own = own == at_fraction(arm.config, world_size)
        stretch = self.stretch if world_size > 1 else 0.0  # one rank uses no link
        if world_size in arm.worlds and is_own and not stretch:
            seconds = self.errors.measured(arm.worlds[world_size].runs, world_size)
            return StepPrediction(arm, own, world_size, seconds, central, True, 0.0)
        distance = doublings(world_size, arm.worlds) + stretch + (not is_own)
        nearest = min(arm.worlds, key=lambda size: abs(math.log2(size / world_size)))
        runs = len(arm.worlds[nearest].runs)
        seconds = self.errors.predicted(_total(phases), distance, nearest, runs)
        return StepPrediction(arm, own, world_size, seconds, central, False, distance)


def study_model(measured: Measured, links: Links | None = None) -> StudyModel:
    """Fit the laws of a study's arms; without `links`, those too.

    Raises:
        CostModelError: nothing can be fitted.
    """
    sizes = measured.world_sizes
    fitted = _fit(measured, sizes, links)
    return StudyModel(measured, *fitted, errors(measured.arms, held_out(measured, links)))


def held_out(measured: Measured, links: Links | None = None) -> list[HeldOut]:
    """Every measured world but the smallest, predicted from the others, arm by arm.

    The smallest is never predicted downwards: that is not what a prediction is for.
    """
    sizes, found = measured.world_sizes, []
    for left in sizes[1:]:
        others = [size for size in sizes if size != left]
        _, arms = _fit(measured, others, links)
        for name, fitted in arms.items():
            known = [size for size in fitted.arm.worlds if size != left]
            if left not in fitted.arm.worlds or min(known) > left:
                continue
            try:
                predicted = _total(fitted.phases(left)).central
            except CostModelError:  # one rank alone says nothing about exchanges
                continue
            seconds = fitted.arm.worlds[left].seconds
            found.append(HeldOut(name, left, doublings(left, known), seconds, predicted))
    return found


def doublings(world_size: int, known: Collection[int]) -> float:
    """From the nearest known world to this one."""
    return min(abs(math.log2(world_size / size)) for size in known)


def table(
    model: StudyModel, world_sizes: Sequence[int]
) -> tuple[dict[int, dict[str, StepPrediction]], list[str]]:
    """Every arm at every world size that it supports, and why others are left out."""
    found: dict[int, dict[str, StepPrediction]] = {}
    left: dict[str, list[int]] = {}
    for size in world_sizes:
        for name in model.arms:
            try:
                found.setdefault(size, {})[name] = model.predict(name, size)
            except (CostModelError, PlacementError) as error:
                left.setdefault(f"{name}: {error}", []).append(size)
    return {size: arms for size, arms in found.items() if arms}, list(left)


def _fit(measured: Measured, sizes: Sequence[int], links: Links | None) -> tuple[Links, dict[str, FittedArm]]:
    arms = same_gradient_exchange(measured.arms)
    own = links or fit_links(arms, measured.algorithm, sizes)
    fitted = {arm.name: fit_arm(arm, own, sizes) for arm in arms}
    return own, {name: one for name, one in fitted.items() if one is not None}


def _total(phases: Mapping[str, Seconds]) -> Seconds:
    low, central, high = (
        sum(getattr(seconds, bound) for seconds in phases.values()) for bound in ("low", "central", "high")
    )
    return Seconds(low, central, high)
