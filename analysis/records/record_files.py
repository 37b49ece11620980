"""Reads record files into long frames: one row per rank, window and phase (or kind of memory), or evaluation.

Python parses evaluations: they are few, and may hold NaN, which the fast reader of windows rejects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.records.long_frames import Cells, long_frame
from analysis.records.segments import COLUMNS, are_effective
from analysis.records.window_lines import (
    OTHER,
    PHASE_ORDER,
    WINDOW_COLUMNS,
    WindowLines,
    mapping,
    read_line,
    total_of,
)
from harness.errors import StoreError
from harness.runs.records import SCHEMA_VERSION, DeviceRecord, EvalRecord, PhaseRecord

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

_SEGMENT = b'"kind": "segment"'
_HEAD = re.compile(rb'\s*\{\s*"schema":\s*(\d+),\s*"kind":\s*"(\w+)"')
_WINDOW_HEAD = f'{{"schema": {SCHEMA_VERSION}, "kind": "phases"'.encode()


@dataclass
class _Lines:
    """Lines of one kind, each with the run and the file that it came from."""

    text: list[bytes] = field(default_factory=list)
    run: list[str] = field(default_factory=list)
    file: list[Path] = field(default_factory=list)

    def add(self, text: bytes, run: str, file: Path) -> None:
        self.text.append(text)
        self.run.append(run)
        self.file.append(file)

    def rows(self) -> list[dict[str, Any]]:
        return [read_line(text, file) for text, file in zip(self.text, self.file, strict=True)]


class RecordFrames(NamedTuple):
    """The record files of a sweep as frames; `run` is the caller's name for an attempt."""

    phases: pd.DataFrame
    memory: pd.DataFrame
    evaluations: pd.DataFrame
    segments: pd.DataFrame
    devices: pd.DataFrame


def read_records(files: Sequence[tuple[str, Path]]) -> RecordFrames:
    """Read record files, given as (run, path); a run's attempts in order.

    A truncated last line, which a killed rank leaves, is skipped, also if a resumed rank continues below it.
    Windows and evaluations that a later segment repeated are left out.

    Raises:
        StoreError: a line is of a newer schema, or is damaged anywhere but at the end of its file.
    """
    windows, evaluations, segments, devices = WindowLines(), _Lines(), _Lines(), _Lines()
    for run, path in files:
        content = path.read_bytes()
        start, count = _bulk(content)
        own = []
        for number, line in enumerate(_whole_lines(content[:start] if count else content), start=1):
            kind = _kind(line, path, number)
            if kind == "phases":
                own.append(line)
            elif kind == "evaluation":
                evaluations.add(line, run, path)
            elif kind == "segment":
                segments.add(line, run, path)
            elif kind == "device":
                devices.add(line, run, path)
        windows.add(b"\n".join(own), len(own), run, path)
        windows.add(content[start:], count, run, path)
    of_segments = _segment_frame(segments)
    phases, memory = _window_frames(windows, of_segments)
    evaluated = _evaluation_frame(evaluations)
    evaluated = evaluated[are_effective(EvalRecord.KIND, evaluated, of_segments)].reset_index(drop=True)
    seen = _device_frame(devices)
    seen = seen[are_effective(DeviceRecord.KIND, seen, of_segments)].reset_index(drop=True)
    return RecordFrames(phases, memory, evaluated, of_segments, seen)


def _bulk(content: bytes) -> tuple[int, int]:
    """Start and number of the windows, if nothing else follows the first one, as in most files.

    Those lines need not be classified one by one. 0 windows: classify every line.
    """
    first = content.find(_WINDOW_HEAD)
    if first < 0 or not content.endswith(b"\n") or (first and content[first - 1 : first] != b"\n"):
        return len(content), 0
    lines = content.count(b"\n", first)
    heads = content.count(b"\n" + _WINDOW_HEAD, first) + 1
    return first, lines if lines == heads else 0


def _whole_lines(content: bytes) -> list[bytes]:
    *lines, tail = content.split(b"\n")
    if tail.strip(b"\0 ") and _whole(tail):  # else the rank was killed while it wrote this line
        lines.append(tail)
    if content.count(_SEGMENT) > 1:
        after = [*lines[1:], b""]
        lines = [
            line for line, next_ in zip(lines, after, strict=True) if _SEGMENT not in next_ or _whole(line)
        ]
    return [line for line in lines if line.strip(b"\0 ")]


def _whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _kind(line: bytes, path: Path, number: int) -> str:
    head = _HEAD.match(line)
    if head is None:
        raise StoreError(f"{path}, line {number} is not a record: {line[:60]!r}")
    schema = int(head[1])
    if schema > SCHEMA_VERSION:
        raise StoreError(
            f"{path}, line {number} has schema {schema}; this version of Kronscale reads schemas up to "
            f"{SCHEMA_VERSION}: update it, or remove this run"
        )
    return head[2].decode()


def _window_frames(lines: WindowLines, segments: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    columns = lines.columns()
    windows = pd.DataFrame({name: columns.pop(name) for name in WINDOW_COLUMNS if name in columns})
    windows = windows.reindex(columns=list(WINDOW_COLUMNS))
    windows.insert(0, "run", _runs(lines.runs))
    windows["segment"] = windows["segment"].fillna(0)  # schema 1 has no segments: no run was resumed
    for name in ("rank", "first_step", "steps", "samples", "segment"):
        windows[name] = windows[name].astype("int64")
    counts = are_effective(PhaseRecord.KIND, windows, segments).to_numpy()
    if not counts.all():
        windows = windows[counts].reset_index(drop=True)
        columns = {name: values[counts] for name, values in columns.items()}

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
    frame = pd.DataFrame.from_records(lines.rows(), columns=list(EVALUATION_COLUMNS))
    frame.insert(0, "run", pd.Series(lines.run, dtype="category"))
    for name in ("checkpoint_seconds", "segment"):
        frame[name] = frame[name].fillna(0)  # schema 1 had neither
    for name in EVALUATION_COLUMNS:
        frame[name] = frame[name].astype("str" if name in {"metric", "direction"} else "float64")
    return frame


def _segment_frame(lines: _Lines) -> pd.DataFrame:
    return pd.DataFrame(lines.rows(), columns=list(COLUMNS)).assign(run=lines.run).astype(COLUMNS)


def _device_frame(lines: _Lines) -> pd.DataFrame:
    rows = lines.rows()
    for row in rows:
        for name in ("throttle_reasons", "foreign_processes"):
            row[name] = " ".join(map(str, row.get(name) or ()))
    return pd.DataFrame(rows, columns=list(DEVICE_COLUMNS)).assign(run=lines.run).astype(DEVICE_COLUMNS)


def _in_order(names: Sequence[str]) -> list[str]:
    """Phases in the order of a step, unknown ones after them, `other` last."""
    known = [name for name in PHASE_ORDER[:-1] if name in names]
    return [*known, *(name for name in names if name not in PHASE_ORDER), OTHER]
