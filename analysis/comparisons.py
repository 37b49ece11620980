"""Comparisons of arms: the baseline of each, the pairing of runs, and the significant differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import pandas as pd

from analysis.completeness import LeftOut
from analysis.records.study import Study
from analysis.run_order import Columns, one_after_another
from analysis.statistics.intervals import Interval, holm, paired_ratio, ratio
from analysis.statistics.power import FEWEST_RUNS, SIGNIFICANT

Key = TypeVar("Key")


@dataclass(frozen=True)
class Comparison:
    """One arm on one world size against the first-order arm of its setting there.

    Attributes:
        speedup: seconds to the target, baseline's over the arm's.
        fewer_epochs: its first factor, epochs to the target.
        cheaper_epochs: its second factor, seconds per epoch.
        oversubscribed: whether runs had more ranks than CPUs, so that seconds cannot be compared.
        caution: why its numbers need care, or nothing; see `analysis.completeness`.
        refused: why there is no verdict although runs are enough, or nothing: all runs of one arm came before
            those of the other, too many ended by their own doing, or misses were stopped too soon to count as
            slower.
        holm_p: p of `speedup`, adjusted for all comparisons of the study; None without an interval, with
            fewer than `FEWEST_RUNS` runs, if oversubscribed, or if there is no verdict.
    """

    arm: str
    baseline: str
    world_size: int
    speedup: Interval
    fewer_epochs: Interval
    cheaper_epochs: Interval
    oversubscribed: bool = False
    caution: str = ""
    refused: str = ""
    holm_p: float | None = None

    @property
    def verdict(self) -> str:
        """`faster` or `slower` if interval and adjusted p agree that the arms differ, else `undecided`."""
        if self.oversubscribed or self.refused:
            return "not judged"
        if self.holm_p is None or self.holm_p >= SIGNIFICANT or not self.speedup.excludes(1):
            return "undecided"
        return "faster" if self.speedup.estimate > 1 else "slower"


def baselines(study: Study) -> dict[str, str]:
    """The baseline of every arm: the first-order arm of the same setting, if there is one.

    If a setting has several, plain SGD is chosen, else the first by name.
    """
    cells = study.cells
    first_order = cells[cells["strategy"].isna() & cells["trial"].isna()]  # trials are not compared
    first_order = first_order.assign(other=first_order["optimizer"] != "sgd")
    of_setting = (
        first_order.sort_values(["other", "method", "arm"])
        .drop_duplicates("setting")
        .set_index("setting")["arm"]
    )
    arms = cells.drop_duplicates("arm").set_index("arm")["setting"].map(of_setting)
    return {str(arm): str(baseline) for arm, baseline in arms.dropna().items()}


def comparisons(study: Study, scored: pd.DataFrame) -> dict[tuple[str, int], Comparison]:
    """Every arm against its baseline, by arm and world size; Holm over all of them.

    Args:
        study: defines the baselines.
        scored: rows of `analysis.metrics.time_to_accuracy`.
    """
    runs = {(arm, size): group for arm, size, group in points(scored)}
    baseline = baselines(study)
    family = [
        (arm, baseline[arm], size)
        for arm, size in runs
        if arm in baseline and baseline[arm] != arm and (baseline[arm], size) in runs
    ]
    crowded = {point for point, group in runs.items() if group["oversubscribed"].any()}
    left_out = LeftOut(study)
    times = study.cells[["run", "started_at", "ended_at", "stop_reason"]]
    full = {key: group.merge(times) for key, group in runs.items()}
    refused = {
        (arm, size): left_out.own_doing(arm, against, size)
        or stopped_early(full[arm, size], full[against, size])
        or ran_apart(arm, against, full[arm, size], full[against, size])
        for arm, against, size in family
    }
    family_size = sum(
        crowded.isdisjoint({(arm, size), (against, size)}) and not refused[arm, size]
        for arm, against, size in family
    )
    found = {
        (arm, size): replace(
            _compare(arm, against, size, runs[arm, size], runs[against, size], family_size),
            caution=left_out.caution(arm, against, size),
            refused=refused[arm, size],
        )
        for arm, against, size in family
    }
    return judged(found)


def judged(found: Mapping[Key, Comparison]) -> dict[Key, Comparison]:
    """The comparisons of a study, each with its p after Holm's correction over those that are tested."""
    tested = [key for key, one in found.items() if _is_tested(one)]
    adjusted = holm([float(found[key].speedup.p_value or 0) for key in tested])
    corrected = {key: replace(found[key], holm_p=p) for key, p in zip(tested, adjusted, strict=True)}
    return {**found, **corrected}


