"""Findings of a study in sentences: significant differences with their sizes, and caveats."""

from __future__ import annotations

import pandas as pd

from analysis.comparisons import Comparison, points
from analysis.completeness import NOT_STARTED, completed
from analysis.figures.drawing import ranks
from analysis.records.study import Study
from analysis.report.tables import spell_ratio
from analysis.results import results
from analysis.statistics.intervals import Interval
from analysis.statistics.power import decidable, repeats_for
from analysis.tuning import has_trials


def findings(study: Study) -> list[str]:
    """One sentence per significant comparison, then one for all others."""
    shown = results(study)
    if shown.scored.empty:
        trained = int(completed(study.cells).sum())
        if not trained:
            return [_nothing_to_score(study)]
        return [
            f"The rule ({study.scoring.about}) cannot score any of {trained} runs: they ended when they "
            "first reached their target, before the evaluations in a row that it requires."
        ]
    found = shown.comparisons
    if not found:
        return [_why_nothing_is_compared(study)]
    decided = [one for one in found.values() if one.verdict in ("faster", "slower")]
    undecided = [one for one in found.values() if one.verdict == "undecided"]
    if all(one.oversubscribed for one in found.values()):
        return ["Nothing is judged: every comparable world size had more ranks than CPUs."]
    sentences = [_decided(one) for one in sorted(decided, key=lambda one: -one.speedup.estimate)]
    if undecided:
        sentences.append(_undecided(undecided, len(decided) + len(undecided)))
    refused = [one for one in found.values() if one.refused and not one.oversubscribed]
    return sentences + [
        f"Not judged: {one.arm} on {ranks(one.world_size)} ({spell_ratio(one.speedup)}): {one.refused}."
        for one in sorted(refused, key=lambda one: (one.world_size, one.arm))
    ]


def cautions(study: Study) -> list[str]:
    """Caveats: cells without data, misses, oversubscribed CPUs, a missing baseline or seed."""
    notes: list[str] = []
    notes += filter(None, [resumed_note(study.cells), moved_note(study.cells)])
    states = study.cells["state"].value_counts().sort_index()
    unfinished = ", ".join(f"{n} {state}" for state, n in states.items() if state != "COMPLETED")
    if unfinished:
        notes.append(f"Cells that did not complete: {unfinished}.")
    shown = results(study)
    notes += shown.left_out.sentences()
    scored = shown.scored
    missed = int((~scored["reached"]).sum())
    if missed:
        notes.append(
            f"{missed} of {len(scored)} runs missed their target ({_misses(scored)}). They count as slower "
            "than all that reached it; no claim rests on that where they stopped sooner."
        )
    if scored["oversubscribed"].any():
        notes.append(
            "World sizes marked * had more ranks than CPUs: read their epochs; their seconds are not judged."
        )
    if len(study.cells) and study.cells["strategy"].notna().all() and not has_trials(study):
        notes.append("There is no first-order arm, such as SGD, to compare with.")
    seeds = scored.groupby(["arm", "world_size"])["run"].nunique()
    if len(seeds) and seeds.min() != seeds.max():
        notes.append(f"Points rest on {seeds.min()} to {seeds.max()} runs: some seeds are missing.")
    return notes


def _misses(scored: pd.DataFrame) -> str:
    """`sgd on 1 rank: 4 of 4 in 14 epochs`, of every point with misses; of many the first four."""
    told = []
    for arm, size, runs in points(scored):
        misses = runs[~runs["reached"]]
        if len(misses):
            told.append(
                f"{arm} on {ranks(size)}: {len(misses)} of {len(runs)} in {misses['epochs'].max():g} epochs"
            )
    return "; ".join([*told[:4], *([f"{len(told) - 4} more points"] if len(told) > 4 else [])])


def resumed_note(cells: pd.DataFrame) -> str:
    """A caution about resumed runs; empty if there are none."""
    resumed = cells[cells["segments"] > 1]
    if resumed.empty:
        return ""
    note = (
        f"{len(resumed)} of {len(cells)} runs were stopped and resumed: their clocks add up over their "
        f"segments, without the time between them, at most {resumed['away_seconds'].max():.4g} s a run; the "
        "table of runs marks them."
    )
    moved = int((~resumed["bitwise"].astype("bool")).sum())
    return note if not moved else f"{note} {moved} resumed in a world of another size, not bit for bit."


def moved_note(cells: pd.DataFrame) -> str:
    """A caution about runs whose attempts were not all at the same place; empty if there are none."""
    moved = cells[cells["moved"] != ""]
    if moved.empty:
        return ""
    changes = list(dict.fromkeys(change for text in moved["moved"] for change in text.split("; ")))
    more = f" and {len(changes) - 3} more changes" if len(changes) > 3 else ""
    return (
        f"{len(moved)} of {len(cells)} runs continued elsewhere ({'; '.join(changes[:3])}{more}): their "
        "clocks add up the times of different machines; the table of runs marks them."
    )


def _decided(one: Comparison) -> str:
    how = f"{spell_ratio(one.speedup)} as fast to the target"
    if not one.speedup.is_ratio:
        slower = one.baseline if one.verdict == "faster" else one.arm
        how = f"the median run of {slower} did not reach the target"
    return (
        f"{one.arm} is {one.verdict} than {one.baseline} on {ranks(one.world_size)}: {how} "
        f"(p = {one.holm_p:.2g} after Holm); {_factors(one)}."
        + (f" {one.caution[0].upper()}{one.caution[1:]}." if one.caution else "")
    )


def _factors(one: Comparison) -> str:
    cost = _times(one.cheaper_epochs, "cheaper", "dearer")
    if not one.fewer_epochs.is_ratio:
        return f"an epoch is {cost}"
    return f"epochs {_times(one.fewer_epochs, 'fewer', 'more')}, an epoch {cost}"


def _times(ratio: Interval, less: str, more: str) -> str:
    if not ratio.is_ratio:
        return "not known"
    larger = ratio.estimate >= 1
    return f"{ratio.estimate if larger else 1 / ratio.estimate:.2f} times {less if larger else more}"


def _undecided(undecided: list[Comparison], family: int) -> str:
    """Why nothing more is decided: the runs are too few, whatever they show, or what they show is unclear."""
    names = "; ".join(
        f"{one.arm} on {ranks(one.world_size)} "
        f"({spell_ratio(one.speedup)}{one.caution and '; ' + one.caution})"
        for one in sorted(undecided, key=lambda one: (one.world_size, one.arm))
    )
    most = max(one.speedup.n for one in undecided)
    if decidable(most) < len(undecided):
        counted = "1 comparison" if len(undecided) == 1 else f"{len(undecided)} comparisons"
        enough = repeats_for(family)
        return (
            f"With {most} runs of each arm {counted} cannot be decided at 5 %; that needs at least {enough} "
            f"runs: {names}."
        )
    start = "Not decided" if family > len(undecided) else "Nothing is decided at 5 % after Holm"
    return f"{start}: {names}."


def _nothing_to_score(study: Study) -> str:
    started = study.cells[~study.cells["state"].isin(NOT_STARTED)]
    if started.empty:
        return "No run has trained yet."
    return f"No run has completed, so none is scored; {len(started)} started."


def _why_nothing_is_compared(study: Study) -> str:
    if has_trials(study):
        return "Nothing is compared: these runs are trials, from which `kronscale choose` takes the best."
    if not results(study).baselines:
        return "Nothing is compared: the study has no first-order arm."
    return "Nothing is compared: no arm shares a world size with its first-order arm."
