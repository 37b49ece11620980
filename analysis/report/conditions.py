"""What the report says about the conditions of a study, and its conclusions without disturbed blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

import pandas as pd

from analysis.comparisons import comparisons
from analysis.conditions import (
    EQUAL,
    LOADED,
    disturbed,
    disturbed_blocks,
    drift,
    equal_work,
    gaps,
    order_effect,
    without_disturbed,
)
from analysis.metrics import time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.power import SIGNIFICANT
from analysis.statistics.trend import Trend


class Check(NamedTuple):
    """What was found of one condition, and whether readers of the numbers have to know it."""

    sentence: str
    warns: bool = False


def conditions(study: Study) -> list[str]:
    """Sentences on equal work, drift, order and disturbed blocks; none without runs that recorded steps."""
    return [check.sentence for check in checks(study)]


def checks(study: Study) -> list[Check]:
    """What `conditions` says, with what is a warning."""
    runs = equal_work(study)
    if runs.empty or runs["oversubscribed"].all():
        return []
    return [*_averaging(study), *_equal_work(runs), _drift(runs), _order(runs), *_disturbed(study, runs)]


def _averaging(study: Study) -> list[Check]:
    """How gradients were averaged; nothing where one rank trained alone, or no run has recorded it."""
    ways = study.environments[study.environments["key"] == "gradient_averaging"]
    counts = ways[ways["value"] != "none"]["value"].value_counts()
    if counts.empty:
        return []
    told = {
        "DistributedDataParallel": "by DistributedDataParallel, during the backward pass",
        "hooks": "by hooks over MPI, during the backward pass",
        "flat": "in one collective after the backward pass",
    }
    parts = [f"{told.get(str(way), way)} ({count} runs)" for way, count in counts.items()]
    return [Check(f"Gradients were averaged {'; '.join(parts)}; gradient_comm is what that did not hide.")]


def _equal_work(runs: pd.DataFrame) -> list[Check]:
    found = sorted(gaps(runs), key=lambda gap: -gap.ratio)
    if not found:
        said = f"Equal work: forward and backward of all arms of one world size agree within {EQUAL - 1:.0%}."
        return [Check(said)]
    return [
        Check(
            f"Equal work differed: on {gap.world_size} {'rank' if gap.world_size == 1 else 'ranks'} forward "
            f"and backward, the same work, took {gap.ratio:.2f} times as long in {gap.slow} as in "
            f"{gap.fast}; their seconds compare the machine's load as well as the arms, their epochs do not.",
            warns=True,
        )
        for gap in found
    ]


def _drift(runs: pd.DataFrame) -> Check:
    found = drift(runs)
    if found.p_value is None:
        return Check("Drift over the study: too few runs of the same arm to tell.")
    if found.p_value >= SIGNIFICANT:
        return Check(f"Drift over the study: none found ({_p(found)}).")
    return Check(
        f"Drift over the study: of two runs of the same arm the steps of the later one took "
        f"{_change(found.rise)} (median; {_p(found)}). Medians of an arm describe the study as a whole, and "
        "their intervals, which assume equal conditions, may be too narrow; comparisons within blocks are "
        "not affected.",
        warns=True,
    )


def _order(runs: pd.DataFrame) -> Check:
    found = order_effect(runs)
    if found.p_value is None:
        return Check("Order within blocks: too few runs in common blocks to tell.")
    if found.p_value >= SIGNIFICANT:
        return Check(f"Order within blocks: no effect found ({_p(found)}).")
    return Check(
        f"Order within blocks: of two runs of a block the later one took {_change(found.rise)} for its "
        f"steps, relative to its arm's usual (median; {_p(found)}); comparisons rely on a random order.",
        warns=True,
    )


def _disturbed(study: Study, runs: pd.DataFrame) -> list[Check]:
    known = runs["load"].notna().sum()
    measured = "" if known == len(runs) else f" (load was measured in {known} of {len(runs)} runs)"
    bad = runs[disturbed(runs)]
    if bad.empty:
        return [Check(f"Disturbed blocks: none{measured}.")]
    blocks = disturbed_blocks(runs)
    loaded = int((bad["load"] > LOADED).sum())
    on_gpus = int((bad["gpus_disturbed"] & ~(bad["load"] > LOADED)).sum())
    shared = f", {on_gpus} shared a GPU or had its clock reduced" if on_gpus else ""
    start = (
        f"Disturbed: {len(bad)} of {len(runs)} runs{measured}, in {len(blocks)} of "
        f"{len(set(runs['block']) - {''})} blocks: {loaded} lost more than {LOADED:.0%} of their CPUs to "
        f"others{shared}, {len(bad) - loaded - on_gpus} took more than {EQUAL - 1:.0%} longer than usual for "
        "equal work. `kronscale retry --disturbed` repeats these blocks."
    )
    return [Check(f"{start} {_without(study, runs)}", warns=True)]


def _without(study: Study, runs: pd.DataFrame) -> str:
    """The conclusions without disturbed blocks."""
    rest = without_disturbed(study, runs)
    before = _verdicts(study)
    after = _verdicts(rest) if len(rest.cells) else {}
    if not before:
        return "There is no comparison that they could change."
    if not after:
        return "Without these blocks nothing is left to compare."
    changed = [
        f"{arm} on {size}: {one}, without them {after.get((arm, size), 'not compared')}"
        for (arm, size), one in before.items()
        if after.get((arm, size)) != one
    ]
    return (
        f"Without these blocks: {'; '.join(changed)}."
        if changed
        else "Without them all verdicts are the same."
    )


def _verdicts(study: Study) -> dict[tuple[str, int], str]:
    scored = time_to_accuracy(study)
    return {key: one.verdict for key, one in comparisons(study, scored).items()} if len(scored) else {}


def _change(logarithm: float) -> str:
    factor = math.exp(logarithm)
    return f"{factor - 1:.0%} longer" if factor >= 1 else f"{1 - factor:.0%} less"


def _p(found: Trend) -> str:
    return f"p = {found.p_value:.2g}, Mann-Kendall over {found.pairs} pairs of runs"
