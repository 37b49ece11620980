"""Promise: the frames of a large study equal its lines, whatever the batch size.

The references read every line with Python's own JSON, and group rows with pandas.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import analysis.records.window_lines
from analysis.records.tables import load
from analysis.steps import closure, rank_phase_costs
from tests.analysis.large_study import write_study

pytestmark = pytest.mark.slow

KEYS = ["run", "rank", "phase"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("scale") / "runs" / "scale"
    assert write_study(path, 30_000) >= 30_000
    return path


@pytest.fixture(scope="module", params=[20_000, 1 << 26], ids=["many batches", "one batch"])
def study(request, folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis.records.window_lines, "_BATCH_BYTES", request.param)
        patch.setattr("analysis.records.tables.cached", lambda path, read: read(path))
        return load(folder)


def test_every_number_of_every_line_is_in_the_frames(study, folder):
    seconds: dict[tuple[str, int, str], float] = defaultdict(float)
    sizes: dict[tuple[str, int, str], float] = {}
    for path in folder.glob("*/attempt-1/rank-*.jsonl"):
        run = f"scale/{path.parent.parent.name}/attempt-1"
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "phases":
                for phase, value in record["seconds"].items():
                    seconds[run, record["rank"], phase] += value
                for kind, value in record["memory_bytes"].items():
                    sizes[run, record["rank"], kind] = value
    found = study.phases.groupby(KEYS, observed=True)["seconds"].sum()
    assert len(found) == len(seconds)
    assert np.allclose([found[key] for key in seconds], list(seconds.values()), rtol=1e-12)
    largest = study.memory_peaks.set_index(["run", "rank", "kind"])["bytes"]
    assert largest.to_dict() == sizes


def test_aggregated_windows_equal_grouped_rows(study):
    phases = study.phases.sample(frac=1.0, random_state=0).sort_values(["run", "rank", "first_step"])
    counts = phases[phases["first_step"] > 0]
    costs = rank_phase_costs(study).set_index(KEYS)["seconds_per_step"]
    sums = counts.groupby(KEYS, observed=True)[["seconds", "steps"]].sum()
    expected = sums["seconds"] / sums["steps"]
    assert np.allclose(costs.reindex(expected.index), expected, rtol=1e-9)
    windows = phases.groupby(["run", "rank", "first_step"], observed=True)
    frame = closure(study).set_index(["run", "rank", "first_step"])
    assert np.allclose(frame["claimed_seconds"], windows["seconds"].sum().reindex(frame.index))
    assert frame["closes"].all()


def test_rows_of_a_window_lie_side_by_side(study):
    keys = study.phases[["run", "rank", "first_step"]].astype({"run": "str"})
    changes = (keys != keys.shift()).any(axis=1).sum()
    assert changes == len(keys.drop_duplicates()) == len(study.windows.frame)
    assert isinstance(study.phases["phase"].dtype, pd.CategoricalDtype)
