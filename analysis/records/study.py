"""A study: frames that join on `run`, and selections from them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

import pandas as pd

from analysis.rules import SCORINGS, Scoring
from harness.runs.arms import name_arms

T = TypeVar("T")

FRAMES = ("windows", "evaluations", "metrics", "environments", "layers", "devices")
"""Those with any number of rows for a run."""


@dataclass(frozen=True)
class Study:
    """One sweep or several, as frames that join on `run`.

    Tables of it are computed once: put a changed frame into a study of its own, `replace(study, cells=...)`.

    Attributes:
        cells: one row per cell, with the attempt that counts: its latest COMPLETED one, else its latest.
            `state` is the outcome's, or RUNNING (records, no outcome), PENDING (no records yet) or STAGED
            (no attempt). A K-FAC option that changes over time has no number in its column; `schedules` has
            its text. `arm` and `setting` are explained in `harness.runs.arms`. A run that is not `valid` is
            in no other frame and has no numbers; `why` says what is damaged or does not agree.
        windows: one row per rank and window, the steps from `first_step` of one record: its `steps`,
            `samples`, `wall_seconds`; `instrument_seconds`, the cost of the timer, NaN if not measured; and a
            column for every key of a mapping, NaN where the window lacks it: `seconds.<phase>` (exclusive;
            time in no phase is `seconds.other`), `calls.<phase>`, `sent_bytes.<phase>`;
            `wait_seconds.<phase>`, the part spent waiting for late ranks, if the site sets `split_wait`;
            `memory_bytes.<kind>` at the end; and `load_seconds.<kind>`, as in `PhaseRecord.load_seconds`.
        evaluations: one row per evaluation, with the target's metric; seconds are since training began.
        metrics: one row per evaluation and metric that it measured; `is_target` for the target's.
        environments: one row per run and key of its environment.json, as text.
        layers: one row per run and layer that K-FAC preconditions: `a_dim`, `g_dim`, `blocks`, and the ranks
            of each role as `[start, stop, step]`; empty for runs older than layers.json.
        devices: one row per rank and window with the GPU driver's readings, as in `DeviceRecord`; without a
            driver, one row per segment with the `reason`.
        fields: one row per cell and one column per dotted path, such as `kfac.damping`; NaN for a
            field that the cell lacks.
        scoring: the rule of time to accuracy; change it with
            `replace(study, scoring=SCORINGS["mlperf-style"])`.
    """

    cells: pd.DataFrame
    windows: pd.DataFrame
    evaluations: pd.DataFrame
    metrics: pd.DataFrame
    environments: pd.DataFrame
    layers: pd.DataFrame
    devices: pd.DataFrame
    fields: pd.DataFrame
    scoring: Scoring = SCORINGS["first"]

    @property
    def sweeps(self) -> list[str]:
        """The sweeps' names."""
        return list(dict.fromkeys(self.cells["sweep"]))

    def series(self, *axis: str) -> pd.Series:
        """The arm of every row of `cells`, when the fields `axis` (dotted paths) may vary within an arm."""
        rows = [{k: v for k, v in row.items() if v is not None} for row in self._rows()]
        named = name_arms(rows, without=axis)
        return pd.Series([arm for arm, _ in named], index=self.cells.index, dtype="str")

    def value_of(self, path: str) -> pd.Series:
        """A field of every row of `cells`; None if the cell lacks it."""
        values = [row.get(path) for row in self._rows()]
        return pd.Series(values, index=self.cells.index, dtype="object")

    def only(self, keep: pd.Series) -> Study:
        """The cells for which `keep` is true, with their rows in all frames; arms keep their names."""
        cells = self.cells[keep].reset_index(drop=True)
        runs = set(cells["run"])
        parts = {name: getattr(self, name) for name in (*FRAMES, "fields")}
        kept = {name: frame[frame["run"].astype("str").isin(runs)] for name, frame in parts.items()}
        return replace(
            self, cells=cells, **{name: frame.reset_index(drop=True) for name, frame in kept.items()}
        )

    def at_target(self, value: float) -> Study:
        """The study as if every run had had this target, on the metric that it was trained for.

        Raises:
            ValueError: runs have targets of several metrics, or stopped at a target that is easier.
        """
        cells = self.cells
        kinds = cells[["target_metric", "target_direction"]].drop_duplicates().to_numpy().tolist()
        if len(kinds) > 1:
            names = ", ".join(sorted({metric for metric, _ in kinds}))
            raise ValueError(f"runs have targets of several metrics, {names}: one value cannot replace them")
        easier = cells["target_value"].lt(value) == (cells["target_direction"] == "higher")
        stopped = cells[easier & cells["target_value"].ne(value) & cells["stop_reason"].eq("target")]
        if len(stopped):
            raise ValueError(
                f"{len(stopped)} of {len(cells)} runs, such as {stopped['cell'].iloc[0]}, stopped at their "
                f"own target, {stopped['target_value'].iloc[0]:g}, so when they would have reached {value:g} "
                "is not known; train them with training.stop_at_target: false"
            )
        return replace(self, cells=cells.assign(target_value=float(value)))

    def of_cells(self, ids: Collection[str]) -> Study:
        """The study as if only these cells were stored: arms and settings are named after what they vary.

        Args:
            ids: values of `cells["cell"]`; those of cells that are not in the study are ignored.

        Raises:
            ValueError: there are ids, and none of them is of a cell of the study.
        """
        kept = self.only(self.cells["cell"].isin(list(ids)))
        if len(ids) and len(self.cells) and kept.cells.empty:
            example, cell = next(iter(ids)), self.cells["cell"].iloc[0]
            raise ValueError(f"none of the {len(ids)} ids is of a cell, such as {cell}: got {example}")
        named = name_arms([{k: v for k, v in row.items() if v is not None} for row in kept._rows()])
        arms, settings = ([names[place] for names in named] for place in (0, 1))
        return replace(
            kept,
            cells=kept.cells.assign(arm=arms, setting=settings).astype(
                dict.fromkeys(("arm", "setting"), "str")
            ),
        )

    def _rows(self) -> list[dict[str, Any]]:
        known = {row["run"]: row for row in self.fields.to_dict("records")}
        return [{str(key): value for key, value in known[run].items()} for run in self.cells["run"]]


def once_per_study(compute: Callable[[Study], T]) -> Callable[[Study], T]:
    """Compute a table once for each study: pages, findings and figures ask for the same ones many times.

    Every call returns a frame of its own, so that changing it changes no other.
    """
    name = f"{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def known(study: Study) -> T:
        tables: dict[str, T] = study.__dict__.setdefault(
            "_tables", {}
        )  # beside the fields, of which none changes
        if name not in tables:
            tables[name] = compute(study)
        table = tables[name]
        return table.copy() if isinstance(table, pd.DataFrame) else table

    return known
