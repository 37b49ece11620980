"""The chart at the top of the report: a bar for the time to the target of every point, with its runs.

It is part of the page, so that its text keeps its size on a phone; a bar and its dots are a drawing as wide
as the page allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.figures.drawing import ranks
from analysis.report.answers import duration, short_name
from analysis.results import Place, Point

MOST_BARS = 24
"""Most bars; of a larger study, the largest world sizes are shown, with fewer arms each."""

MOST_ARMS = 8
"""Most arms of a place; the first-order arm is always among them."""


@dataclass(frozen=True)
class Bar:
    """One arm.

    Attributes:
        percent: length, of the drawing's width; 0 if the median run missed the target.
        value: what the bar shows, in words.
        judged: whether there was a CPU for every rank.
        dots: of every run, place in percent and whether it reached the target.
        open: place of the earliest run that missed, from where its time is unknown; empty if none did.
    """

    arm: str
    percent: str
    value: str
    is_baseline: bool
    judged: bool
    dots: tuple[tuple[str, bool], ...]
    open: str


@dataclass(frozen=True)
class Chart:
    """The bars by world size, and what to say to somebody who does not see them.

    Attributes:
        left_out: how many points have no bar.
        missed: whether any run missed its target.
        based: whether the bar of a first-order arm is among them.
        unjudged: whether any bar is not judged.
    """

    groups: tuple[tuple[str, tuple[Bar, ...]], ...] = ()
    text: str = ""
    left_out: int = 0
    missed: bool = False
    based: bool = False
    unjudged: bool = False


def chart(places: Sequence[Place]) -> Chart:
    """The chart of a study; empty if no run reached its target."""
    chosen = _chosen(places)
    shown = [(place, _fastest(place)) for place in chosen]
    known = [seconds for _, some in shown for one in some for seconds in _finite(one)]
    if not known:
        return Chart()
    scale = 97 / max(known)  # the last dot is whole
    groups = tuple((_heading(place), tuple(_bar(one, scale) for one in some)) for place, some in shown)
    text = "; ".join(
        f"{heading}: {', '.join(f'{bar.arm} {bar.value}' for bar in bars)}" for heading, bars in groups
    )
    count = sum(len(some) for _, some in shown)
    return Chart(
        groups, f"Bars of the median time to the target. {text}.",
        left_out=sum(len(place.points) for place in places) - count,
        missed=any(not reached for _, some in shown for one in some for _, reached in one.each),
        based=any(one.is_baseline and math.isfinite(one.seconds) for _, some in shown for one in some),
        unjudged=any(one.oversubscribed for _, some in shown for one in some),
    )  # fmt: skip


def _chosen(places: Sequence[Place]) -> list[Place]:
    kept: list[Place] = []
    bars = 0
    for place in sorted(places, key=lambda one: (not one.judged, -one.world_size, one.setting)):
        bars += min(len(place.points), MOST_ARMS)
        if kept and bars > MOST_BARS:
            break
        kept.append(place)
    return [place for place in places if place in kept]


def _fastest(place: Place) -> list[Point]:
    first = list(place.points[:MOST_ARMS])
    base = place.baseline
    return first if base is None or base in first else [*first[:-1], base]


def _finite(point: Point) -> list[float]:
    return [seconds for seconds in (*(one for one, _ in point.each), point.seconds) if math.isfinite(seconds)]


def _heading(place: Place) -> str:
    star = "*" if place.fastest.oversubscribed else ""
    return f"{ranks(place.world_size)}{star}{f', {place.setting}' if place.setting else ''}"


def _bar(point: Point, scale: float) -> Bar:
    reached = math.isfinite(point.seconds)
    misses = f", {point.runs - point.reached} of {point.runs} missed" if point.reached < point.runs else ""
    stopped = [seconds for seconds, done in point.each if not done and math.isfinite(seconds)]
    return Bar(
        short_name(point.arm, point.setting),
        f"{point.seconds * scale:.2f}" if reached else "0",
        f"{duration(point.seconds)}{misses}",
        point.is_baseline,
        not point.oversubscribed,
        tuple((f"{one * scale:.2f}", done) for one, done in point.each if math.isfinite(one)),
        f"{min(stopped) * scale:.2f}" if stopped else "",
    )
