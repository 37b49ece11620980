"""The report's answers in plain language: which arm was fastest, how sure that is, and what to use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from analysis.comparisons import Comparison
from analysis.figures.drawing import ranks
from analysis.results import Place, Results
from analysis.statistics.power import FEWEST_RUNS, decidable, repeats_for

MOST_SETTINGS = 3
"""Most settings of which the headline names the fastest arms; of more it counts them."""

PREDICT = "kronscale predict --from SWEEP --world-size N"

ROUNDS_TO_EQUAL = 0.005
"""Ratios that differ less from 1 are given as equal: they round to it."""


def headline(places: Sequence[Place]) -> str:
    """Which arm was fastest where, and whether that is more than chance; empty without scored runs."""
    judged = [place for place in places if place.judged]
    if not judged:
        return "" if not places else _nothing_judged(places)
    settings = list(dict.fromkeys(place.setting for place in judged))
    if len(settings) > MOST_SETTINGS:
        counts: dict[str, int] = {}
        for place in judged:
            name = short_name(place.fastest.arm, place.setting)
            counts[name] = counts.get(name, 0) + 1
        ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
        told = ", ".join(f"{arm} at {count}" for arm, count in ordered[:MOST_SETTINGS])
        parts = [f"Of {len(judged)} settings and world sizes, fastest were {told}."]
    else:
        parts = [_winners([place for place in judged if place.setting == setting]) for setting in settings]
    return " ".join([*parts, _sure(judged)])


def answers(places: Sequence[Place], differed: Mapping[tuple[str, int], float] | None = None) -> list[str]:
    """A sentence or two on every setting and world size.

    Args:
        places: of the study.
        differed: by setting and world size, how many times as long the same work took in the slowest arm as
            in the fastest.
    """
    return [f"{_answer(place, _family(places))}{_of_the_machine(place, differed or {})}" for place in places]


def recommendation(shown: Results) -> list[str]:
    """What to use of what was measured: a sentence for every setting."""
    places, best = shown.places, shown.best
    if not best:
        return _nothing_advised(places)
    lines = [_advice(place, _family(places)) for place in best[: 2 * MOST_SETTINGS]]
    if len(best) > len(lines):
        lines.append(f"{len(best) - len(lines)} more settings: see the table of times.")
    return lines


def unmeasured(places: Sequence[Place], command: str = PREDICT) -> str:
    """Beyond which world size nothing is known, and the command that predicts; empty if none is judged."""
    judged = [place.world_size for place in places if place.judged]
    if not judged:
        return ""
    return f"{_measured(places, max(judged))} For other world sizes, `{command}` predicts times with bounds."


def short_name(arm: str, setting: str) -> str:
    """The arm's name without the setting, where a sentence or a heading has that already."""
    return arm.removesuffix(setting).strip() or arm


def duration(seconds: float) -> str:
    """`12.3 s`, `4.5 min`, `3.2 h`, `not reached`, or a dash for what is not known."""
    if math.isnan(seconds):
        return "–"
    if not math.isfinite(seconds):
        return "not reached"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 120 else f"{seconds:.3g} s"


def _family(places: Iterable[Place]) -> int:
    """How many comparisons share Holm's correction."""
    of_points = (point.against for place in places for point in place.points)
    return sum(one is not None and not one.oversubscribed and not one.refused for one in of_points)


def _winners(places: Sequence[Place]) -> str:
    """Such as `sgd was fastest on 2 and 4 ranks, dp_kfac on 8 ranks`, of one setting."""
    sizes: dict[str, list[int]] = {}
    for place in places:
        sizes.setdefault(short_name(place.fastest.arm, place.setting), []).append(place.world_size)
    told = [
        f"{arm} {'' if number else 'was fastest '}on {listed(map(str, found))} "
        f"rank{'' if found == [1] else 's'}"
        for number, (arm, found) in enumerate(sizes.items())
    ]
    setting = places[0].setting
    return f"{f'With {setting} ' if setting else ''}{', '.join(told)}."


def _sure(judged: Sequence[Place]) -> str:
    compared = [(place, one) for place in judged if (one := _pair(place)) is not None]
    pairs = [one for _, one in compared]
    decided = sum(one.verdict in ("faster", "slower") for one in pairs)
    if not pairs:
        return "There is no first-order arm to compare with, so there is nothing to claim."
    if decided == len(pairs):
        others = {short_name(_other(place, one), place.setting) for place, one in compared}
        of = f" from {others.pop()}" if len(others) == 1 else ""
        if decided == 1:
            return f"The difference{of} is significant."
        return f"All these differences{of} are significant."
    if decided:
        return f"{decided} of {len(pairs)} of these differences are significant."
    return _nothing_sure(pairs)


