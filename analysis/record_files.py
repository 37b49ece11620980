"""Record files to long frames: one row per rank, window and phase (or kind of memory), or per evaluation.

Window records are the bulk, so all files of a sweep go through one call of pyarrow's JSON reader.
Evaluations are few and may hold NaN, which that reader refuses; Python reads those.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import json as arrow_json

from analysis.segments import COLUMNS, standing
from harness.errors import StoreError
from harness.records import SCHEMA_VERSION
from kfac_core.phases import Phase

OTHER = "other"
"""The part of a window's wall time that no phase claims."""

PHASE_ORDER = (*(phase.value for phase in Phase), OTHER)
WINDOW_COLUMNS = ("rank", "first_step", "steps", "samples", "wall_seconds")
EVALUATION_COLUMNS = (
    "step", "epoch", "samples", "train_seconds", "eval_seconds", "wall_seconds",
    "metric", "value", "direction", "train_loss", "learning_rate", "checkpoint_seconds", "segment",
)  # fmt: skip

_SEGMENT = b'"kind": "segment"'
_HEAD = re.compile(rb'\s*\{\s*"schema":\s*(\d+),\s*"kind":\s*"(\w+)"')


class RecordFrames(NamedTuple):
    """What the record files of a sweep say; `run` is the caller's name for an attempt."""

    phases: pd.DataFrame
    memory: pd.DataFrame
    evaluations: pd.DataFrame
    segments: pd.DataFrame


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


def read_records(files: Sequence[tuple[str, Path]]) -> RecordFrames:
    """Read record files, given as (run, path); a run's attempts in order.

    A last line cut short, as a killed rank leaves it, is skipped, also where a resumed rank wrote on below.
    Windows and evaluations that a later segment did again are left out.

    Raises:
        StoreError: a line is of a newer schema, or is damaged anywhere but at the end of its file.
    """
    windows, evaluations, segments = _Lines(), _Lines(), _Lines()
    for run, path in files:
        for number, line in enumerate(_whole_lines(path), start=1):
            kind = _kind(line, path, number)
            if kind == "phases":
                windows.add(line, run, path)
            elif kind == "evaluation":
                evaluations.add(line, run, path)
            elif kind == "segment":
                segments.add(line, run, path)
    of_segments = _segment_frame(segments)
    phases, memory = _window_frames(windows, of_segments)
    evaluated = _evaluation_frame(evaluations)
    evaluated = evaluated[standing(evaluated, evaluated["step"], of_segments)].reset_index(drop=True)
    return RecordFrames(phases, memory, evaluated, of_segments)


def _whole_lines(path: Path) -> list[bytes]:
    *lines, tail = path.read_bytes().split(b"\n")
    if tail.strip(b"\0 "):
        try:
            json.loads(tail)
        except ValueError:
            pass  # the rank was killed while it wrote this line
        else:
            lines.append(tail)
    if sum(line.count(_SEGMENT) for line in lines) > 1:
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
        raise StoreError(f"{path}, line {number} is no record: {line[:60]!r}")
    schema = int(head[1])
    if schema > SCHEMA_VERSION:
        raise StoreError(
            f"{path}, line {number} has schema {schema}; this version of Kronscale reads schemas up to "
            f"{SCHEMA_VERSION}: update it, or leave this run out"
        )
    return head[2].decode()


