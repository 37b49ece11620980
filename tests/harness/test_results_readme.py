"""Promise: results/README.md names every column of every record and frame, in its section."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from analysis.records.loading import CELL_COLUMNS, LAYER_COLUMNS, load
from harness.runs.attempt_outcome import Outcome, RankExit
from harness.runs.records import KINDS, SCHEMA_VERSION
from kfac_core.phases import Phase

TEXT = (Path(__file__).parents[2] / "results" / "README.md").read_text()


def named_in(section: str) -> set[str]:
    """Words in code quotes under a heading."""
    (body,) = re.findall(rf"^## {re.escape(section)}$(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    body = re.sub(r"^```.*?^```", "", body, flags=re.MULTILINE | re.DOTALL)
    return {word for code in re.findall(r"`([^`]+)`", body) for word in re.findall(r"\w+", code)}


def test_every_field_of_records_and_outcomes_every_phase_and_the_schema_are_named():
    named = named_in("Records: `rank-*.jsonl`")
    for kind in KINDS.values():
        assert {field.name for field in fields(kind)} | {kind.KIND} <= named
    for kind in (Outcome, RankExit):
        assert {field.name for field in fields(kind)} <= named_in("The other files")
    assert {phase.value for phase in Phase} | {"other"} <= named
    assert f"`schema` (now {SCHEMA_VERSION};" in TEXT


def test_every_column_of_every_frame_is_named(tmp_path):
    named = named_in("Frames: `analysis.load`") | named_in("Records: `rank-*.jsonl`")
    (tmp_path / "runs" / "nothing").mkdir(parents=True)
    study = load(tmp_path / "runs" / "nothing")
    frames = {name: getattr(study, name) for name in ("cells", "windows", "evaluations", "environments")}
    for name, frame in frames.items():
        assert name in named
        assert {word for column in frame.columns for word in column.split(".")} <= named, name
    assert set(CELL_COLUMNS) - {"cell_json"} <= named_in("Frames: `analysis.load`")
    assert set(LAYER_COLUMNS) - {"run"} <= named_in("The other files")