def _nothing_sure(pairs: Sequence[Comparison]) -> str:
    most = max(one.speedup.n for one in pairs)
    if most < FEWEST_RUNS:
        return f"{_count(most, 'run')} of each arm: no claim."
    if all(one.refused for one in pairs):
        return "No claim: none of these differences can be judged."
    return "No claim: none of these differences is significant."


def _nothing_judged(places: Sequence[Place]) -> str:
    if all(place.fastest.oversubscribed for place in places):
        return "No arm is called the fastest: every world size had more ranks than CPUs."
    where = " where there were CPUs enough" if any(place.fastest.oversubscribed for place in places) else ""
    return f"No arm is called the fastest: no arm's median run reached the target{where}."


def _nothing_advised(places: Sequence[Place]) -> list[str]:
    """What to change so that a study without a fastest arm has one; nothing about a study without runs."""
    if not places:
        return []
    start = "These runs recommend no arm, for no world size"
    if all(place.fastest.oversubscribed for place in places):
        return [f"{start}: run them where each rank has a CPU."]
    return [f"{start}: train for more epochs, or choose a target that the learning curves come to."]


def _pair(place: Place) -> Comparison | None:
    """The comparison that decides who is fastest: of the fastest arm, or of the next one with it."""
    if place.fastest.against is not None:
        return place.fastest.against
    if not place.fastest.is_baseline:
        return None
    return next((point.against for point in place.points if point.against is not None), None)


def _answer(place: Place, family: int) -> str:
    where = f"{ranks(place.world_size).capitalize()}{f' ({place.setting})' if place.setting else ''}"
    best = place.fastest
    if best.oversubscribed:
        return f"{where}: more ranks than CPUs, so seconds are not judged{_fewest_epochs(place)}."
    if not math.isfinite(best.seconds):
        counts = (
            f"{one.reached} of {one.runs} of {short_name(one.arm, place.setting)}" for one in place.points[:4]
        )
        reached = ", ".join(counts)
        return f"{where}: no arm's median run reached the target (runs that did: {reached})."
    name = partial(short_name, setting=place.setting)
    start = f"{where}: {name(best.arm)} took {duration(best.seconds)} to the target"
    if len(place.points) == 1:
        return f"{start}; no other arm was scored there."
    pair = _pair(place)
    if pair is None:
        after = place.points[1]
        return (
            f"{start}, {name(after.arm)} {duration(after.seconds)}. No first-order arm ran there: no claim."
        )
    other = _other(place, pair)
    missed = any(point.arm == other and math.isinf(point.seconds) for point in place.points)
    then = f"the median run of {name(other)} did not reach it"
    if not missed:
        then = _longer(pair, best.arm, name(other))
    made_of = _made_of(pair, name(pair.arm), name(pair.baseline))
    return f"{start}, {then}; {made_of}. {_certainty(pair, family)}{_next(place, other)}"


def _other(place: Place, pair: Comparison) -> str:
    """The arm of a pair that is not the fastest."""
    return pair.baseline if pair.arm == place.fastest.arm else pair.arm


def _next(place: Place, other: str) -> str:
    """The second arm, where the fastest one was compared with another one."""
    second = place.points[1]
    if second.arm == other or second.oversubscribed or not math.isfinite(second.seconds):
        return ""
    names = f"{short_name(second.arm, place.setting)}, {duration(second.seconds)}"
    return f" Next is {names}; whether these two differ is not tested."


def _longer(pair: Comparison, best: str, other: str) -> str:
    if not pair.speedup.is_ratio:
        return f"how much longer {other} took is not known"
    return f"{other} {_times(pair.speedup.estimate ** (1 if pair.arm == best else -1))}"


def _times(factor: float) -> str:
    return "as long" if abs(factor - 1) < ROUNDS_TO_EQUAL else f"{factor:.3g} times as long"


