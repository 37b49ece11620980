"""Which runs are scored: those that completed. Others are counted, and a caution stands beside the number.

A run that was cancelled, lost or stopped by a limit says nothing about when it would have reached its target:
neither "slowest" nor "left out at random" is true of it. So it has no score, and a point with many such runs,
or a comparison of arms that lack unequally many, is marked.
"""

from __future__ import annotations

import pandas as pd

from analysis.records.study import Study

MANY = 0.1
"""Largest share of left-out runs without a caution (our choice)."""

NOT_STARTED = ("STAGED", "PENDING")

OWN_DOING = ("TIMEOUT", "OOM", "FAILED")
"""Ends that the run brings about itself. A time limit, for one, ends slow runs and leaves fast ones."""


def completed(cells: pd.DataFrame) -> pd.Series:
    """Mask over `Study.cells`: runs that trained to their target, their last epoch or divergence."""
    done: pd.Series = cells["state"] == "COMPLETED"
    return done & cells["valid"]


def selected(arm: str, own: int, started: int) -> str:
    """Why the completed runs of an arm are a selection, or nothing: too many ended by their own doing."""
    if not started or own / started <= MANY:
        return ""
    kinds = f"{OWN_DOING[0]}, {OWN_DOING[1]} or {OWN_DOING[2]}"
    return f"{own} of {started} runs of {arm} ended {kinds}, so that those left are a selection"


class LeftOut:
    """The started runs of every point that are not scored.

    Attributes:
        counts: by arm and world size: `left_out` of `started` runs, their `states`, and how many ended by
            their `own` doing.
    """

    def __init__(self, study: Study) -> None:
        cells = study.cells[~study.cells["state"].isin(NOT_STARTED)]
        done = completed(cells)
        states = cells["state"].where(cells["state"] != "COMPLETED", "INVALID").where(~done)
        own = states.isin(OWN_DOING)
        points = cells[["arm", "world_size"]].assign(left_out=~done, state=states, own=own)
        by_point = points.groupby(["arm", "world_size"], sort=False)
        self.counts = by_point["left_out"].agg(left_out="sum", started="size")
        self.counts["own"] = by_point["own"].sum()
        self.counts["states"] = by_point["state"].apply(_listed)

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.counts["left_out"].any())

    def at(self, arm: str, world_size: int) -> str:
        """`5 of 9`, or nothing if every started run of the point is scored."""
        left_out, started = self._of(arm, world_size)
        return f"{left_out} of {started}" if left_out else ""

    def share(self, arm: str, world_size: int) -> float:
        """Left-out runs over started ones; 0 if none has started."""
        left_out, started = self._of(arm, world_size)
        return left_out / started if started else 0.0

    def caution(self, arm: str, against: str | None, world_size: int) -> str:
        """Why a number of this point needs care: many runs are left out, or unequally many of two arms."""
        own = self.share(arm, world_size)
        other = own if against is None else self.share(against, world_size)
        if max(own, other) <= MANY and own == other:
            return ""
        arms = [arm] if against in (None, arm) else [arm, against]
        parts = [f"{self.at(one, world_size) or 'no'} runs of {one}" for one in arms if one is not None]
        return f"caution: {' and '.join(parts)} did not complete and are left out"

    def own_doing(self, arm: str, against: str, world_size: int) -> str:
        """Why two arms cannot be judged: runs ended because of what they are, and those left are selected."""
        for one in (arm, against):
            if said := selected(one, self._own(one, world_size), self._of(one, world_size)[1]):
                return said
        return ""

    def sentences(self) -> list[str]:
        """A sentence for every point that lacks runs."""
        rows = self.counts[self.counts["left_out"] > 0].drop(columns="own").reset_index()
        return [
            f"{arm} on {size} rank{'s' if size > 1 else ''}: "
            f"{left_out} of {started} runs are not scored ({states})"
            + (", more than a tenth." if left_out / started > MANY else ".")
            for arm, size, left_out, started, states in rows.itertuples(index=False)
        ]

    def _of(self, arm: str, world_size: int) -> tuple[int, int]:
        if (arm, world_size) not in self.counts.index:
            return 0, 0
        row = self.counts.loc[(arm, world_size)]
        return int(row["left_out"]), int(row["started"])

    def _own(self, arm: str, world_size: int) -> int:
        return int(self.counts["own"].to_dict().get((arm, world_size), 0))


def _listed(states: pd.Series) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.value_counts().sort_index().items())
