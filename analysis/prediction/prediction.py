"""A study's arms at any world size: measured where they were measured, predicted elsewhere, with bounds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from analysis.prediction.arms import Arm, Measured, at_fraction, same_gradient_exchange
from analysis.prediction.bounds import Errors, HeldOut, errors
from analysis.prediction.errors import PredictionError
from analysis.prediction.fitted import FittedArm, fit_arm
from analysis.prediction.laws import Seconds
from analysis.prediction.links import Links, fit_links
from kfac_core.config import KFACConfig


@dataclass(frozen=True)
class StepPrediction:
    """Seconds a step of one arm at one world size.

    Attributes:
        config: of K-FAC at this world size; of hybrid_opt, the fraction may be another than the arm's.
        seconds: with bounds of `bounds.LEVEL`, for one run.
        phases: seconds a step by phase, as the laws have them.
        measured: whether the study has runs of this world, so that nothing is predicted.
    """

    arm: Arm
    config: KFACConfig | None
    world_size: int
    seconds: Seconds
    phases: Mapping[str, float]
    measured: bool

    @property
    def largest_phase(self) -> str:
        """The phase with the largest share of a step."""
        return str(max(self.phases, key=lambda phase: self.phases[phase]))


@dataclass(frozen=True)
class StudyModel:
    """The fitted laws of a study's arms, and how far off they are."""

    measured: Measured
    links: Links
    arms: Mapping[str, FittedArm]
    errors: Errors

    def predict(self, name: str, world_size: int, config: KFACConfig | None = None) -> StepPrediction:
        """One arm at one world size, with its own settings of K-FAC or others.

        Other settings count as one more doubling: the arm's own exchanges were measured, and theirs were not.

        Raises:
            PredictionError: the batch is too small for the world, or its exchanges are unknown.
            PlacementError: the strategy does not support this world size.
        """
        fitted = self.arms[name]
        arm = fitted.arm
        if arm.local_batch_size(world_size) < 1:
            batch = arm.training.global_batch_size
            raise PredictionError(f"a global batch of {batch} has no example for each of {world_size} ranks")
        own = config or at_fraction(arm.config, world_size)
        phases = fitted.phases(world_size, own)
        central = {phase: seconds.central for phase, seconds in phases.items()}
        is_own = own == at_fraction(arm.config, world_size)
        if world_size in arm.worlds and is_own:
            seconds = self.errors.measured(arm.worlds[world_size].runs, world_size)
            return StepPrediction(arm, own, world_size, seconds, central, True)
        distance = doublings(world_size, fitted.worlds) + (not is_own)
        nearest = min(fitted.worlds, key=lambda size: abs(math.log2(size / world_size)))
        runs = len(arm.worlds[nearest].runs) if arm.worlds else 1
        seconds = self.errors.predicted(Seconds.sum(phases.values()), distance, nearest, runs)
        return StepPrediction(arm, own, world_size, seconds, central, False)


def study_model(measured: Measured, links: Links | None = None) -> StudyModel:
    """Fit the laws of a study's arms; without `links`, those too.

    Raises:
        PredictionError: nothing can be fitted.
    """
    fitted = _fit(measured, measured.world_sizes, links)
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
                predicted = Seconds.sum(fitted.phases(left).values()).central
            except PredictionError:  # one rank alone says nothing about exchanges
                continue
            seconds = fitted.arm.worlds[left].seconds
            found.append(HeldOut(name, left, doublings(left, known), seconds, predicted))
    return found


def doublings(world_size: int, known: Collection[int]) -> float:
    """From the nearest known world to this one."""
    return min(abs(math.log2(world_size / size)) for size in known)


def _fit(measured: Measured, sizes: Sequence[int], links: Links | None) -> tuple[Links, dict[str, FittedArm]]:
    arms = same_gradient_exchange(measured.arms)
    own = links or fit_links(arms, measured.algorithm, sizes)
    fitted = {arm.name: fit_arm(arm, own, sizes) for arm in arms}
    return own, {name: one for name, one in fitted.items() if one is not None}
