"""Promise: every metric that a run measured is in frame, figure and report, and older runs load as before."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pandas as pd
import pytest

from analysis.figures import FIGURES, NothingToDraw
from analysis.records.loading import load
from analysis.report.tables import metrics_table
from tests.analysis.conftest import Plan

PLAN = Plan(methods=("sgd", "comm_opt"), world_sizes=(1,), seeds=(0, 1), misses=(), epochs=12)


@pytest.fixture(scope="module")
def made(write_study) -> Path:
    return write_study(PLAN)


def rewritten(made: Path, target: Path, change: Callable[[dict], None], pattern: str = "*") -> Path:
    """A copy of the study whose evaluations another version wrote, with that version's checksums."""
    shutil.copytree(made, target)
    for file in target.glob(f"{pattern}/attempt-1/rank-00000.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "evaluation":
                change(line)
        *content, ended = (json.dumps(line) + "\n" for line in lines)
        text = "".join(content).encode()
        ended = json.loads(ended) | {"bytes": len(text), "crc32": zlib.crc32(text)}
        file.write_bytes(text + json.dumps(ended).encode() + b"\n")
    return target


def as_schema_5(line: dict) -> None:
    line["schema"] = 5
    del line["metrics"]


def test_each_metric_of_an_evaluation_is_a_row(study):
    evaluations, metrics = study.evaluations, study.metrics
    assert len(metrics) == 2 * len(evaluations)
    of_target = metrics[metrics["is_target"]].reset_index(drop=True)
    assert of_target["metric"].unique().tolist() == ["accuracy"]
    for column in ("step", "epoch", "train_seconds", "value"):
        assert of_target[column].tolist() == evaluations[column].tolist()
    loss = metrics[metrics["metric"] == "loss"]["value"].tolist()
    assert loss == (2.5 * (1 - evaluations["value"])).tolist()


def test_runs_of_schema_5_load_as_before_with_their_targets_metric_alone(made, tmp_path):
    new = load(made, cache=False)
    old = load(rewritten(made, tmp_path / "runs" / "synthetic", as_schema_5), cache=False)
    for name in ("windows", "evaluations"):
        pd.testing.assert_frame_equal(getattr(old, name), getattr(new, name))
    assert old.cells["valid"].all()
    expected = new.metrics[new.metrics["is_target"]].reset_index(drop=True)
    pd.testing.assert_frame_equal(old.metrics, expected)
    assert metrics_table(old).empty
    with pytest.raises(NothingToDraw, match="no run has recorded a metric beside its target's"):
        FIGURES["other_metrics"].draw(old)

    mixed = load(rewritten(made, tmp_path / "mixed" / "synthetic", as_schema_5, "sgd-*"), cache=False)
    drawing = FIGURES["other_metrics"].draw(mixed)
    assert set(drawing.numbers["arm"]) == {"comm_opt"}
    assert "2 of 4 cells have no data here (2 COMPLETED)" in drawing.caption
    assert mixed.cells["valid"].all()


def test_the_table_has_every_metric_at_the_end_and_at_the_target(made):
    study = load(made, cache=False)
    table = metrics_table(study).set_index(["arm", "metric"])
    for arm, runs in study.cells.groupby("arm"):
        losses = study.metrics[(study.metrics["metric"] == "loss") & study.metrics["run"].isin(runs["run"])]
        ends = losses.groupby("run")["value"].last()
        crossings = losses[losses["value"] <= 2.5 * (1 - 0.95)].groupby("run")["value"].first()
        assert table.loc[(arm, "loss"), "last"] == f"{median(ends):.3g}"
        assert table.loc[(arm, "loss"), "at_target"] == f"{median(crossings):.3g}"
        assert table.loc[(arm, "loss"), "runs"] == 2


def test_the_figure_shows_what_the_target_does_not_name(study):
    drawing = FIGURES["other_metrics"].draw(study)
    assert [axis.get_ylabel() for axis in drawing.figure.axes] == ["loss", ""]
    largest = study.cells[study.cells["world_size"] == 2]["run"]  # 4 ranks shared the CPUs
    wanted = study.metrics[(study.metrics["metric"] == "loss") & study.metrics["run"].isin(largest)]
    assert sorted(drawing.numbers["value"]) == sorted(wanted["value"])
    assert "beside the target's accuracy" in drawing.caption
