"""Promise: every reported ratio points the right way, in frames, text, TeX and the figures' CSVs alike.

In the study, K-FAC needs half of SGD's 8 epochs. Two ranks take 3 s for an epoch of SGD and 2 s for one of
K-FAC; four ranks are 1.6 and 1.8 times as fast. So K-FAC is 2 x 1.5 = 3 times as fast on two ranks and
2 x (3 / 1.6) / (2 / 1.8) = 3.375 times on four.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pandas as pd
import pytest

from analysis.comparisons import comparisons
from analysis.figures.drawing import Drawing
from analysis.metrics import finals, scaling_levels, time_to_accuracy
from analysis.report.findings import cautions, findings
from analysis.report.page import Panel, write_report
from analysis.report.tables import summary_table
from analysis.results import results
from analysis.rules import SCORINGS
from analysis.statistics.intervals import PAIRED_T, SIGNED_RANK
from tests.analysis.hand_made import Run, hand_made

EPOCHS = {"sgd": 8, "comm_opt": 4}
SECONDS = {("sgd", 2): 3.0, ("comm_opt", 2): 2.0, ("sgd", 4): 3 / 1.6, ("comm_opt", 4): 2 / 1.8}


def runs_of(method, size, seeds=range(6), factor=1.0, **options):
    return [
        Run(method, size, seed, EPOCHS[method], factor * SECONDS[method, size] * (1 + 0.01 * seed), **options)
        for seed in seeds
    ]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    runs = [run for method, size in SECONDS for run in runs_of(method, size)]
    return hand_made(tmp_path_factory.mktemp("known"), runs)


@pytest.fixture(scope="module")
def out(study, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drawing, "image", lambda drawing, kind: kind.encode())
        panels = [Panel("time_to_accuracy"), Panel("claims"), Panel("scaling")]
        return write_report(study, tmp_path_factory.mktemp("report"), panels).parent


def test_frames_have_the_known_ratios(study):
    found = comparisons(study, time_to_accuracy(study))
    two, four = found["comm_opt", 2], found["comm_opt", 4]
    for one, ratios in ((two, (3.0, 2.0, 1.5)), (four, (3.375, 2.0, 1.6875))):
        assert (
            one.speedup.estimate,
            one.fewer_epochs.estimate,
            one.cheaper_epochs.estimate,
        ) == pytest.approx(ratios)
        assert one.verdict == "faster"
        assert one.speedup.p_value == pytest.approx(2 / math.comb(12, 6))
        assert one.holm_p == pytest.approx(2 * 2 / math.comb(12, 6))
    levels = scaling_levels(study).set_index(["arm", "world_size"])
    for arm, speedup in (("sgd", 1.6), ("comm_opt", 1.8)):
        row = levels.loc[(arm, 4)]
        assert row["base_world_size"] == 2
        assert row["speedup"].estimate == pytest.approx(speedup)
        assert row["efficiency"].estimate == pytest.approx(speedup / 2)  # twice the ranks of the base
        assert levels.loc[(arm, 2), "efficiency"].estimate == 1


def test_text_and_tex_have_them(study, out):
    assert findings(study)[1].startswith("comm_opt is faster than sgd on 2 ranks: 3× [")
    assert findings(study)[1].endswith("epochs 2.00 times fewer, an epoch 1.50 times cheaper.")
    row = summary_table(study).set_index(["arm", "world_size"]).loc[("comm_opt", "2")]
    assert row["speedup"].startswith("3× [")
    assert row["fewer_epochs"].startswith("2× [")
    assert row["cheaper_epochs"].startswith("1.5× [")
    assert (row["verdict"], row["epochs"], row["runs"], row["reached"]) == ("faster", "4", 6, 6)
    markdown, tex = ((out / name).read_text(encoding="utf-8") for name in ("report.md", "tables.tex"))
    assert "- comm_opt is faster than sgd on 2 ranks: 3× [" in markdown
    assert re.search(
        r"\| comm_opt \| 2 \| 6 \| 6 \| 8\.2 \[.*?\] \| 3× \[.*?\] \| 2× \[.*?\] \| 1\.5× \[", markdown
    )
    assert re.search(r"comm\\_opt & 2 & 6 & 6 & 8\.2 \[.*?\] & 3\$\\times\$ \[.*?\] & 2\$\\times\$ \[", tex)


def test_the_figures_csv_files_have_them(out):
    claims, scaling, times = (
        pd.read_csv(out / "figures" / f"{name}.csv").set_index(["arm", "world_size"]).sort_index()
        for name in ("claims", "scaling", "time_to_accuracy")
    )
    assert claims.loc[("comm_opt", 2), "percent_saved"].unique() == pytest.approx([100 * 2 / 3])
    assert claims.loc[("comm_opt", 2), "verdict"].unique() == ["faster"]
    assert (claims["low"] <= claims["percent_saved"]).all()
    assert (claims["percent_saved"] <= claims["high"]).all()
    assert claims.loc[("comm_opt", 4), "percent_saved"].unique() == pytest.approx([100 * (1 - 1 / 3.375)])
    assert scaling.loc[("comm_opt", 4), "speedup_estimate"].unique() == pytest.approx([1.8])
    assert scaling.loc[("comm_opt", 4), "efficiency_estimate"].unique() == pytest.approx([0.9])
    base = scaling.loc[("comm_opt", 4), "base_seconds_per_step"].unique()
    assert base == pytest.approx([2.0 * 1.025 / 20])  # of 20 steps on two ranks
    assert times.loc[("sgd", 2), "median_seconds"].unique() == pytest.approx([24 * 1.025])
    assert times["reached"].all()  # a run that ends exactly at the target reached it


def test_the_slower_arm_is_called_slower(tmp_path):
    runs = [*runs_of("sgd", 2), *runs_of("comm_opt", 2, factor=6.0)]
    (said,) = findings(hand_made(tmp_path, runs))
    assert said.startswith("comm_opt is slower than sgd on 2 ranks: 0.5× [")
    assert said.endswith("epochs 2.00 times fewer, an epoch 4.00 times dearer.")


def test_evaluations_count_in_the_order_of_steps_whatever_the_frames_order(study):
    shuffled = study.evaluations.iloc[::-1].reset_index(drop=True)
    late = time_to_accuracy(replace(study, evaluations=shuffled))
    pd.testing.assert_frame_equal(late, time_to_accuracy(study))
    pd.testing.assert_frame_equal(finals(replace(study, evaluations=shuffled)), finals(study))
    early = time_to_accuracy(replace(study, evaluations=shuffled.assign(value=0.95)))
    assert set(early["epochs"]) == {1}  # the first of several at the target, not the last
    cells = study.cells.assign(target_direction="lower", target_value=0.1)
    assert set(time_to_accuracy(replace(study, cells=cells))["epochs"]) == {1}  # as of a loss
    other = study.evaluations.assign(metric="top5", value=1.0)
    both = pd.concat([other, study.evaluations], ignore_index=True).astype(study.evaluations.dtypes.to_dict())
    pd.testing.assert_frame_equal(time_to_accuracy(replace(study, evaluations=both)), time_to_accuracy(study))
    fewer = study.evaluations[study.evaluations["run"].astype("str") != study.cells["run"].iloc[0]]
    for name in ("first", "wall", "mlperf-style"):  # a run that was never evaluated missed on every clock
        unseen = time_to_accuracy(replace(study, evaluations=fewer, scoring=SCORINGS[name]))
        assert len(unseen) == len(study.cells)
        assert unseen.loc[~unseen["reached"], "run"].tolist() == [study.cells["run"].iloc[0]]
        assert unseen.loc[~unseen["reached"], "scored_seconds"].tolist() == [math.inf]


def test_crowded_comparisons_are_in_no_family(tmp_path):
    """Signed ranks of six pairs can decide one comparison but not two: crowded ones must not count."""
    names = {seed: f"block{seed}" for seed in range(6)}
    runs = [
        replace(run, allocation=names[run.seed], oversubscribed=run.world_size == 4)
        for method, size in SECONDS for run in runs_of(method, size)
    ]  # fmt: skip
    found = comparisons(study := hand_made(tmp_path, runs), time_to_accuracy(study))
    two, four = found["comm_opt", 2], found["comm_opt", 4]
    assert two.speedup.method == SIGNED_RANK
    assert two.holm_p == two.speedup.p_value == pytest.approx(2 / 2**6)
    assert (four.holm_p, four.verdict) == (None, "not judged")
    quiet = [replace(run, oversubscribed=False) for run in runs]
    both = comparisons(study := hand_made(tmp_path / "quiet", quiet), time_to_accuracy(study))
    assert both["comm_opt", 2].speedup.method == PAIRED_T


def test_interrupted_runs_have_no_score_and_are_counted(tmp_path):
    """Four runs arrive after 24 s; five were cancelled or lost before: the median is what the four say."""
    arrived = runs_of("sgd", 2, seeds=range(4))
    ended = [Run("sgd", 2, seed, 3, 3.0, state="CANCELLED" if seed < 7 else "LOST") for seed in range(4, 9)]
    study = hand_made(tmp_path, [*arrived, *ended, *runs_of("comm_opt", 2, seeds=range(9))])
    scored = time_to_accuracy(study)
    assert len(scored[scored["arm"] == "sgd"]) == 4
    assert set(finals(study)["state"]) == {"COMPLETED"}
    rows = summary_table(study).set_index("arm")
    assert rows.loc["sgd", "median_seconds"].startswith("24.4")
    assert rows["left_out"].to_dict() == {"sgd": "5 of 9 !", "comm_opt": "0 !"}
    assert (
        "Caution: no runs of comm_opt and 5 of 9 runs of sgd did not complete and are left out."
        in findings(study)[0]
    )
    said = "sgd on 2 ranks: 5 of 9 runs are not scored (3 CANCELLED, 2 LOST), more than a tenth."
    assert said in cautions(study)
    assert findings(hand_made(tmp_path / "none", ended)) == [
        "No run has completed, so none is scored; 5 started."
    ]
    few = [run for method in EPOCHS for run in runs_of(method, 2, seeds=range(20))]
    few = [replace(run, state="LOST") if run.seed == 19 else run for run in few]
    assert "aution" not in " ".join(findings(hand_made(tmp_path / "few", few)))


def test_a_point_where_a_run_stopped_at_its_target_is_not_scored_by_a_sustained_rule(tmp_path):
    """Else only the runs that missed are left: "1 of 1 missed"."""
    fixed = {"training.stop_at_target": False}
    runs = [*runs_of("sgd", 2, seeds=range(5)), Run("sgd", 2, 5, 8, 3.0, misses=True)]
    study = replace(hand_made(tmp_path, [replace(run) for run in runs]), scoring=SCORINGS["sustained"])
    assert time_to_accuracy(study).empty
    assert "cannot score any of 6 runs" in findings(study)[0]
    missed = [Run("sgd", 2, seed, 8, 3.0, misses=True, patch=fixed) for seed in range(3)]
    scored = time_to_accuracy(replace(hand_made(tmp_path / "b", missed), scoring=SCORINGS["sustained"]))
    assert scored["reached"].tolist() == [False] * 3


def test_a_setting_without_cpus_enough_takes_no_verdict_from_another(tmp_path):
    runs = [
        Run(
            method, 2, seed, 4, seconds * (1 + 0.01 * seed), oversubscribed=width == 32,
            allocation=f"b{seed}", started=200.0 * (seed + (method == "sgd") * (-1) ** seed),
            patch={"workload.options": {"width": width}},
        )
        for width in (16, 32)
        for method, seconds in (("sgd", 2.0), ("comm_opt", 1.0))
        for seed in range(8)
    ]  # fmt: skip
    shown = results(hand_made(tmp_path, runs))
    assert {arm: one.verdict for (arm, _), one in shown.comparisons.items()} == {
        "comm_opt width=16": "faster", "comm_opt width=32": "not judged",
    }  # fmt: skip
    assert {place.setting: place.judged for place in shown.places} == {"width=16": True, "width=32": False}
