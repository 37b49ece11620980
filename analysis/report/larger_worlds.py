"""What the study's own runs predict for a world larger than those that were measured."""

from __future__ import annotations

from collections.abc import Iterable

from analysis.figures.drawing import ranks
from analysis.prediction.choice import Choice, choose
from analysis.prediction.errors import PredictionError
from analysis.prediction.prediction import study_model
from analysis.prediction.reading import measured
from analysis.records.study import Study
from analysis.report.answers import MOST_SETTINGS, duration, listed
from analysis.results import Place, Point

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
    return [f"{name}, {said}" if name else said for name, said in zip(settings, found, strict=True) if said]


def _predicted(study: Study, world_size: int, fastest: Point) -> str:
    """What the runs predict for a world size, and whether that pays."""
    try:
        choice = choose(study_model(measured(study)), world_size)
    except PredictionError:
        return ""
    best = choice.best.total
    if not choice.to_target or best is None:
        return ""
    named, bounds = choice.best.name, f"{duration(best.low)} to {duration(best.high)}"
    was = f"on {ranks(fastest.world_size)} {fastest.arm} took {duration(fastest.seconds)}"
    pays = "" if best.central < fastest.seconds else ", so more ranks do not pay"
    said = (
        f"{ranks(world_size)}: {duration(best.central)} ({bounds}) with {named}{_compared(choice)}; "
        f"{was}{pays}"
    )
    kept = {candidate.step.arm.name for candidate in choice.candidates}
    unknown = [arm for arm in dict.fromkeys(study.cells["arm"]) if arm not in kept]
    without = (
        f" Left aside: {listed(unknown)}, whose time to the target cannot be predicted." if unknown else ""
    )
    return f"{said}.{without}"


def _compared(choice: Choice) -> str:
    """The best of the other kind, with or without K-FAC, and whether bounds tell the two apart."""
    best, kind = choice.best.total, choice.best.step.config is None
    other = next((one for one in choice.candidates if (one.step.config is None) != kind), None)
    if best is None or other is None or other.total is None:
        return ""
    apart = "" if best.high < other.total.low else " (too close to call)"
    return f", {duration(other.total.central)} with {other.name}{apart}"


def _fastest(places: Iterable[Place]) -> Point:
    return min((place.fastest for place in places), key=lambda one: one.seconds)
