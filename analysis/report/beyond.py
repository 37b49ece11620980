"""What the study's own runs predict for a world larger than those that were measured."""

from __future__ import annotations

from analysis.cost_model.errors import CostModelError
from analysis.records.study import Study
from analysis.report.answers import listed
from analysis.report.ranking import Place
from analysis.study_prediction.choice import choose, sentence
from analysis.study_prediction.prediction import study_model
from analysis.study_prediction.reading import measured

RANKS = 64
"""What readers ask for; of a study that went further, four times its largest world size."""


def beyond(study: Study, places: list[Place]) -> str:
    """Which arm the study's runs predict to be fastest on a larger world, how fast, and how sure that is.

    Empty for a study of several settings, workloads or sweeps, whose arms do not compare, for one without a
    judged time to the target, and where nothing can be predicted.
    """
    judged = [place for place in places if place.judged]
    if not judged or len({place.setting for place in places}) > 1 or len(study.sweeps) > 1:
        return ""
    most = max(place.world_size for place in judged)
    try:
        model = study_model(measured(study))
        choice = choose(model, RANKS if most < RANKS else 4 * most)
    except CostModelError:
        return ""
    if not choice.to_target:
        return ""
    hosts = (
        "; all ranks were on one host, so links between hosts are left out" if model.measured.one_host else ""
    )
    kept = {candidate.step.arm.name for candidate in choice.candidates}
    unknown = [arm.name for arm in model.measured.arms if arm.name not in kept]
    without = f" Without {listed(unknown)}, whose epochs to the target are not known." if unknown else ""
    return f"Predicted, not measured{hosts}: {sentence(choice)}{without}"
