"""Promise: a study predicts larger worlds, exactly where its times follow laws, else within bounds.

The laws are written out in `simulated_study` as formulas of the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from analysis.prediction import bounds
from analysis.prediction.arms import Arm, Measured, World
from analysis.prediction.errors import PredictionError
from analysis.prediction.fitted import waited
from analysis.prediction.laws import Seconds, fit_law
from analysis.prediction.prediction import StudyModel, held_out, study_model
from analysis.prediction.reading import measured
from analysis.records.loading import load
from harness.cell import Cell
from harness.cli import main
from harness.runs.attempt_outcome import Outcome
from harness.runs.layers_file import describe
from harness.runs.record_lines import RecordWriter
from harness.runs.records import EvalRecord, PhaseRecord
from harness.runs.store import SweepFolder
from kfac_core.placement.strategies import place
from tests.analysis.conftest import Plan, make_cell
from tests.analysis.simulated_study import BATCH, COMM, LAYERS, SHAPES, E, N, coverage, step
from tests.analysis.test_held_out_worlds import perceptron

ARMS = ("sgd", "comm_opt", "mem_opt")


def write(sweep: SweepFolder, cell: Cell, *, oversubscribed: bool = False, late: float = 0.0) -> None:
    """A run of three windows that follows the laws; rank 0 is `late` seconds a step in its backward pass."""
    attempt = sweep.stage(cell).new_attempt()
    attempt.write("launch.json", {"launcher": "local", "oversubscribed": oversubscribed})
    attempt.write("environment.json", {"backend": "gloo", "hosts": ["here"] * cell.world_size})
    if cell.kfac is not None:
        attempt.write("layers.json", describe(SHAPES, place(cell.kfac, SHAPES, cell.world_size)))
    seconds = {name: E * value for name, value in step(cell.method, cell.world_size).items()}
    epochs = 2.0 if cell.method == "sgd" else 1.0
    for rank in range(cell.world_size):
        own = dict(seconds)
        own["backward" if rank == 0 else "gradient_comm"] += E * late if cell.world_size > 1 else 0.0
        calls = dict.fromkeys(own, E)
        sent = {name: 40 for name, value in own.items() if name in COMM and value}
        with RecordWriter(attempt.records(rank)) as writer:
            for first in range(0, round(20 * epochs), E):
                memory = {"rss_peak": 10**8, "model": 4 * LAYERS * N * N}
                samples, wall = E * BATCH // cell.world_size, sum(own.values())
                writer.write(PhaseRecord(rank, first, E, samples, wall, own, calls, sent, memory))
            if rank == 0:
                for done in (epochs / 2, epochs):
                    writer.write(evaluation(done, reached=done == epochs))
            writer.write_checksum(rank)
    attempt.write_outcome(
        Outcome(
            "COMPLETED", "", True, "target", started_at=0.0, ended_at=9.0, train_seconds=epochs, value=0.96
        )
    )


def evaluation(epoch: float, *, reached: bool) -> EvalRecord:
    steps, value = round(20 * epoch), 0.96 if reached else 0.5
    return EvalRecord(
        0, steps, epoch, steps * BATCH, epoch, 0.0, epoch, "accuracy", value, "higher", 0.1, 0.1
    )


def fabricated(folder: Path, sizes=(1, 2, 4), methods=ARMS, **options) -> Path:
    sweep = SweepFolder(folder / "runs" / "synthetic")
    for method in methods:
        for size in sizes:
            for seed in (0, 1):
                cell = make_cell(method, size, seed, Plan(), {"training.gradient_averaging": "flat"})
                write(sweep, cell, **options)
    return sweep.path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return fabricated(tmp_path_factory.mktemp("fabricated"))


@pytest.fixture(scope="module")
def fitted(folder) -> StudyModel:
    return study_model(measured(load(folder, cache=False)))


@pytest.mark.parametrize("method", ARMS)
def test_where_times_follow_the_laws_every_phase_of_a_larger_world_is_predicted_exactly(fitted, method):
    """Also that mem_opt's four layers keep only four ranks busy, which no curve through totals knows."""
    expected = step(method, 16)
    prediction = fitted.predict(method, 16)
    for phase, seconds in expected.items():
        assert prediction.phases[phase] == pytest.approx(seconds, rel=1e-6), phase
    assert prediction.seconds.central == pytest.approx(sum(expected.values()), rel=1e-6)
    assert not prediction.measured
    same = fitted.predict(method, 4)
    assert same.measured
    assert same.seconds.central == pytest.approx(sum(step(method, 4).values()))


