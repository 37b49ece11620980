"""Promise: what runs can decide is known before they are paid for, and said when it is too little."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest
from scipy import stats

from analysis.comparisons import comparisons
from analysis.metrics import time_to_accuracy
from analysis.report.findings import findings
from analysis.statistics.intervals import ratio
from analysis.statistics.power import decidable, detectable_ratio, repeats_for
from harness.cli import main
from harness.study.plan_summary import planned_comparisons
from tests.analysis.conftest import Plan, make_cell
from tests.analysis.hand_made import Run, hand_made

SWEEP = """\
sweep: synthetic
workload: digits
target: {metric: accuracy, at_least: 0.95}
training: {global_batch_size: 64, epochs: 12}
optimizer: {lr: 0.1}
methods:
  - {name: sgd}
  - {name: adam, optimizer: {name: adam}}
  - {name: comm_opt, kfac: {}}
grid: {world_size: [1, 2]}
repeats: 4
"""


@pytest.mark.parametrize(("runs", "comparisons_"), [(3, 0), (4, 1), (5, 6), (6, 23)])
def test_few_runs_decide_few_comparisons(runs, comparisons_):
    assert decidable(runs) == comparisons_
    if runs > 3:
        assert repeats_for(comparisons_) == runs
        assert repeats_for(comparisons_ + 1) == runs + 1


def test_a_detectable_ratio_is_found_in_about_three_of_four_studies():
    scatter, runs, family, random = 0.1, 8, 6, Random(1)  # noqa: S311  simulated seconds
    effect = detectable_ratio(scatter, runs, family)
    level = 2 * 45 / math.comb(16, 8)  # of ranks, U <= 7: six times it is still below 5 %
    spread = stats.t.ppf(1 - level / 2, 14) + stats.t.ppf(0.8, 14)
    assert effect == pytest.approx(math.exp(spread * scatter * math.sqrt(2 / runs * math.pi / 3)), rel=1e-4)
    found = 0
    for _ in range(400):
        slow = [effect * random.lognormvariate(0, scatter) for _ in range(runs)]
        fast = [random.lognormvariate(0, scatter) for _ in range(runs)]
        p = ratio(slow, fast).p_value
        found += p is not None and p * family < 0.05
    assert 0.7 <= found / 400 <= 0.85
    assert detectable_ratio(scatter, 4, 2) is None
    assert detectable_ratio(scatter, 4, 1) is not None


def test_the_report_says_what_its_runs_cannot_decide_and_three_decide_nothing(tmp_path):
    runs = [Run(method, size, seed, 8, seconds * (1 + 0.01 * ((seed * shift) % 5)))
            for method, seconds, shift in (("sgd", 30.0, 2), ("comm_opt", 3.0, 3), ("dp_kfac", 4.0, 1))
            for size in (1, 2) for seed in range(4)]  # fmt: skip
    (said,) = findings(hand_made(tmp_path / "four", runs))
    assert said.startswith(
        "With 4 runs of each arm 4 comparisons cannot be decided at 5 %; that needs at least 5 runs: "
        "comm_opt on 1 rank (10×"
    )
    one = [run for run in runs if run.world_size == 1 and run.method != "dp_kfac"]
    study = hand_made(tmp_path / "three", [run for run in one if run.seed < 3])
    (found,) = comparisons(study, time_to_accuracy(study)).values()
    assert (found.holm_p, found.verdict) == (None, "undecided")
    assert "With 3 runs of each arm 1 comparison cannot be decided at 5 %" in findings(study)[0]
    equal = [replace(run, seconds=run.seconds / 10 if run.method == "sgd" else run.seconds) for run in one]
    (said,) = findings(hand_made(tmp_path / "equal", equal))
    assert said.startswith("Nothing is decided at 5 % after Holm: comm_opt on 1")  # four can decide one


def test_plan_says_what_the_study_can_decide(tmp_path, capsys):
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    assert main(["plan", "-f", str(file), "--runs", str(tmp_path / "runs")]) == 0
    said = "comparisons: 4 with a first-order arm, n = 4: cannot decide them at 5 %; 5 repeats can"
    assert said in capsys.readouterr().out
    file.write_text(SWEEP.replace("repeats: 4", "repeats: 6"))
    assert main(["plan", "-f", str(file), "--runs", str(tmp_path / "runs")]) == 0
    assert "n = 6: can decide them at 5 %" in capsys.readouterr().out


def test_plan_uses_the_scatter_of_earlier_runs(tmp_path):
    """Four runs of one point, whose logs have the standard deviation 0.1."""
    logs = [-0.1, -0.1 * math.sqrt(0.5), 0.1 * math.sqrt(0.5), 0.1]
    runs = [Run("sgd", 1, seed, 1, 30 * math.exp(log)) for seed, log in enumerate(logs)]
    hand_made(tmp_path, runs)
    cells = [make_cell(method, 1, seed, Plan(), {}) for method in ("sgd", "comm_opt") for seed in range(4)]
    planned = planned_comparisons(cells, tmp_path / "runs")
    assert (planned.count, planned.runs) == (1, 4)
    assert planned.scatter == pytest.approx(math.sqrt(0.03 / 3))


def test_planning_loads_neither_scipy_nor_pandas():
    modules = "analysis.statistics.power, harness.study.plan_summary"
    code = f"import sys, {modules}; print(sorted({{'pandas', 'scipy', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_plan_counts_the_arm_with_fewest_runs_and_no_trials(tmp_path):
    seeds = {"sgd": 5, "comm_opt": 4, "dp_kfac": 2}
    cells = [make_cell(method, 1, seed, Plan(), {}) for method, n in seeds.items() for seed in range(n)]
    planned = planned_comparisons(cells, tmp_path)
    assert (planned.count, planned.runs) == (2, 2)
    trials = [cell.model_copy(update={"trial": 1}) for cell in cells]
    assert planned_comparisons(trials, tmp_path).count == 0
