"""What the study's own runs predict for a world larger than those that were measured."""

from __future__ import annotations

from analysis.cost_model.errors import CostModelError
from analysis.records.study import Study
from analysis.report.answers import MOST_SETTINGS, listed
from analysis.report.ranking import Place
from analysis.study_prediction.choice import choose, sentence
from analysis.study_prediction.prediction import study_model
from analysis.study_prediction.reading import measured

RANKS = 64
"""What readers ask for; of a study that went further, four times its largest world size."""


def beyond(study: Study, places: list[Place]) -> list[str]:
    """Which arm the study's runs predict to be fastest on a larger world, how fast, and how sure that is.

    A sentence for every setting, of at most `MOST_SETTINGS`. None for a study of several sweeps, whose arms
    do not compare, for a setting without a judged time to the target, and where nothing can be predicted.
    """
    settings = list(dict.fromkeys(place.setting for place in places if place.judged))
    if len(study.sweeps) > 1 or len(settings) > MOST_SETTINGS:
        return []
    most = {
        name: max(one.world_size for one in places if one.setting == name and one.judged) for name in settings
    }
    found = [
        _predicted(
            study.only(study.cells["setting"] == name), RANKS if most[name] < RANKS else 4 * most[name]
        )
        for name in settings
    ]
    return [f"{name}: {said}" if name else said for name, said in zip(settings, found, strict=True) if said]


def _predicted(study: Study, ranks: int) -> str:
    try:
        model = study_model(measured(study))
        choice = choose(model, ranks)
    except CostModelError:
        return ""
    if not choice.to_target:
        return ""
    hosts = (
        "; all ranks were on one host, so links between hosts are not in it"
        if model.measured.one_host
        else ""
    )
    kept = {candidate.step.arm.name for candidate in choice.candidates}
    unknown = [arm.name for arm in model.measured.arms if arm.name not in kept]
    without = f" Without {listed(unknown)}, whose epochs to the target are not known." if unknown else ""
    return f"Predicted, not measured{hosts}: {sentence(choice)}{without}"