def test_waiting_for_the_latest_rank_grows_with_the_ranks_and_is_no_transfer(tmp_path):
    late = 2e-3
    sweep = fabricated(tmp_path, sizes=(1, 2, 4), methods=("sgd",), late=late)
    model = study_model(measured(load(sweep, cache=False)))
    exact = step("sgd", 16)
    phases = model.predict("sgd", 16).phases
    assert phases["gradient_comm"] == pytest.approx(exact["gradient_comm"], rel=0.01)
    alone = late * (1 - 1 / 4)  # beside the mean rank's pass
    assert phases["waiting"] == pytest.approx(alone * 1.77 / 1.03, rel=0.02)  # maxima of 16 and of 4 normals


@pytest.mark.parametrize(("error", "least", "most"), [(0.0, 0.9, 1.0), (0.1, 0.85, 0.95)])
def test_ninety_percent_bounds_cover_nine_of_ten_runs_of_simulated_studies(error, least, most):
    """Every doubling of the ranks adds an error that the laws do not know: none, or a tenth."""
    found = coverage(error, sizes=(8,), studies=60)[8]
    assert least <= found <= most


def shaped_arms(sizes: tuple[int, ...]) -> tuple[Arm, ...]:
    """The committed measurements of real steps on shaped links."""
    return perceptron().study(*sizes).arms


def test_arms_that_exchange_the_same_gradients_are_predicted_to_take_the_same_time_for_it():
    """One arm hid more of its exchange in the backward pass by chance; on 64 ranks that is no gain."""
    lucky, plain = (
        replace(arm, worlds={size: _exchanging(world, size, hidden) for size, world in arm.worlds.items()})
        for arm, hidden in zip(shaped_arms((1, 2)), (0.5, 0.9), strict=False)
    )
    model = study_model(Measured("shaped", "gloo", 0.0, (lucky, plain), False, ()))
    times = [model.predict(arm.name, 64).phases["gradient_comm"] for arm in (lucky, plain)]
    assert times[0] == pytest.approx(times[1])
    apart = [
        study_model(Measured("shaped", "gloo", 0.0, (arm,), False, ())).predict(arm.name, 64)
        for arm in (lucky, plain)
    ]
    seconds = [one.phases["gradient_comm"] for one in apart]
    assert max(seconds) > 1.5 * min(seconds)  # each from its own runs alone


def _exchanging(world: World, size: int, share: float) -> World:
    return world if size == 1 else replace(world, transfers={**world.transfers, "gradient_comm": 0.3 * share})


def test_the_error_that_every_study_starts_from_is_that_of_the_committed_validation():
    errors = pd.read_csv("results/prediction/shaped_links_totals.csv")["model"]
    assert len(errors) == bounds.PRIOR_COUNT
    assert math.sqrt((errors**2).mean()) == pytest.approx(bounds.PRIOR_ERROR, abs=5e-4)


def test_a_law_whose_terms_grew_together_says_what_it_cannot_tell():
    law = fit_law([(1.0, 10.0, 2.0), (2.0, 20.0, 4.0)])
    assert law is not None
    assert law.at((3, 30)) == pytest.approx(6.0)
    assert law.bounds((3, 30)) == pytest.approx((6.0, 6.0))
    assert law.bounds((1, 100)) == pytest.approx((2.0, 20.0))


def test_runs_with_more_ranks_than_cpus_are_left_out_and_counted(tmp_path):
    sweep = fabricated(tmp_path, sizes=(1, 2), methods=("sgd",))
    crowded = make_cell("sgd", 4, 0, Plan(), {"training.gradient_averaging": "flat"})
    write(SweepFolder(sweep), crowded, oversubscribed=True)
    own = measured(load(sweep, cache=False))
    assert own.world_sizes == (1, 2)
    assert "left out: 1 runs with more ranks than CPUs" in own.notes[0]


