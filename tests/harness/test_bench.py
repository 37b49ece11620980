"""Promise: `kronscale bench core` times real steps on real ranks; its averages are those of the intervals."""

import csv
import json
from collections.abc import Iterator

import pytest
from torch import nn

from harness.bench.ablation import PHASES, compare
from harness.bench.core import amortised, slowest, summary
from harness.bench.median import median_interval
from harness.bench.replica import MODELS
from harness.cli import main


def factor_sizes(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            yield from (module.in_channels * module.kernel_size[0] ** 2, module.out_channels)
        if isinstance(module, nn.Linear):
            yield from (module.in_features + 1, module.out_features)


def test_an_inverse_period_is_one_full_step_its_factor_steps_and_the_rest():
    seconds = {"full": 1000.0, "factor": 100.0, "plain": 1.0}
    assert amortised(seconds, 1, 1) == 1000.0
    assert amortised(seconds, 10, 10) == pytest.approx((1000 + 9) / 10)
    assert amortised(seconds, 10, 100) == pytest.approx((1000 + 9 * 100 + 90) / 100)


def test_a_repetition_takes_as_long_as_its_slowest_rank():
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]
    step = {"total": 4.0, "scale": 1.0}
    rank = {
        "sgd": [2.0, 2.0], "kinds": {kind: [step] for kind in ("full", "factor", "plain")}, "calls": {},
        "memory": {}, "rates": {}, "floors": {"scale": 0.5},
        "shapes": {"one": [2, 3], "two": [2, 3], "three": [4, 3]},
        "layers": [{"one": {"precondition": 1.0}, "two": {"precondition": 3.0}}] * 2,
        "layer_floors": {name: {"precondition": 1.0} for name in ("one", "two", "three")},
    }  # fmt: skip
    figures = summary([rank, {**rank, "sgd": [1.0, 1.0]}])
    assert figures["sgd"]["median"] == 2.0
    assert figures["ratios"]["10/100"] == pytest.approx(2.0)
    assert figures["phases"]["scale"]["of_sgd"]["plain"] == 0.5
    assert figures["phases"]["scale"]["fraction_of_floor"] == 0.5
    small, large = figures["layers"]
    assert small["count"] == 2
    assert small["precondition"] == {"seconds": 2.0, "floor_seconds": 1.0, "fraction_of_floor": 0.5}
    assert large == {"shape": [4, 3], "count": 1}, "rank 0 does not precondition it"