def _window_frames(lines: _Lines, segments: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    table = _window_table(lines)
    windows = pd.DataFrame({name: _numbers(table[name]) for name in WINDOW_COLUMNS})
    windows.insert(0, "run", pd.Series(lines.run, dtype="category"))
    for name in ("rank", "first_step", "steps", "samples"):
        windows[name] = windows[name].astype("int64")
    windows["segment"] = _segment_numbers(table)
    counts = standing(windows, windows["first_step"] + windows["steps"], segments).to_numpy()
    windows, table = windows[counts].reset_index(drop=True), table.filter(pa.array(counts))

    seconds = _wide(table["seconds"])
    if OTHER not in seconds:
        seconds[OTHER] = windows["wall_seconds"] - seconds.sum(axis=1)
    seconds = seconds[_in_order(seconds.columns)]
    phases = _long(windows, seconds, "phase", "seconds")
    for name in ("calls", "sent_bytes"):
        wide = _wide(table[name]).reindex(columns=seconds.columns).fillna(0)
        phases[name] = wide.to_numpy(dtype="int64")[~np.isnan(seconds.to_numpy(dtype=float))]
    memory = _long(windows[["run", "rank", "first_step"]], _wide(table["memory_bytes"]), "kind", "bytes")
    return phases, memory


def _window_table(lines: _Lines) -> Any:
    if not lines.text:
        mapping = pa.struct([])
        return pa.table(
            {name: pa.array([], pa.float64()) for name in WINDOW_COLUMNS}
            | {name: pa.array([], mapping) for name in ("seconds", "calls", "sent_bytes", "memory_bytes")}
        )
    try:
        return arrow_json.read_json(io.BytesIO(b"\n".join(lines.text)))
    except pa.ArrowInvalid:
        # A damaged line, or a NaN that arrow's grammar lacks: slower, but it names the line.
        return pa.Table.from_pylist([_record(*where) for where in zip(lines.text, lines.file, strict=True)])


def _evaluation_frame(lines: _Lines) -> pd.DataFrame:
    rows = [_record(*where) for where in zip(lines.text, lines.file, strict=True)]
    frame = pd.DataFrame.from_records(rows, columns=list(EVALUATION_COLUMNS))
    frame.insert(0, "run", pd.Series(lines.run, dtype="category"))
    for name in ("checkpoint_seconds", "segment"):
        frame[name] = frame[name].fillna(0)  # schema 1 had neither
    for name in EVALUATION_COLUMNS:
        frame[name] = frame[name].astype("str" if name in {"metric", "direction"} else "float64")
    return frame


def _segment_frame(lines: _Lines) -> pd.DataFrame:
    rows = [_record(*where) for where in zip(lines.text, lines.file, strict=True)]
    return pd.DataFrame(rows, columns=list(COLUMNS)).assign(run=lines.run).astype(COLUMNS)


def _segment_numbers(table: Any) -> np.ndarray:
    """Of every window; those of schema 1, which does not say, were written in one piece."""
    if "segment" not in table.column_names:
        return np.zeros(table.num_rows, dtype="int64")
    numbers: np.ndarray = np.nan_to_num(_numbers(table["segment"])).astype("int64")
    return numbers


def _record(line: bytes, path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise StoreError(f"{path} holds a damaged record ({error}): {line[:60]!r}") from None
    return record


def _wide(column: Any) -> pd.DataFrame:
    """A column of mappings as one float column per key; NaN where a record lacks the key."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_struct(array.type):
        return pd.DataFrame(index=range(len(array)))
    keys = [array.type.field(i).name for i in range(array.type.num_fields)]
    return pd.DataFrame({key: _numbers(array.field(key)) for key in keys}, index=range(len(array)))


def _numbers(array: Any) -> np.ndarray:
    return np.asarray(array.to_pandas(), dtype=float)


def _long(windows: pd.DataFrame, wide: pd.DataFrame, key: str, value: str) -> pd.DataFrame:
    """One row per window and column of `wide` that is not NaN, windows outermost."""
    values = wide.to_numpy(dtype=float)
    row, column = np.nonzero(~np.isnan(values))
    frame = windows.iloc[row].reset_index(drop=True)
    frame[key] = pd.Categorical.from_codes(column, categories=wide.columns)
    frame[value] = values[row, column]
    return frame


def _in_order(names: Sequence[str] | pd.Index) -> list[str]:
    """Phases in the order of a step, unknown ones after them, `other` last."""
    known = [name for name in PHASE_ORDER[:-1] if name in names]
    return [*known, *(name for name in names if name not in PHASE_ORDER), OTHER]
