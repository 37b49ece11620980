"""Reads record files into frames: one row per rank and window, or per evaluation.

Python parses evaluations: they are few, and may hold NaN, which the fast reader of windows rejects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.records.counting_records import COLUMNS, Faults, are_effective, incomplete
from analysis.records.run_files import RunFiles
from analysis.records.window_lines import MAPPINGS, OTHER, WINDOW_COLUMNS, Columns, WindowLines, keys_of
from harness.errors import StoredFileError
from harness.runs.record_lines import parse, read_content, read_head, whole_lines
from harness.runs.records import DeviceRecord, EvalRecord, PhaseRecord, SegmentRecord

EVALUATION_COLUMNS = (
    "step", "epoch", "samples", "train_seconds", "eval_seconds", "wall_seconds",
    "metric", "value", "direction", "train_loss", "learning_rate", "checkpoint_seconds", "segment",
)  # fmt: skip

DEVICE_COLUMNS = {
    "run": "str", "rank": "int64", "segment": "int64", "first_step": "int64", "steps": "int64",
    "reason": "str", "energy_joules": "float64", "power_watts": "float64", "sm_clock_mhz": "float64",
    "memory_clock_mhz": "float64", "temperature_celsius": "float64", "device_used_bytes": "float64",
    "throttle_reasons": "str", "foreign_processes": "str",
}  # fmt: skip
"""Lists are joined by spaces."""

METRIC_COLUMNS = {
    "run": "str", "step": "float64", "epoch": "float64", "train_seconds": "float64", "metric": "str",
    "value": "float64", "is_target": "bool",
}  # fmt: skip

_PHASES = f'"kind": "{PhaseRecord.KIND}"'.encode()


class RecordFrames(NamedTuple):
    """The record files of a sweep as frames; `run` is the caller's name for an attempt.

    Attributes:
        faults: by run, why it is left out of the frames.
    """

    windows: pd.DataFrame
    evaluations: pd.DataFrame
    metrics: pd.DataFrame
    segments: pd.DataFrame
    devices: pd.DataFrame
    faults: Faults


class _Lines:
    """Records of one kind, and the run of each."""

    def __init__(self) -> None:
        self.run: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def add(self, record: Any, run: str) -> None:
        self.run.append(run)
        self.rows.append(dict(vars(record)))


def read_records(runs: Sequence[RunFiles]) -> RecordFrames:
    """Read the record files of runs, a run's attempts in order.

    A truncated last line, which a killed rank leaves, is skipped, also if a resumed rank continues below it.
    Windows and evaluations that a later segment repeated are left out, and runs with damaged records or with
    missing or doubled ones.
    """
    reader = _Reader()
    for files in runs:
        for path in files.records:
            reader.read(path, files)
    return reader.frames(runs)


class _Reader:
    def __init__(self) -> None:
        self._windows = WindowLines()
        self._others = {kind: _Lines() for kind in (EvalRecord.KIND, SegmentRecord.KIND, DeviceRecord.KIND)}
        self._faults: Faults = defaultdict(list)

    def read(self, path: Path, files: RunFiles) -> None:
        """Read one file, or note why it cannot be read."""
        try:
            content, ended = read_content(path)
            self._read_content(content, path, files.run)
        except (StoredFileError, OSError) as error:
            self._faults[files.run].append(str(error))
            return
        of_last = files.attempt is not None and path.parent == files.attempt.path
        if not ended and files.completed and files.checked and of_last:
            self._faults[files.run].append(f"{path}: has no checksum at its end: records were cut or added")

    def _read_content(self, content: bytes, path: Path, run: str) -> None:
        start, count = _bulk(content, path)
        own: list[bytes] = []
        numbers: list[int] = []
        for number, text in whole_lines(content[:start] if count else content):
            line = read_head(text, path, number)
            if line.kind == PhaseRecord.KIND:
                own.append(text)
                numbers.append(number)
            elif (record := parse(line, path)) and line.kind in self._others:
                self._others[line.kind].add(record, run)
        self._windows.add(b"\n".join(own), numbers, run, path)
        before = content.count(b"\n", 0, start)
        self._windows.add(content[start:], range(before + 1, before + 1 + count), run, path)

    def frames(self, runs: Sequence[RunFiles]) -> RecordFrames:
        columns, refused = self._windows.columns()
        for run, sentence in refused:
            self._faults[run].append(sentence)
        starts = self._others[SegmentRecord.KIND]
        segments = pd.DataFrame(starts.rows, columns=list(COLUMNS)).assign(run=starts.run).astype(COLUMNS)
        windows = _windows(columns, self._windows.runs)
        evaluations = _evaluation_frame(self._others[EvalRecord.KIND])
        devices = _device_frame(self._others[DeviceRecord.KIND])
        measured = pd.Series([row["metrics"] for row in self._others[EvalRecord.KIND].rows], dtype="object")
        windows = windows[are_effective(PhaseRecord.KIND, windows, segments)]
        evaluations = evaluations[are_effective(EvalRecord.KIND, evaluations, segments)]
        devices = devices[are_effective(DeviceRecord.KIND, devices, segments)]
        intact = [files for files in runs if not files.faults and files.run not in self._faults]
        for run, sentences in incomplete(intact, windows, evaluations, segments).items():
            self._faults[run] += sentences
        faulty = {*self._faults, *(files.run for files in runs if files.faults)}
        if faulty:
            segments = segments[~segments["run"].isin(faulty)].reset_index(drop=True)
            windows, evaluations, devices = (
                one[~one["run"].isin(faulty)] for one in (windows, evaluations, devices)
            )
            for one in (windows, evaluations):
                one["run"] = one["run"].cat.remove_unused_categories()
        metrics = _metric_rows(evaluations, measured)
        windows, evaluations, devices = (
            one.reset_index(drop=True) for one in (windows, evaluations, devices)
        )
        return RecordFrames(windows, evaluations, metrics, segments, devices, self._faults)


def _bulk(content: bytes, path: Path) -> tuple[int, int]:
    """Start and number of the windows, if nothing else follows the first one, as in most files.

    Those lines need not be classified one by one. 0 windows: classify every line.
    """
    found = content.find(_PHASES)
    first = content.rfind(b"\n", 0, max(found, 0)) + 1
    if found < 0 or not content.endswith(b"\n"):
        return len(content), 0
    schema = read_head(content[first : found + len(_PHASES) + 1], path, 0).schema
    head = f'{{"schema": {schema}, "kind": "{PhaseRecord.KIND}"'.encode()
    lines = content.count(b"\n", first)
    heads = content.count(b"\n" + head, first) + content.startswith(head, first)
    return first, lines if lines == heads else 0


def _windows(columns: Columns, runs: Sequence[tuple[str, int]]) -> pd.DataFrame:
    """One row per rank and window, a column for every number: `wall_seconds`, `seconds.forward`."""
    absent = np.full(len(columns["rank"]), np.nan)
    found: dict[str, Any] = {"run": _runs(runs)}
    found |= {name: columns.get(name, absent) for name in WINDOW_COLUMNS}
    found["segment"] = np.nan_to_num(found["segment"])  # schema 1 has no segments: no run was resumed
    for name in ("rank", "first_step", "steps", "samples", "segment"):
        found[name] = found[name].astype("int64")
    if f"seconds.{OTHER}" not in columns:
        phases = [columns[f"seconds.{phase}"] for phase in keys_of(columns, "seconds")]
        columns[f"seconds.{OTHER}"] = found["wall_seconds"] - sum(map(np.nan_to_num, phases))
    _fill_waits(columns)
    for mapping in MAPPINGS:
        found |= {f"{mapping}.{key}": columns[f"{mapping}.{key}"] for key in keys_of(columns, mapping)}
    return pd.DataFrame(found, copy=False)


def _fill_waits(columns: Columns) -> None:
    """Set to 0 the waits of phases in which no rank waited: a record lists only the others."""
    waits = [columns[f"wait_seconds.{phase}"] for phase in keys_of(columns, "wait_seconds")]
    if not waits:
        return
    measured = np.any(~np.isnan(waits), axis=0)
    for phase in keys_of(columns, "seconds"):
        if phase.endswith("_comm"):
            seconds, name = columns[f"seconds.{phase}"], f"wait_seconds.{phase}"
            waited = np.nan_to_num(columns.get(name, np.zeros(len(seconds))))
            columns[name] = np.where(measured & ~np.isnan(seconds), waited, np.nan)


def _runs(runs: Sequence[tuple[str, int]]) -> pd.Series:
    names = sorted({run for run, _ in runs})
    code = {name: place for place, name in enumerate(names)}
    codes = np.array([code[run] for run, _ in runs], dtype="int32")
    each = np.repeat(codes, np.array([count for _, count in runs], dtype="int64"))
    return pd.Series(pd.Categorical.from_codes(each, categories=pd.Index(names, dtype="str")))


def _evaluation_frame(lines: _Lines) -> pd.DataFrame:
    frame = pd.DataFrame.from_records(lines.rows, columns=list(EVALUATION_COLUMNS))
    frame.insert(0, "run", pd.Series(lines.run, dtype="category"))
    for name in EVALUATION_COLUMNS:
        frame[name] = frame[name].astype("str" if name in {"metric", "direction"} else "float64")
    return frame


def _metric_rows(evaluations: pd.DataFrame, measured: pd.Series) -> pd.DataFrame:
    """One row per evaluation and metric; of an evaluation older than schema 6, its target's metric alone.

    Args:
        evaluations: those that count; their index is that of `measured`.
        measured: each evaluation's metrics, as recorded.
    """
    rows: list[tuple[Any, ...]] = []
    for place, one in zip(evaluations.index, evaluations.itertuples(index=False), strict=True):
        every: Mapping[str, float] = measured[place] or {one.metric: one.value}
        at = (str(one.run), one.step, one.epoch, one.train_seconds)
        rows += [(*at, name, value, name == one.metric) for name, value in every.items()]
    return pd.DataFrame(rows, columns=list(METRIC_COLUMNS)).astype(METRIC_COLUMNS)


def _device_frame(lines: _Lines) -> pd.DataFrame:
    for row in lines.rows:
        for name in ("throttle_reasons", "foreign_processes"):
            row[name] = " ".join(map(str, row[name] or ()))
    frame = pd.DataFrame(lines.rows, columns=list(DEVICE_COLUMNS))
    return frame.assign(run=lines.run).astype(DEVICE_COLUMNS)
