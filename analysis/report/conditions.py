"""What the report says about the conditions of a study, and its conclusions without disturbed blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

import pandas as pd

from analysis.conditions import (
    EQUAL_WORK_RATIO,
    LOADED,
    disturbed,
    disturbed_blocks,
    drift,
    equal_work,
    gaps,
    order_effect,
    without_disturbed,
)
from analysis.figures.drawing import ranks
from analysis.records.loading import ROLES
from analysis.records.study import Study
from analysis.report.answers import listed
from analysis.results import results
from analysis.statistics.power import FEWEST_RUNS, SIGNIFICANT
from analysis.statistics.trend import Trend
from analysis.steps import rank_phase_costs


class Check(NamedTuple):
    """What was found of one condition, and whether readers of the numbers have to know it."""

    sentence: str
    warns: bool = False


def checks(study: Study) -> list[Check]:
    """On code, precision, averaging, equivalent arms, equal work, drift, order and disturbed blocks.

    Without steps to compare only that on code.
    """
    runs = equal_work(study)
    if runs.empty or runs["oversubscribed"].all():
        return _code(study)
    return [
        *_code(study), *_precision(study), *_averaging(study), *_equivalent_arms(study),
        *_equal_work(runs), _drift(runs), _order(runs), *_disturbed(study, runs),
    ]  # fmt: skip


def differed(study: Study) -> dict[tuple[str, int], float]:
    """Times as long that equal work took in the slowest arm as in the fastest, by setting and world size."""
    return {(gap.setting, gap.world_size): gap.ratio for gap in gaps(equal_work(study))}


def _equivalent_arms(study: Study) -> list[Check]:
    """Arms that computed and sent the same, though they differ in strategy; on one rank many do.

    All other fields of their cells agree, every layer's roles are on the same ranks, and each rank sent as
    many bytes a step.
    """
    cells = study.cells[study.cells["run"].isin(study.layers["run"])]
    cells = cells.drop_duplicates(["arm", "world_size"])
    others = study.fields.drop(columns=list(_OF_STRATEGIES), errors="ignore").to_dict("records")
    fields = {str(row.pop("run")): str(row) for row in others}
    layers = study.layers[study.layers["run"].isin(cells["run"])]
    placements = {
        str(run): rows[["name", *ROLES]].to_string(index=False) for run, rows in layers.groupby("run")
    }
    by_rank = rank_phase_costs(study).groupby(["run", "rank"])["bytes_per_step"].sum().round()
    sent = by_rank.groupby("run").apply(list)
    alike: dict[tuple[str, ...], list[str]] = {}
    for run, arm, size in zip(cells["run"], cells["arm"], cells["world_size"], strict=True):
        key = (str(size), fields[run], placements[run], str(sent.get(run)))
        alike.setdefault(key, []).append(arm)
    return [
        Check(
            f"{listed(names)} computed and sent the same on {ranks(int(key[0]))}: differences between "
            "their seconds are noise.",
            warns=True,
        )
        for key, names in alike.items()
        if len(names) > 1
    ]


_OF_STRATEGIES = (
    "method", "seed", "kfac.strategy", "kfac.assignment", "kfac.grad_worker_fraction", "kfac.split_factors",
)  # fmt: skip
"""Fields of a cell that say who computes what, which placement and traffic show; and the run's seed."""


def _code(study: Study) -> list[Check]:
    """The commits that ran, and the runs whose code no commit holds; nothing where none is known."""
    known = study.environments
    commits = known[(known["key"] == "commit") & (known["value"] != "None")]
    changed = known[(known["key"] == "dirty") & (known["value"] == "True")]["run"].nunique()
    found = []
    if changed:
        found.append(
            Check(
                f"Code: in {changed} of {len(study.cells)} runs files differed from the commit that is "
                "recorded, so that no commit reproduces them.",
                warns=True,
            )
        )
    blocks = commits.merge(study.cells[["run", "block"]], on="run")
    mixed = blocks[blocks["block"] != ""].groupby("block")["value"].nunique()
    if (mixed > 1).any():
        found.append(
            Check(
                f"Code: {int((mixed > 1).sum())} of {len(mixed)} blocks have runs of several commits: what "
                "changed between them may be what differs.",
                warns=True,
            )
        )
    elif commits["value"].nunique() > 1:
        found.append(Check(f"Code: runs of {commits['value'].nunique()} commits, each block of one."))
    return found