@pytest.mark.ranks
def test_two_ranks_are_measured(tmp_path, capfd):
    out = tmp_path / "core.json"
    code = main(
        ["bench", "core", "--batch", "2", "--ranks", "2", "--repeats", "1", "--by-layer", "--json", str(out)]
    )
    assert code == 0, capfd.readouterr().err
    figures = json.loads(out.read_text())
    assert len(figures["ranks"]) == 2
    assert figures["rates"]["flops"] >= figures["rates"]["blas_flops"] > 0
    for rank in figures["ranks"]:
        for step in rank["kinds"]["full"]:
            assert sum(step.values()) - step["total"] == pytest.approx(step["total"], rel=0.02)
        assert rank["kinds"]["plain"][0].get("factor_compute", 0.0) == 0.0
    assert figures["calls"] == {
        "gradient_comm": 0,
        "factor_comm": 2,
        "inverse_comm": 1,
        "precondition_comm": 0,
    }
    assert figures["phases"]["precondition"]["floor_seconds"] > 0
    received = sum(
        rank["floors"]["factor_comm"] * rank["rates"]["copy_bytes"] / 2 for rank in figures["ranks"]
    )
    packed = sum(n * (n + 1) // 2 for n in factor_sizes(MODELS["resnet32"].build()))
    assert received == pytest.approx(4 * packed), "each factor's triangle reaches its one owner once"
    assert sum(kind["count"] for kind in figures["layers"]) == 32
    assert all(0 < kind["factor_compute"]["fraction_of_floor"] < 2 for kind in figures["layers"])
    assert "factor_compute" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "vgg"], "--model 'vgg' is not one of resnet32, resnet50"),
        (["--strategy", "commopt"], "did you mean comm_opt?"),
        (["--set", "{"], "--set must be JSON"),
        (["--set", '{"dampng": 1}'], "dampng"),
    ],
)
def test_bad_settings_are_errors_before_a_rank_starts(arguments, message, capfd):
    assert main(["bench", "core", *arguments]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.ranks
def test_the_timers_cost_is_measured_in_pairs_and_computed_from_its_entries(tmp_path, capfd):
    out, table = tmp_path / "overhead.json", tmp_path / "overhead.csv"
    words = ["bench", "instrument", "--batch", "2", "--pairs", "6", "--json", str(out), "--csv", str(table)]
    assert main(words) == 0
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert (row["model"], row["pairs"], float(row["overhead_low"]) <= float(row["overhead_high"])) == (
        "resnet32",
        "6",
        True,
    )
    figures = json.loads(out.read_text())
    assert len(figures["on_seconds"]) == len(figures["off_seconds"]) == 6
    layers = 32  # of ResNet-32; two grams each, and seven phases of the step itself
    assert figures["entries_per_step"] >= 2 * layers + 7
    assert figures["computed_overhead"] == pytest.approx(
        figures["entries_per_step"] * figures["seconds_per_entry"] / sorted(figures["off_seconds"])[2],
        rel=0.5,
    )
    assert figures["overhead"]["low"] <= figures["overhead"]["median"] <= figures["overhead"]["high"]
    assert "overhead, median of 6 pairs" in capfd.readouterr().out


def test_limits_of_a_median_are_order_statistics_that_cover_it():
    values = [float(n) for n in range(1, 31)]
    # tables of the sign test, n = 30
    assert median_interval(values) == {"median": 15.5, "low": 10.0, "high": 21.0}
    assert median_interval(values[:6]) == {"median": 3.5, "low": 1.0, "high": 6.0}


def test_compare_takes_the_slowest_rank_of_computing_and_the_fastest_of_communication():
    def rank(phase: str, whole: float, part: float, timer: float) -> list[dict[str, float]]:
        wall = {"with_seconds": whole, "without_seconds": part}
        timed = {f"timed_{name}": seconds for name, seconds in wall.items()}
        twice = {"twice_seconds": whole + timer} if phase == "inverse_compute" else {}
        return [{**wall, **timed, **twice, "timer_seconds": timer, "calls": 1}] * 6

    table = compare([
        {"inverse_compute": rank("inverse_compute", 10, 6, 3), "factor_comm": rank("factor_comm", 10, 8, 5)},
        {"inverse_compute": rank("inverse_compute", 9, 5, 1), "factor_comm": rank("factor_comm", 9, 5, 2)},
    ])  # fmt: skip
    inverse, comm = table["inverse_compute"], table["factor_comm"]
    assert inverse["timer"]["median"] == 3
    assert inverse["ablation"]["median"] == 10 - 6
    assert inverse["doubling"]["median"] == 3
    assert inverse["elsewhere"]["median"] == 1
    assert not inverse["alone"]
    assert inverse["agree"], "between what leaving out takes and what doing twice adds"
    assert comm["timer"]["median"] == comm["ablation"]["median"] == comm["doubling"]["median"] == 2
    assert comm["alone"]


@pytest.mark.parametrize(
    ("booked", "agree"), [(2.7, False), (3.0, True), (3.5, True), (4.0, True), (4.4, False)]
)
def test_a_timer_that_books_a_tenth_too_little_or_too_much_disagrees(booked, agree):
    wall = {
        "with_seconds": 10,
        "without_seconds": 6,
        "twice_seconds": 13,
    }  # one of the four seconds is other phases'
    timed = {"timed_with_seconds": 10, "timed_without_seconds": 6, "timer_seconds": booked, "calls": 1}
    table = compare([{"scale": [wall | timed] * 6}])
    assert table["scale"]["agree"] == agree
    assert table["scale"]["alone"] == (booked == 4.0)


# The demo's mem_opt, smaller, with a shorter inverse period: a round has five of them.
ONE_CELL = """\
sweep: one
workload: {name: digits, options: {width: 4}}
target: {metric: accuracy, at_least: 0.97}
training: {global_batch_size: 32, epochs: 60}
optimizer: {lr: 0.4, momentum: 0.9, warmup_epochs: 2}
kfac: {damping: 0.003, factor_update_steps: 1, inverse_update_steps: 2}
methods: [{name: mem_opt, kfac: {strategy: mem_opt}}]
world_size: 2
repeats: 1
"""


@pytest.mark.ranks
def test_ablation_finds_each_phase_of_a_real_cell_at_two_ranks(tmp_path, capfd):
    sweep, table = tmp_path / "one.yaml", tmp_path / "ablation.csv"
    sweep.write_text(ONE_CELL)
    words = ["bench", "ablation", "-f", str(sweep), "--rounds", "6", "--csv", str(table)]
    assert main(words) == 0, capfd.readouterr().err
    rows = {row["phase"]: row for row in csv.DictReader(table.read_text().splitlines())}
    none = {"inverse_comm"}  # mem_opt has none
    assert set(rows) == {phase.value for phase in PHASES} - none
    for row in (
        rows.values()
    ):  # what the phases cost is the machine's: only the synthetic rounds above say yes or no
        assert row["agree"] in ("yes", "between", "no")
        for way in ("timer", "ablation", "doubling"):
            low, median, high = (float(row[f"{way}_{what}_seconds"]) for what in ("low", "median", "high"))
            assert low <= median <= high


def test_ablation_needs_exactly_one_cell_with_kfac(capfd):
    assert main(["bench", "ablation", "-f", "jobs/sweeps/demo.yaml", "--where", "method=sgd"]) == 2
    assert "got 0: none" in capfd.readouterr().err