def _is_tested(one: Comparison) -> bool:
    enough = one.speedup.p_value is not None and one.speedup.n >= FEWEST_RUNS
    return enough and not one.oversubscribed and not one.refused


def ran_apart(arm: str, against: str, runs: Columns, base: Columns) -> str:
    """Why the order of the runs of two arms allows no verdict, or nothing; see `analysis.run_order`."""
    if min(len(runs["block"]), len(base["block"])) < FEWEST_RUNS or not one_after_another(runs, base):
        return ""
    return f"{arm} and {against} ran one after the other, so that drift could make the difference"


def stopped_early(runs: pd.DataFrame, base: pd.DataFrame) -> str:
    """Why misses allow no verdict, or nothing: their runs were stopped sooner than the other arm arrived.

    A run that missed its target counts as slower than every run that reached it. That is an assumption where
    it had trained for less time than the others took, so the interval must exclude equality also if each such
    run had reached its target the moment it stopped. Runs that diverged would never have reached it.

    Args:
        runs: of one arm, rows of `analysis.metrics.time_to_accuracy` with `stop_reason`.
        base: of the other.
    """
    for own, other in ((base, runs), (runs, base)):
        arrived = other["scored_seconds"][other["reached"]]
        early = ~own["reached"] & (own["stop_reason"] != "diverged") & (own["seconds"] < arrived.max())
        if not early.any() or arrived.empty:
            continue
        sooner = own.assign(scored_seconds=own["scored_seconds"].where(~early, own["seconds"]))
        found, at_best = (compared(one, other, "scored_seconds") for one in (own, sooner))
        holds = at_best.excludes(1) and (at_best.estimate > 1) == (found.estimate > 1)
        if math.isnan(found.estimate) or (found.excludes(1) and not holds):
            name, faster = own["arm"].iloc[0], other["arm"].iloc[0]
            epochs, seconds = own["epochs"][early].max(), own["seconds"][early].max()
            return (
                f"{early.sum()} of {len(own)} runs of {name} stopped after {epochs:g} epochs and at most "
                f"{seconds:.3g} s, sooner than the last run of {faster} reached the target "
                f"({arrived.max():.3g} s), so more epochs of {name} could change the order"
            )
    return ""


def compared(top: Columns, bottom: Columns, column: str, family: int = 1) -> Interval:
    """`column` of `top` over that of `bottom`, in pairs if any runs of both come from the same block.

    Blocks in which a run of one arm is missing are left out, whatever the other arm's run was. The method
    depends on the number of pairs and the `family` of comparisons; see `analysis.statistics.intervals`.
    """
    above, below = list(top[column]), list(bottom[column])
    places = _pairs(list(top["block"]), list(bottom["block"]))
    if not places:
        return ratio(above, below)
    return paired_ratio([above[i] for i, _ in places], [below[j] for _, j in places], family)


def points(frame: pd.DataFrame) -> Iterator[tuple[str, int, pd.DataFrame]]:
    """The runs of every arm and world size, in the frame's order of arms."""
    for key, runs in frame.groupby(["arm", "world_size"], sort=False):
        arm, world_size = cast("tuple[str, int]", key)
        yield arm, int(world_size), runs


def _compare(
    arm: str, against: str, size: int, runs: pd.DataFrame, base: pd.DataFrame, family: int
) -> Comparison:
    timed = [frame.dropna(subset="seconds_per_epoch") for frame in (base, runs)]
    return Comparison(
        arm, against, size,
        speedup=compared(base, runs, "scored_seconds", family),
        fewer_epochs=compared(base, runs, "scored_epochs", family),
        cheaper_epochs=compared(timed[0], timed[1], "seconds_per_epoch", family),
        oversubscribed=bool(runs["oversubscribed"].any() or base["oversubscribed"].any()),
    )  # fmt: skip


def _pairs(top: list[str], bottom: list[str]) -> list[tuple[int, int]]:
    """Places of the runs of two arms in common blocks; none if any run has no block of its own."""
    if any("" in names or len(set(names)) < len(names) for names in (top, bottom)):
        return []
    places = {name: place for place, name in enumerate(bottom)}
    return [(place, places[name]) for place, name in enumerate(top) if name in places]
