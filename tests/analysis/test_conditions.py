"""Promise: the report tests for drift, order, unequal work and load, and says what they change."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.comparisons import comparisons
from analysis.conditions import (
    cells_to_repeat,
    disturbed,
    disturbed_blocks,
    drift,
    equal_work,
    gaps,
    loads,
    without_disturbed,
)
from analysis.metrics import time_to_accuracy
from analysis.records.loading import load
from analysis.report.conditions import checks
from analysis.report.findings import findings
from analysis.report.study_facts import runs_table
from analysis.statistics.trend import trend
from tests.analysis.conftest import Plan
from tests.analysis.hand_made import Run, hand_made

BLOCKS = 6


def block_study(folder, slow=lambda place, seed: 1.0, order=None, methods=("sgd", "comm_opt"), **options):
    """Six blocks of one run of each arm, 100 s each; K-FAC needs half the epochs; 1 % scatter.

    Args:
        slow: factor of the seconds, from the place in time and the seed.
        order: the arms of a block, from its number; alternating by default.
    """
    random = Random(1)  # noqa: S311  simulated seconds
    runs = []
    for seed in range(BLOCKS):
        arms = order(seed) if order else methods[:: 1 if seed % 2 else -1]
        for place, method in enumerate(arms, start=seed * len(methods)):
            seconds = slow(place, seed) * (1 + 0.01 * random.random())
            epochs = 8 if method == "sgd" else 4
            one = Run(method, 1, seed, epochs, seconds, allocation=f"job{seed}", started=100.0 * place)
            runs.append(replace(one, **{name: of(seed) for name, of in options.items()}))
    return hand_made(folder, runs)


def sentences(study):
    return [check.sentence for check in checks(study)]


def test_a_trend_is_kendalls_with_ties_or_without():
    rng = np.random.default_rng(0)
    plain = np.arange(12.0), rng.normal(0, 1, 12) + 0.1 * np.arange(12)
    tied = np.array([1.0, 1, 1, 3, 4, 5, 6, 7]), np.array([3.0, 3, 2, 5, 5, 7, 5, 7])
    for times, values in (plain, tied):
        reference = stats.kendalltau(times, values, method="asymptotic").pvalue
        pairs = [(i, j) for i in range(len(times)) for j in range(i)]
        statistic = sum(np.sign(times[i] - times[j]) * np.sign(values[i] - values[j]) for i, j in pairs)
        deviation = abs(statistic) / stats.norm.isf(reference / 2)  # SciPy makes no correction for continuity
        trended = trend([(times, values)])
        assert trended.p_value == pytest.approx(2 * stats.norm.sf((abs(statistic) - 1) / deviation))
        assert trend([(times[::-1], values[::-1])]) == trended  # in any order of rows
    assert trend([(times[:4], values[:4])]).p_value is None


def test_drift_is_found_with_its_size_and_does_not_change_the_verdict(tmp_path):
    study = block_study(tmp_path, slow=lambda place, seed: 1.1**place)
    found = drift(equal_work(study))
    assert found.p_value < 0.001
    said = " ".join(sentences(study))
    assert "Drift over the study: of two runs of the same arm the steps of the later one took" in said
    assert "% longer (median; p = " in said
    (one,) = comparisons(study, time_to_accuracy(study)).values()
    assert (one.verdict, round(one.speedup.estimate, 1)) == ("faster", 2.0)
    scatter = (1.02, 1.05, 1.0, 1.03, 1.01, 1.04)
    apart = [  # an arm that is slower and ran later is no drift, and unequal work
        Run(method, 2, seed, 2, seconds * scatter[seed], started=start + 100 * seed)
        for method, seconds, start in (("sgd", 1.0, 0), ("comm_opt", 1.43, 600))
        for seed in range(6)
    ]
    runs = equal_work(study := hand_made(tmp_path / "apart", apart))
    assert drift(runs).p_value > 0.5
    (gap,) = gaps(runs)
    assert (gap.fast, gap.slow, gap.world_size, gap.ratio) == ("sgd", "comm_opt", 2, pytest.approx(1.43))
    assert (
        "on 2 ranks forward and backward, the same work, took 1.43 times as long in comm_opt as in sgd"
        in (sentences(study)[0])
    )


def test_a_quiet_study_is_said_to_be_quiet(tmp_path):
    equal, drifted, order, disturbed_ones = sentences(block_study(tmp_path, foreign=lambda seed: 0.01))
    assert equal == "Equal work: forward and backward of all arms of one world size agree within 10%."
    assert drifted.startswith("Drift over the study: none found (p = ")
    assert order == "Order within blocks: too few runs in common blocks to tell."
    assert disturbed_ones == "Disturbed blocks: none."
    two = [Run("sgd", 1, seed, 2, seconds) for seed, seconds in enumerate((1.0, 2.0))]
    assert not disturbed(equal_work(hand_made(tmp_path / "two", two))).any()  # which one is not known


def test_later_runs_of_a_block_that_are_slower_are_noticed(tmp_path):
    methods = ("sgd", "comm_opt", "dp_kfac")

    def order(seed):
        return methods[seed % 3 :] + methods[: seed % 3]

    said = sentences(block_study(tmp_path, lambda place, seed: 1.08 ** (place % 3), order, methods))
    (about,) = [line for line in said if line.startswith("Order within blocks")]
    assert "the later one took 8% longer for its steps" in about


@pytest.mark.parametrize("cause", ["load", "slow"])
def test_conclusions_are_repeated_without_disturbed_blocks(cause, tmp_path):
    """Six blocks decide; two are disturbed, and signed ranks of four cannot."""
    if cause == "load":
        study = block_study(tmp_path, foreign=lambda seed: 0.3 if seed < 2 else 0.0)
    else:
        study = block_study(tmp_path, slow=lambda place, seed: 1.5 if seed < 2 else 1.0)
    assert disturbed_blocks(equal_work(study)) == ["job0", "job1"]
    said = sentences(study)[-1]
    assert "4 of 12 runs" in said
    assert "in 2 of 6 blocks" in said
    assert ("4 lost more than 10%" in said) == (cause == "load")
    assert "Without them all verdicts are the same." in said  # four pairs decide one comparison by t
    most = block_study(tmp_path / "most", foreign=lambda seed: 0.3 if seed < 3 else 0.0)
    assert "Without these blocks too few runs are left for any verdict." in sentences(most)[-1]


def test_arms_that_ran_one_after_the_other_get_no_verdict(tmp_path):
    study = block_study(tmp_path, order=lambda seed: ("sgd", "comm_opt"))
    (one,) = comparisons(study, time_to_accuracy(study)).values()
    assert (one.verdict, one.holm_p) == ("not judged", None)
    assert "Not judged: comm_opt on 1 rank (2× [" in findings(study)[-1]
    assert (
        "comm_opt and sgd ran one after the other, so that drift could make the difference"
        in findings(study)[-1]
    )
    mixed = block_study(tmp_path / "mixed", order=lambda seed: ("sgd", "comm_opt")[:: 1 if seed else -1])
    (one,) = comparisons(mixed, time_to_accuracy(mixed)).values()
    assert one.verdict == "faster"


def test_a_comparison_that_is_refused_is_in_no_family(tmp_path):
    """dp_kfac always runs last in its block; the other two change places."""

    def order(seed):
        return ("sgd", "comm_opt", "dp_kfac") if seed % 2 else ("comm_opt", "sgd", "dp_kfac")

    study = block_study(tmp_path, order=order, methods=("sgd", "comm_opt", "dp_kfac"))
    found = comparisons(study, time_to_accuracy(study))
    assert (found["dp_kfac", 1].verdict, found["dp_kfac", 1].holm_p) == ("not judged", None)
    assert found["comm_opt", 1].holm_p == found["comm_opt", 1].speedup.p_value


def test_unpaired_arms_one_after_the_other_get_no_verdict(tmp_path):
    runs = [Run(method, 1, seed, 8, seconds * (1 + 0.01 * seed), started=start + 100 * seed)
            for method, seconds, start in (("sgd", 3.0, 0), ("comm_opt", 1.0, 400))
            for seed in range(4)]  # fmt: skip
    study = hand_made(tmp_path, runs)
    (one,) = comparisons(study, time_to_accuracy(study)).values()
    assert one.verdict == "not judged"
    at_once = hand_made(tmp_path / "at once", [replace(run, started=0.0) for run in runs])
    (one,) = comparisons(at_once, time_to_accuracy(at_once)).values()
    assert one.verdict == "faster"


@pytest.mark.parametrize(("state", "verdict"), [("TIMEOUT", "not judged"), ("PREEMPTED", "faster")])
def test_runs_that_ended_by_their_own_doing_leave_a_selection_and_no_verdict(state, verdict, tmp_path):
    """A time limit ends slow runs; a preemption does not ask how fast a run is."""
    runs = [Run(method, 1, seed, 8, seconds * (1 + 0.01 * seed), state=state if seed == 5 else "COMPLETED")
            for method, seconds in (("sgd", 3.0), ("comm_opt", 1.0)) for seed in range(6)]  # fmt: skip
    study = hand_made(tmp_path, runs)
    (one,) = comparisons(study, time_to_accuracy(study)).values()
    assert one.verdict == verdict
    assert ("1 of 6 runs of comm_opt ended TIMEOUT, OOM or FAILED" in one.refused) == (state == "TIMEOUT")


def test_a_disturbed_run_takes_its_whole_block_along(tmp_path):
    study = block_study(tmp_path, foreign=lambda seed: 0.5 if seed == 2 else 0.01)
    of_sgd = study.cells.loc[study.cells["method"] == "sgd", "run"]
    lost = study.windows["load_seconds.foreign"].where(study.windows["run"].isin(of_sgd), 0.0)
    study = replace(study, windows=study.windows.assign(**{"load_seconds.foreign": lost}))
    runs = equal_work(study)
    assert runs[disturbed(runs)]["arm"].tolist() == ["sgd"]
    assert cells_to_repeat(study) == set(study.cells[study.cells["seed"] == 2]["cell"])
    assert sorted(without_disturbed(study, runs).cells["seed"]) == [0, 0, 1, 1, 3, 3, 4, 4, 5, 5]
    assert {row["seed"] for row in runs_table(study, {}) if "in a disturbed block" in row["cause"]} == {2}
    assert "`kronscale retry --disturbed` repeats these blocks." in " ".join(sentences(study))
    two_ranks = hand_made(tmp_path / "ranks", [Run("sgd", 2, 0, 2, 1.0, foreign=0.1)])
    more = two_ranks.windows["load_seconds.foreign"].where(two_ranks.windows["rank"] == 0, 0.3)
    two_ranks = replace(two_ranks, windows=two_ranks.windows.assign(**{"load_seconds.foreign": more}))
    assert loads(two_ranks).tolist() == pytest.approx([0.3])  # of the rank that lost most


def test_a_shared_gpu_and_a_hot_one_are_disturbed_and_a_power_cap_is_not(tmp_path):
    study = block_study(tmp_path)
    assert cells_to_repeat(study) == set()
    runs = study.cells.set_index("seed")["run"].groupby(level=0).first()
    columns = {"rank": 0, "segment": 0, "first_step": 0, "steps": 1, "reason": ""}
    windows = [
        {"run": runs[1], "foreign_processes": "77", "throttle_reasons": ""},
        {"run": runs[3], "foreign_processes": "", "throttle_reasons": "sw_power_cap gpu_idle"},
        {"run": runs[4], "foreign_processes": "", "throttle_reasons": "sw_thermal_slowdown"},
    ]
    busy = replace(study, devices=pd.DataFrame([{**columns, **window} for window in windows]))
    assert {one.split("-s")[1][0] for one in cells_to_repeat(busy)} == {"1", "4"}
    assert "2 shared a GPU or had its clock reduced" in " ".join(sentences(busy))


def test_arms_with_one_placement_and_one_traffic_are_named_as_the_same(write_study):
    """With so small factors SPD-KFAC inverts all of them on every rank, as D-KFAC does."""
    methods = ("sgd", "d_kfac", "spd_kfac", "mem_opt")
    rates = ({}, {"optimizer.lr": 0.2})  # another rate takes other steps
    said = sentences(load(write_study(Plan(methods=methods, world_sizes=(1, 2), misses=(), patches=rates))))
    same = {sentence for sentence in said if "computed and sent the same" in sentence}
    assert same == {
        f"{arms} computed and sent the same on {where}: differences between their seconds are noise."
        for rate in (0.1, 0.2)
        for arms, where in (
            (f"d_kfac lr={rate}, mem_opt lr={rate} and spd_kfac lr={rate}", "1 rank"),
            (f"d_kfac lr={rate} and spd_kfac lr={rate}", "2 ranks"),
        )
    }


def with_environment(study, **values):
    """The study, whose runs in the order of seeds have recorded these values, as often as they are."""
    runs = study.cells.sort_values("seed")["run"]
    said = [
        {"run": run, "key": key, "value": of[number % len(of)]}
        for number, run in enumerate(runs)
        for key, of in values.items()
    ]
    return replace(study, environments=pd.DataFrame(said, columns=["run", "key", "value"], dtype="str"))


def test_what_environments_say_of_averaging_precision_and_code(tmp_path):
    study = block_study(tmp_path)
    assert not [said for said in sentences(study) if said.startswith(("Gradients", "Precision", "Code"))]
    ways = with_environment(study, gradient_averaging=["DistributedDataParallel", "flat", "none"])
    said = sentences(ways)[0]
    assert said.startswith("Gradients were averaged by DistributedDataParallel, during the backward pass (4 ")
    assert "in one collective after the backward pass (4 runs)" in said
    emulated = with_environment(study, device=["cpu"], native_bfloat16=["False", "True"])
    fields = study.fields.assign(**{"training.precision": "bfloat16"})
    (said,) = [one for one in sentences(replace(emulated, fields=fields)) if one.startswith("Precision")]
    assert said.startswith("Precision: 6 of 12 runs computed in bfloat16 on CPUs that emulate it")
    for commits, dirty, expected, warns in (
        ("a", ["False"], "", None),
        ("a", ["True", *["False"] * 5], "in 2 of 12 runs files differed from the commit", True),
        ("ab", ["False"], "6 of 6 blocks have runs of several commits", True),
        (["a", "a", "b", "b"], ["False"], "runs of 2 commits, each block of one.", False),
    ):
        code = checks(with_environment(study, commit=commits, dirty=dirty))
        code = [check for check in code if check.sentence.startswith("Code")]
        assert [check.warns for check in code] == ([] if warns is None else [warns])
        assert all(check.sentence.startswith(f"Code: {expected}") for check in code)
