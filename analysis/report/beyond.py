"""What the study's own runs predict for a world larger than those that were measured."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.cost_model.errors import CostModelError
from analysis.figures.drawing import ranks
from analysis.records.study import Study
from analysis.report.answers import MOST_SETTINGS, duration, listed
from analysis.report.ranking import Place, Point
from analysis.study_prediction.choice import Choice, choose, sentence
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
    best = {
        name: _fastest([one for one in places if one.setting == name and one.judged]) for name in settings
    }
    found = [
        _predicted(
            study.only(study.cells["setting"] == name),
            RANKS if most[name] < RANKS else 4 * most[name],
            best[name],
        )
        for name in settings
    ]
    return [f"{name}: {said}" if name else said for name, said in zip(settings, found, strict=True) if said]


def _predicted(study: Study, world_size: int, fastest: Point) -> str:
    try:
        model = study_model(measured(study))
        choice = choose(model, world_size)
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
    remarks = f"{_against_first_order(choice)}{without}{_pays(choice, fastest)}"
    return f"Predicted, not measured{hosts}: {sentence(choice)}{remarks}"


def _fastest(places: Sequence[Place]) -> Point:
    return min((place.fastest for place in places), key=lambda one: one.seconds)


def _against_first_order(choice: Choice) -> str:
    """Whether the bounds tell the best from the best of the other kind, with or without K-FAC."""
    best, kind = choice.best, choice.best.step.config is None
    other = next((one for one in choice.candidates if (one.step.config is None) != kind), None)
    if other is None or best.total is None or other.total is None:
        return ""
    apart = best.total.high < other.total.central
    return "" if apart else f" The bounds do not tell {best.name} from {other.name}."


def _pays(choice: Choice, fastest: Point) -> str:
    total = choice.seconds(choice.best).central
    if total <= fastest.seconds:
        return ""
    what = f"{fastest.arm} on {ranks(fastest.world_size)}, {duration(fastest.seconds)}"
    return f" More ranks do not pay: the fastest measured is {what}."