def test_a_study_of_one_rank_says_nothing_about_links(tmp_path, capsys):
    sweep = fabricated(tmp_path, sizes=(1,), methods=("sgd",))
    assert main(["predict", "--from", str(sweep), "--world-size", "8"]) == 2
    assert "no exchange was measured on two ranks or more" in capsys.readouterr().err


def test_a_batch_that_is_too_small_for_the_world_is_said_and_not_priced(fitted, folder, capsys):
    with pytest.raises(PredictionError, match="a global batch of 64 has no example for each of 128 ranks"):
        fitted.predict("sgd", 128)
    assert main(["predict", "--from", str(folder), "--world-size", "8,128"]) == 0
    out = capsys.readouterr().out
    assert "has no example for each of 128 ranks" in out
    assert "links between hosts are not in these predictions" in out


def test_bounds_of_a_measured_world_are_those_of_one_more_run():
    """With a scatter of 10 % from ten degrees of freedom and two runs: t(0.95, 10) = 1.812."""
    own = bounds.Errors({4: bounds.Repeatability(0.1, 10, of_windows=False)}, 0.05, 6, ())
    seconds = own.measured((1.0, 1.21), 4)
    half = 1.812 * 0.1 * math.sqrt(1 + 1 / 2)
    assert seconds.central == pytest.approx(1.1)
    assert (seconds.low, seconds.high) == pytest.approx(
        (1.1 * math.exp(-half), 1.1 * math.exp(half)), rel=1e-3
    )


def test_a_held_out_world_is_no_part_of_its_prediction(folder):
    """The world of four ranks takes twice as long as the laws of the smaller ones say."""
    own = measured(load(folder, cache=False))
    arms = []
    for arm in own.arms:
        four = arm.worlds[4]
        slow = World(
            tuple(2 * run for run in four.runs), four.window_spread, four.windows,
            {phase: tuple(2 * one for one in ranks) for phase, ranks in four.ranks.items()},
            {phase: 2 * seconds for phase, seconds in four.transfers.items()},
        )  # fmt: skip
        worlds = {**arm.worlds, 4: slow}
        if arm.name == "comm_opt":  # ran on four ranks alone, and mem_opt on one and two
            worlds = {4: slow}
        if arm.name == "mem_opt":
            two = {phase: s for phase, s in worlds[2].transfers.items() if phase != "precondition_comm"}
            worlds = {1: worlds[1], 2: replace(worlds[2], transfers=two)}
        arms.append(replace(arm, worlds=worlds))
    found = held_out(Measured(own.name, own.algorithm, own.examples, tuple(arms), own.one_host, own.notes))
    errors = {one.arm: one.error for one in found if one.world_size == 4}
    assert errors["sgd"] == pytest.approx(-math.log(2), rel=0.05)


def test_each_doubling_beyond_the_measured_worlds_adds_its_error():
    """With an error of 20 % a doubling and next to no scatter, three doublings are three times as wide."""
    own = bounds.Errors({4: bounds.Repeatability(1e-4, 1000, of_windows=False)}, 0.2, 1000, ())
    exact = Seconds(1.0, 1.0, 1.0)
    widths = [math.log(own.predicted(exact, doublings, 4, 2).high) for doublings in (0.5, 1, 2, 3)]
    assert widths == pytest.approx([widths[1] * factor for factor in (1, 1, 2, 3)], rel=1e-3)
    assert widths[1] == pytest.approx(1.645 * 0.2, rel=0.01)


def test_ranks_wait_for_the_busiest_of_them():
    """A step of 5 s: 1 s forward, inverses of 3 s on one rank and 1 s on the other, 0.5 s of sending."""
    ranks = {"forward": (1.0, 1.0), "inverse_compute": (1.0, 3.0)}
    assert waited(World((5.0,), 0.0, 1.0, ranks, {"gradient_comm": 0.5})) == pytest.approx(0.5)
