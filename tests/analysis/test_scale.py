"""Promise: the frames of a study equal its lines, whatever the batch size.

The references read every line with Python's own JSON, and group rows with pandas.
"""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest

import analysis.records.window_lines
from analysis.records.loading import load
from analysis.records.window_lines import PHASE_ORDER
from analysis.steps import closure, memory_peaks, rank_phase_costs

pytestmark = pytest.mark.slow

KEYS = ["run", "rank", "phase"]


@pytest.fixture(scope="module", params=[20_000, 1 << 26], ids=["many batches", "one batch"])
def study(request, ordinary_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis.records.window_lines, "_BATCH_BYTES", request.param)
        patch.setattr("analysis.records.loading.cached", lambda path, read: read(path))
        return load(ordinary_folder)


def test_every_number_of_every_line_is_in_the_frames(study, ordinary_folder):
    seconds: dict[tuple[str, int, str], float] = defaultdict(float)
    sizes: dict[tuple[str, int, str], float] = {}
    for path in ordinary_folder.glob("*/attempt-1/rank-*.jsonl"):
        run = f"synthetic/{path.parent.parent.name}/attempt-1"
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "phases":
                for phase, value in record["seconds"].items():
                    seconds[run, record["rank"], phase] += value
                for kind, value in record["memory_bytes"].items():
                    sizes[run, record["rank"], kind] = value
    phases = [f"seconds.{phase}" for phase in PHASE_ORDER if phase != "other"]
    found = study.windows.groupby(KEYS[:2], observed=True)[phases].sum(min_count=1)
    assert found.notna().sum().sum() == len(seconds)
    for (run, rank, phase), total in seconds.items():
        assert found.loc[(run, rank), f"seconds.{phase}"] == pytest.approx(total, rel=1e-12)
    largest = memory_peaks(study).set_index(["run", "rank", "kind"])["bytes"]
    assert largest.to_dict() == sizes


def test_costs_equal_rows_that_are_added_up_one_by_one(study):
    sums: dict[tuple[str, int, str], float] = defaultdict(float)
    steps: dict[tuple[str, int], int] = defaultdict(int)
    for row in study.windows[study.windows["first_step"] > 0].to_dict("records"):
        steps[row["run"], row["rank"]] += row["steps"]
        for phase in PHASE_ORDER:
            if not np.isnan(row[f"seconds.{phase}"]):
                sums[row["run"], row["rank"], phase] += row[f"seconds.{phase}"]
    costs = rank_phase_costs(study).set_index(KEYS)["seconds_per_step"]
    assert costs.to_dict() == pytest.approx({key: total / steps[key[:2]] for key, total in sums.items()})
    assert closure(study)["closes"].all()