def _made_of(pair: Comparison, arm: str, baseline: str) -> str:
    """What the difference consists of, from the side of the arm that is not the baseline."""
    fewer, cheaper = pair.fewer_epochs.estimate, pair.cheaper_epochs.estimate
    if not pair.cheaper_epochs.is_ratio:
        return "what it consists of is not known"
    cost = _times(1 / cheaper)
    if not pair.fewer_epochs.is_ratio:
        return f"an epoch of {arm} takes {cost}" + (f" as one of {baseline}" if cost == "as long" else "")
    if abs(fewer - 1) < ROUNDS_TO_EQUAL:
        epochs = "as many epochs as"
    else:
        epochs = (
            f"{fewer:.3g} times fewer epochs than" if fewer > 1 else f"{1 / fewer:.3g} times more epochs than"
        )
    joint = "and" if (fewer >= 1) == (cheaper >= 1) else "but"
    return f"{arm} needs {epochs} {baseline}, {joint} each takes {cost}"


def _certainty(pair: Comparison, family: int) -> str:
    if pair.verdict in ("faster", "slower"):
        caution = f"; {pair.caution}" if pair.caution else ""
        return f"Significant (p = {pair.holm_p:.2g} after Holm{caution})."
    if pair.refused:
        return f"No claim: {pair.refused}."
    runs = pair.speedup.n
    if runs < FEWEST_RUNS or decidable(runs) < family:
        return (
            f"No claim: {_count(runs, 'run').lower()} of each arm; a verdict needs at least "
            f"{repeats_for(max(family, 1))}."
        )
    return "No claim: the difference is not significant at 5 %."


def _fewest_epochs(place: Place) -> str:
    known = [point for point in place.points if math.isfinite(point.epochs)]
    if not known:
        return ""
    best = min(known, key=lambda point: (point.epochs, point.arm))
    base = place.baseline
    beside = (
        f" ({short_name(base.arm, place.setting)}: {base.epochs:.3g})"
        if base in known and base is not best and base
        else ""
    )
    return f"; fewest epochs: {short_name(best.arm, place.setting)} with {best.epochs:.3g}{beside}"


def _advice(place: Place, family: int) -> str:
    best, pair = place.fastest, _pair(place)
    under = f" ({place.setting})" if place.setting else ""
    where = f"{ranks(place.world_size)}{under}"
    what = f"{short_name(best.arm, place.setting)} on {where}, {duration(best.seconds)} to the target"
    if pair is None:
        return f"Fastest of what was run: {what}. Without a first-order arm nobody knows whether K-FAC pays."
    others = [point.against for point in place.points if point.against is not None]
    if best.is_baseline:
        if all(one.verdict == "slower" for one in others):
            return f"Use {what}; every other arm there was significantly slower."
        return f"Use {what}; it needs no K-FAC, and no arm was shown to be faster."
    base = short_name(pair.baseline, place.setting)
    if pair.verdict == "faster":
        return f"Use {what}; it was significantly faster than {base} there."
    repeats = repeats_for(max(family, 1))
    more = "" if pair.speedup.n >= repeats else f"; a verdict needs at least {repeats} runs of each arm"
    why = f": {pair.refused}" if pair.refused else more
    return f"Fastest was {what}, but that it beats {base} is not shown{why}."


def _of_the_machine(place: Place, differed: Mapping[tuple[str, int], float]) -> str:
    """A remark where the difference is no larger than that of the same work in different arms."""
    pair, machine = _pair(place), differed.get((place.setting, place.world_size), 1.0)
    if pair is None or not pair.speedup.is_ratio:
        return ""
    factor = max(pair.speedup.estimate, 1 / pair.speedup.estimate)
    if factor > machine or factor - 1 < ROUNDS_TO_EQUAL:
        return ""
    return f" Equal work alone differed by {machine:.2f} times there, so the machine may be all of it."


def _measured(places: Sequence[Place], most: int) -> str:
    """Beyond which world size nothing was measured, or nothing that counts."""
    larger = max((place.world_size for place in places), default=most)
    if larger == most:
        return f"Nothing beyond {ranks(most)} was measured."
    beyond = [place for place in places if place.world_size > most]
    crowded = all(place.fastest.oversubscribed for place in beyond)
    why = "there were more ranks than CPUs" if crowded else "no arm's median run reached the target"
    return f"Nothing beyond {ranks(most)} is judged: on up to {larger} {why}."


def _count(number: int, what: str) -> str:
    words = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
    return f"{words[number] if number < len(words) else number} {what}{'' if number == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last