def _precision(study: Study) -> list[Check]:
    """Runs in bfloat16 on CPUs that emulate it."""
    if "training.precision" not in study.fields:
        return []
    known = study.environments
    without = set(known[(known["key"] == "native_bfloat16") & (known["value"] == "False")]["run"])
    on_cpus = set(known[(known["key"] == "device") & (known["value"] == "cpu")]["run"])
    asked = set(study.fields[study.fields["training.precision"] == "bfloat16"]["run"])
    slow = len(asked & without & on_cpus)
    if not slow:
        return []
    return [
        Check(
            f"Precision: {slow} of {len(study.cells)} runs computed in bfloat16 on CPUs that emulate it, "
            "where a step takes several times as long as in float32. Their seconds say nothing about "
            "other CPUs.",
            warns=True,
        )
    ]


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
        within = f"{EQUAL_WORK_RATIO - 1:.0%}"
        return [
            Check(f"Equal work: forward and backward of all arms of one world size agree within {within}.")
        ]
    return [
        Check(
            f"Equal work differed: on {ranks(gap.world_size)} forward and backward, the same work, took "
            f"{gap.ratio:.2f} times as long in {gap.slow} as in {gap.fast}: the machine's "
            "load differed, or other phases left its caches cold. Read differences in seconds with care; "
            "epochs are not affected.",
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
    bad, judged = runs[disturbed(runs)], runs[~runs["oversubscribed"]]
    known = judged["load"].notna().sum()
    measured = "" if known == len(judged) else f" (load was measured in {known} of {len(judged)} runs)"
    if bad.empty:
        return [Check(f"Disturbed blocks: none{measured}.")]
    blocks = disturbed_blocks(runs)
    loaded = int((bad["load"] > LOADED).sum())
    on_gpus = int((bad["gpus_disturbed"] & ~(bad["load"] > LOADED)).sum())
    shared = f", {on_gpus} shared a GPU or had its clock reduced" if on_gpus else ""
    start = (
        f"Disturbed: {len(bad)} of {_judged_runs(len(judged), len(runs))}{measured}, in {len(blocks)} of "
        f"{len(set(judged['block']) - {''})} blocks: {loaded} lost more than {LOADED:.0%} of their CPUs to "
        f"others{shared}, {len(bad) - loaded - on_gpus} took more than {EQUAL_WORK_RATIO - 1:.0%} longer "
        "than usual for equal work. `kronscale retry --disturbed` repeats these blocks."
    )
    return [Check(f"{start} {_without(study, runs)}", warns=True)]


def _judged_runs(judged: int, runs: int) -> str:
    return f"{runs} runs" if judged == runs else f"the {judged} runs with a CPU for each rank"


def _without(study: Study, runs: pd.DataFrame) -> str:
    """The conclusions without disturbed blocks."""
    rest = without_disturbed(study, runs)
    before = results(study).comparisons
    after = results(rest).comparisons if len(rest.cells) else {}
    if not before:
        return "There is no comparison that they could change."
    if not after:
        return "Without these blocks nothing is left to compare."
    if max(one.speedup.n for one in after.values()) < FEWEST_RUNS:
        return "Without these blocks too few runs are left for any verdict."
    verdicts = {key: one.verdict for key, one in after.items()}
    changed = [
        f"{arm} on {ranks(size)}: {one.verdict}, without them {verdicts.get((arm, size), 'not compared')}"
        for (arm, size), one in before.items()
        if verdicts.get((arm, size)) != one.verdict
    ]
    return (
        f"Without these blocks: {'; '.join(changed)}."
        if changed
        else "Without them all verdicts are the same."
    )


def _change(logarithm: float) -> str:
    factor = math.exp(logarithm)
    return f"{factor - 1:.0%} longer" if factor >= 1 else f"{1 - factor:.0%} less"


def _p(found: Trend) -> str:
    return f"p = {found.p_value:.2g}, Mann-Kendall over {found.pairs} pairs of runs"
