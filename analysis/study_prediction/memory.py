"""Memory of a rank at world sizes that a study did not measure: what changes is K-FAC's state."""

from __future__ import annotations

import math

from analysis.cost_model.work import Work
from analysis.study_prediction.measured import Arm
from kfac_core.config import KFACConfig


def predicted_peak(arm: Arm, world_size: int, config: KFACConfig | None = None) -> float:
    """Peak bytes of the rank that needs most; NaN if the study recorded no memory.

    The measured peak of the nearest world, with its K-FAC state replaced by the state that the placement
    gives the fullest rank at this world size. Everything else counts as on the nearest world, so with a fixed
    global batch it is too much for larger worlds, whose ranks hold fewer examples.

    Args:
        arm: with measured worlds.
        world_size: to predict.
        config: other settings of K-FAC than the arm's own.
    """
    known = [size for size, world in arm.worlds.items() if not math.isnan(world.peak_bytes)]
    if not known:
        return math.nan
    nearest = min(known, key=lambda size: (abs(math.log2(size / world_size)), -size))
    rest = arm.worlds[nearest].peak_bytes - kfac_state(arm, nearest)
    return rest + kfac_state(arm, world_size, config)


def kfac_state(arm: Arm, world_size: int, config: KFACConfig | None = None) -> float:
    """Bytes of K-FAC's state on the rank that keeps most, as `KFAC.memory` counts them."""
    kinds = Work(arm.setup(world_size, config)).state_bytes.values()
    return float(max((sum(ranks) for ranks in zip(*kinds, strict=True)), default=0))
