"""Reads record files into long frames: one row per rank, window and phase (or kind of memory), or evaluation.

Python parses evaluations: they are few, and may hold NaN, which the fast reader of windows rejects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.records.agreement import Faults, disagreements
from analysis.records.long_frames import Cells, long_frame
from analysis.records.metric_rows import metric_rows
from analysis.records.run_files import RunFiles
from analysis.records.segments import COLUMNS, are_effective
from analysis.records.window_lines import (
    LOADS,
    OTHER,
    PHASE_ORDER,
    WINDOW_COLUMNS,
    Columns,
    WindowLines,
    mapping,
    total_of,
)
from harness.errors import StoredFileError
from harness.runs.record_lines import parse, read_content, read_head, whole_lines
from harness.runs.records import KINDS, DeviceRecord, EvalRecord, PhaseRecord, SegmentRecord

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

_PHASES = f'"kind": "{PhaseRecord.KIND}"'.encode()


class RecordFrames(NamedTuple):
    """The record files of a sweep as frames; `run` is the caller's name for an attempt.

    Attributes:
        faults: by run, why it is left out of the frames.
        sealed: the files whose content matches their seal.
    """

    phases: pd.DataFrame
    memory: pd.DataFrame
    loads: pd.DataFrame
    evaluations: pd.DataFrame
    metrics: pd.DataFrame
    segments: pd.DataFrame
    devices: pd.DataFrame
    faults: Faults
    sealed: frozenset[Path]


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
    records that do not agree (`analysis.records.agreement`).
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
        self._sealed: set[Path] = set()

    def read(self, path: Path, files: RunFiles) -> None:
        """Read one file, or note why it cannot be read."""
        try:
            content, sealed = read_content(path)
            self._read_content(content, path, files.run)
        except (StoredFileError, OSError) as error:
            self._faults[files.run].append(str(error))
            return
        if sealed:
            self._sealed.add(path)
        elif files.should_be_sealed and files.attempt is not None and path.parent == files.attempt.path:
            self._faults[files.run].append(f"{path}: its seal is missing: records were cut or added")

    def _read_content(self, content: bytes, path: Path, run: str) -> None:
        start, count = _bulk(content, path)
        own: list[bytes] = []
        numbers: list[int] = []
        for number, text in enumerate(whole_lines(content[:start] if count else content), start=1):
            line = read_head(text, path, number)
            if line.kind == PhaseRecord.KIND:
                own.append(text)
                numbers.append(number)
            elif line.kind in self._others or line.kind not in KINDS:
                record = parse(line, path)
                if record is not None:
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
        counts = are_effective(PhaseRecord.KIND, windows, segments).to_numpy()
        windows, columns = _kept(windows, columns, counts)
        evaluations = evaluations[are_effective(EvalRecord.KIND, evaluations, segments)]
        devices = devices[are_effective(DeviceRecord.KIND, devices, segments)]
        intact = [files for files in runs if not files.faults and files.run not in self._faults]
        for run, sentences in disagreements(intact, windows, evaluations, measured, segments).items():
            self._faults[run] += sentences
        faulty = {*self._faults, *(files.run for files in runs if files.faults)}
        if faulty:
            windows, columns = _kept(windows, columns, ~windows["run"].isin(faulty).to_numpy())
            windows["run"] = windows["run"].cat.remove_unused_categories()
            segments = segments[~segments["run"].isin(faulty)].reset_index(drop=True)
            evaluations, devices = (one[~one["run"].isin(faulty)] for one in (evaluations, devices))
            evaluations["run"] = evaluations["run"].cat.remove_unused_categories()
        metrics = metric_rows(evaluations, measured)
        evaluations, devices = (one.reset_index(drop=True) for one in (evaluations, devices))
        loads = _loads(windows, columns)
        phases, memory = _window_frames(windows.drop(columns="cpu_mhz"), columns)
        faults = {run: sentences for run, sentences in self._faults.items() if sentences}
        return RecordFrames(
            phases, memory, loads, evaluations, metrics, segments, devices, faults, frozenset(self._sealed)
        )


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
    windows = pd.DataFrame({name: columns.pop(name) for name in WINDOW_COLUMNS if name in columns})
    windows = windows.reindex(columns=list(WINDOW_COLUMNS))
    windows.insert(0, "run", _runs(runs))
    windows["segment"] = windows["segment"].fillna(0)  # schema 1 has no segments: no run was resumed
    for name in ("rank", "first_step", "steps", "samples", "segment"):
        windows[name] = windows[name].astype("int64")
    return windows


def _kept(windows: pd.DataFrame, columns: Columns, keep: np.ndarray) -> tuple[pd.DataFrame, Columns]:
    if keep.all():
        return windows, columns
    kept = {name: values[keep] for name, values in columns.items()}
    return windows[keep].reset_index(drop=True), kept


def _loads(windows: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """One row per rank and window in which the load was measured."""
    measured = mapping(columns, "load_seconds")
    absent = np.full(len(windows), np.nan)
    known = ~np.isnan(measured.get("capacity", absent))
    frame = windows.loc[known, ["run", "rank", "first_step", "steps", "cpu_mhz"]].reset_index(drop=True)
    for kind in LOADS:
        frame[f"{kind}_seconds"] = measured.get(kind, absent)[known]
    return frame


def _window_frames(windows: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, pd.DataFrame]:
    seconds = mapping(columns, "seconds")
    if OTHER not in seconds:
        seconds[OTHER] = windows["wall_seconds"].to_numpy() - total_of(seconds, len(windows))
    names = _in_order(list(seconds))
    kept = Cells([seconds.pop(name) for name in names], len(windows))
    phases = long_frame(windows, kept, "phase", names, "seconds")
    for name in ("calls", "sent_bytes"):
        wide = mapping(columns, name)
        phases[name] = np.nan_to_num(kept.pick([wide.get(one) for one in names])).astype("int64")
    wide = mapping(columns, "wait_seconds")
    measured = total_of({one: ~np.isnan(values) for one, values in wide.items()}, len(windows)) > 0
    waited = kept.pick([wide.get(one) for one in names])
    phases["wait_seconds"] = np.where(kept.spread(measured), np.nan_to_num(waited), np.nan)
    kinds = mapping(columns, "memory_bytes")
    sizes = Cells(list(kinds.values()), len(windows))
    memory = long_frame(windows[["run", "rank", "first_step"]], sizes, "kind", list(kinds), "bytes")
    return phases, memory


def _runs(runs: Sequence[tuple[str, int]]) -> pd.Series:
    names = sorted({run for run, _ in runs})
    codes = np.array([names.index(run) for run, _ in runs], dtype="int32")
    each = np.repeat(codes, np.array([count for _, count in runs], dtype="int64"))
    return pd.Series(pd.Categorical.from_codes(each, categories=pd.Index(names, dtype="str")))


def _evaluation_frame(lines: _Lines) -> pd.DataFrame:
    frame = pd.DataFrame.from_records(lines.rows, columns=list(EVALUATION_COLUMNS))
    frame.insert(0, "run", pd.Series(lines.run, dtype="category"))
    for name in EVALUATION_COLUMNS:
        frame[name] = frame[name].astype("str" if name in {"metric", "direction"} else "float64")
    return frame


def _device_frame(lines: _Lines) -> pd.DataFrame:
    for row in lines.rows:
        for name in ("throttle_reasons", "foreign_processes"):
            row[name] = " ".join(map(str, row[name] or ()))
    frame = pd.DataFrame(lines.rows, columns=list(DEVICE_COLUMNS))
    return frame.assign(run=lines.run).astype(DEVICE_COLUMNS)


def _in_order(names: Sequence[str]) -> list[str]:
    """Phases in the order of a step, unknown ones after them, `other` last."""
    known = [name for name in PHASE_ORDER[:-1] if name in names]
    return [*known, *(name for name in names if name not in PHASE_ORDER), OTHER]
