"""Promise: predicted hours are the steps of a sweep times the predicted step, and say what they leave out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.cost_model.calibration_file import read_calibration
from analysis.cost_model.hours import training_seconds
from analysis.cost_model.models import read_model
from analysis.cost_model.prediction import predict
from analysis.cost_model.work import Setup
from analysis.published import published
from harness.cell import Cell
from harness.cli import main
from harness.cli.predicted_hours import hours_of
from harness.study.papers import FOLDER, read_paper
from harness.study.sweep import read_sweep
from harness.workloads import WORKLOADS
from kfac_core.config import KFACConfig
from kfac_core.timing.phases import Phase

MACHINE = read_calibration("eight_gpus")
MEDIUM = sorted(path.parent.name for path in FOLDER.glob("*/medium.yaml"))
NODE, DAY = 8, 24.0


def cell(**changes) -> Cell:
    content = {
        "sweep": "s", "method": "m", "workload": {"name": "cifar10", "options": {"model": "resnet32"}},
        "target": {"metric": "accuracy", "at_least": 0.9}, "training": {"local_batch_size": 128, "epochs": 3},
        "optimizer": {"lr": 0.1}, "world_size": 4,
    }  # fmt: skip
    made = Cell.model_validate(content | changes)
    options = {**WORKLOADS[made.workload.name].options, **made.workload.options}
    return made.model_copy(update={"workload": made.workload.model_copy(update={"options": options})})


def test_hours_are_steps_times_the_predicted_step():
    steps = 3 * (50_000 // 512)
    step = predict(Setup(read_model("resnet32"), None, 4, 128), MACHINE).total
    found = hours_of([cell(), cell(seed=1)], MACHINE)
    assert found.cells == 2
    assert found.longest == pytest.approx(steps * step.central / 3600)
    assert found.rank_hours.central == pytest.approx(2 * 4 * steps * step.central / 3600)
    assert found.rank_hours.low <= found.rank_hours.central <= found.rank_hours.high


def test_epochs_before_kfac_starts_cost_those_of_the_optimizer_alone():
    kfac = {"factor_update_steps": 1, "inverse_update_steps": 1, "solver": "inverse"}
    training = {"local_batch_size": 128, "epochs": 3}
    alone, whole = (training_seconds(cell(kfac=each), MACHINE, 50_000).central for each in (None, kfac))
    late = training_seconds(
        cell(kfac=kfac, training={**training, "kfac_start_epoch": 1}), MACHINE, 50_000
    ).central
    assert whole > 1.2 * alone
    assert late == pytest.approx(alone / 3 + 2 * whole / 3)


def test_micro_batches_that_make_no_factors_cost_kfac_nothing_and_need_less_memory():
    kfac = {"factor_update_steps": 1, "inverse_update_steps": 10, "solver": "inverse"}

    def seconds(**more) -> float:
        training = {"local_batch_size": 128, "epochs": 3, **more}
        return training_seconds(cell(kfac=kfac, training=training), MACHINE, 50_000).central

    whole, quarter = seconds(accumulate=4), seconds(accumulate=4, factor_micro_batches=1)
    assert seconds(accumulate=4, factor_micro_batches=4) == whole
    config = KFACConfig(factor_update_steps=1, inverse_update_steps=10, solver="inverse")
    setup = Setup(read_model("resnet32"), config, 4, 128, micro_batches=4)
    factors = predict(setup, MACHINE).step_seconds[Phase.FACTOR_COMPUTE].central
    steps = 3 * (50_000 // 512)
    assert whole - quarter == pytest.approx(0.75 * steps * factors, rel=0.01)  # less the running means
    at_once = predict(replace(setup, micro_batches=1), MACHINE)
    assert predict(setup, MACHINE).memory_bytes["activations"] * 4 == at_once.memory_bytes["activations"]
    assert whole >= seconds() * 0.999  # smaller products are no faster


def test_what_has_no_table_or_no_known_length_is_counted_and_named():
    digits = cell(workload={"name": "digits", "options": {}})
    unread = cell(workload={"name": "multi30k", "options": {}}, target={"metric": "perplexity", "at_most": 9})
    found = hours_of([cell(), digits, unread, digits], MACHINE)
    assert found.cells == 1
    assert sorted(found.without.values()) == [1, 2]
    assert "2 cells not in it: workload='digits' has no table" in str(found)
    assert "1 cell not in it: the examples of multi30k are counted when they are read" in str(found)


LW = KFACConfig(
    strategy="mem_opt",
    assignment="round_robin",
    solver="eigen",
    factor_update_steps=1,
    inverse_update_steps=10,
)


@pytest.mark.parametrize(
    ("model", "optimizer", "gpus", "local", "examples"),
    [
        ("ResNet-32", "SGD", 4, 128, 50_000),
        ("ResNet-32", "K-FAC-lw", 1, 128, 50_000),
        ("ResNet-50", "K-FAC-lw", 16, 32, 1_281_167),
        ("ResNet-50", "K-FAC-lw", 64, 32, 1_281_167),
    ],
)
def test_the_releases_epochs_are_predicted_within_a_factor_of_two(model, optimizer, gpus, local, examples):
    """SC20's log, of V100 and with loading; the calibration knows ResNet-32's with SGD on one of them."""
    log = published("kfac_lw_log")
    rows = log[(log["model"] == model) & (log["gpus"] == gpus) & (log["optimizer"] == optimizer)]
    table = read_model(model.lower().replace("-", ""))
    step = predict(Setup(table, LW if optimizer != "SGD" else None, gpus, local), MACHINE).total.central
    for seconds in rows["seconds_per_epoch"]:
        assert 0.5 < examples // (gpus * local) * step / seconds < 2


@pytest.mark.parametrize("paper", MEDIUM)
def test_a_medium_size_is_predicted_to_fit_into_a_day_of_eight_gpus(paper):
    _, files = read_paper(paper, "medium")
    cells = [cell for file in files.values() for cell in read_sweep(file).cells]
    assert max(cell.world_size for cell in cells) <= NODE
    found = hours_of(cells, MACHINE)
    assert not found.without
    assert found.cells == len(cells)
    assert 0.3 * DAY < found.rank_hours.central / NODE < DAY
    low, central, high = (getattr(found.rank_hours, name) for name in ("low", "central", "high"))
    row = (
        f"| {paper} | {found.cells} | {central:.0f} ({low:.0f} to {high:.0f}) | {central / NODE:.1f} "
        f"({low / NODE:.1f} to {high / NODE:.1f}) | {found.longest:.1f} h |"
    )
    assert row in Path("docs/papers.md").read_text(encoding="utf-8")


def test_plan_and_the_dry_run_print_the_same_hours(capsys, tmp_path):
    sweep = FOLDER / "sc20/medium/models.yaml"
    command = ["plan", "-f", str(sweep), "--runs", str(tmp_path), "--calibration", "eight_gpus"]
    assert main([*command, "--json"]) == 0
    hours = json.loads(capsys.readouterr().out)["predicted"]["rank_hours"]
    assert main(command) == 0
    words = f"{hours['central']:.3g} rank-hours of training ({hours['low']:.3g} to {hours['high']:.3g})"
    assert f"predicted: {words}" in capsys.readouterr().out
    site = ["--site", "example-eight-gpus", "--runs", str(tmp_path), "--dry-run"]
    assert main(["reproduce", "sc20", "--size", "medium", *site, "--calibration", "eight_gpus"]) == 0
    printed = capsys.readouterr().out
    assert f"{sweep}: predicted: {words}" in printed
    assert "all sweeps: predicted: " in printed
    assert (
        "all sweeps: " in printed.split("calibration eight_gpus: ASSUMED")[1]
    )  # then what it could cost at most


def test_an_unknown_calibration_is_one_line_that_lists_them(capsys, tmp_path):
    command = ["plan", "-f", "jobs/sweeps/demo.yaml", "--runs", str(tmp_path), "--calibration", "nowhere"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "no calibration results/calibrations/nowhere.json" in error
    assert "eight_gpus" in error
    assert not list(Path(tmp_path).iterdir())
