"""Promise: a recommendation names the fastest way, and is as sure as the bounds and the runs allow."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from analysis.figures.drawing import ranks
from analysis.prediction.arms import Measured
from analysis.prediction.choice import choose, faster, sentence
from analysis.prediction.laws import Seconds
from analysis.prediction.prediction import StudyModel, study_model
from analysis.prediction.reading import measured
from analysis.records.loading import load
from analysis.report.larger_worlds import beyond
from analysis.results import results
from harness.cell import Training
from harness.cli import main
from tests.analysis.simulated_study import BATCH, LAYERS, N, simulated, step
from tests.analysis.test_study_prediction import ARMS, fabricated, shaped_arms


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fabricated(tmp_path_factory.mktemp("recommended"))


@pytest.fixture(scope="module")
def fitted(folder) -> StudyModel:
    return study_model(measured(load(folder, cache=False)))


@pytest.mark.parametrize("ranks", [4, 64])
def test_the_arm_with_the_least_time_to_the_target_is_named(fitted, ranks):
    """SGD needs two epochs, K-FAC one; what a step takes is known in closed form."""
    epochs = {"sgd": 2, "comm_opt": 1, "mem_opt": 1}
    expected = {arm: epochs[arm] * 20 * sum(step(arm, ranks).values()) for arm in ARMS}
    choice = choose(fitted, ranks)
    assert choice.to_target
    totals = {one.name: choice.seconds(one).central for one in choice.candidates}
    assert {arm: totals[arm] for arm in ARMS} == pytest.approx(expected)
    ran = [one.name for one in choice.candidates if one.ran]
    assert ran[0] == min(expected, key=lambda arm: expected[arm])
    text = sentence(choice)
    assert text.startswith(f"At {ranks} ranks use ")
    assert "F = 5 and E = 10" in text
    assert "epochs instead of" in text
    assert "\n" not in text


@pytest.mark.slow
def test_a_report_says_what_its_runs_predict_for_64_ranks_and_whom_it_leaves_out(folder):
    study = load(folder, cache=False)
    places = results(study).places
    (said,) = beyond(study, places)
    fastest = min((place.fastest for place in places), key=lambda one: one.seconds)
    predicted = choose(study_model(measured(study)), 64)
    pays = predicted.seconds(predicted.best).central < fastest.seconds
    assert said.startswith("64 ranks: ")
    assert f"; on {ranks(fastest.world_size)} {fastest.arm} took " in said
    assert said.endswith("." if pays else ", so more ranks do not pay.")
    assert f"with {predicted.best.name}" in said
    assert "Left aside" not in said
    missed = study.cells["run"][study.cells["arm"] == "sgd"]
    evaluations = study.evaluations
    below = evaluations.assign(value=evaluations["value"].where(~evaluations["run"].isin(missed), 0.0))
    (said,) = beyond(replace(study, evaluations=below), places)
    assert "Left aside: sgd, whose time to the target cannot be predicted." in said
    crowded = [
        replace(place, points=tuple(replace(one, oversubscribed=True) for one in place.points))
        for place in places
    ]
    assert beyond(study, crowded) == []


def test_an_arm_whose_kfac_starts_late_has_no_one_step_time(folder):
    study = load(folder, cache=False)
    late = study.cells["run"][study.cells["arm"] == "mem_opt"]
    column = "training.kfac_start_epoch"
    starts = study.fields[column].where(~study.fields["run"].isin(late), 1.5)
    found = measured(replace(study, fields=study.fields.assign(**{column: starts})))
    assert {arm.name for arm in found.arms} == {"sgd", "comm_opt"}
    assert (
        "left out: mem_opt: its K-FAC starts at epoch 1.5, so that its steps have no one time" in found.notes
    )


def test_fractions_that_the_study_never_ran_are_candidates_and_lie_between_those_that_it_ran(fitted):
    choice = choose(fitted, 4)
    names = [one.name for one in choice.candidates if not one.ran]
    assert len(names) == 1
    assert names[0].startswith("hybrid_opt at fraction 0.5 (otherwise as ")
    halves = next(one for one in choice.candidates if not one.ran)
    assert not halves.step.measured
    inverses = {arm: fitted.predict(arm, 4).phases["precondition"] for arm in ("comm_opt", "mem_opt")}
    assert inverses["mem_opt"] < halves.step.phases["precondition"] < inverses["comm_opt"]


def test_strategies_that_never_ran_are_predicted_from_those_that_did():
    """On real steps over shaped links: every strategy of the family as the others, within their bounds."""
    arms = {arm.name: arm for arm in shaped_arms((1, 2, 4)) if arm.name in ("comm_opt", "mem_opt")}
    model = study_model(Measured("shaped", "gloo", 0.0, tuple(arms.values()), False, ()))
    errors = []
    for donor, other in (("comm_opt", "mem_opt"), ("mem_opt", "comm_opt")):
        truth = arms[other].worlds[4].seconds
        seconds = model.predict(donor, 4, arms[other].config).seconds
        assert seconds.low <= truth <= seconds.high
        errors.append(abs(seconds.central / truth - 1))
    assert max(errors) < 0.15


def test_the_probability_of_being_faster_is_that_of_two_normal_logs():
    """Equal medians are a coin; one interval's half width apart, in one number, is known from tables."""
    one = Seconds(1 / 1.2, 1.0, 1.2)
    assert faster(one, one) == pytest.approx(0.5)
    exact = Seconds(1.2, 1.2, 1.2)
    assert faster(one, exact) == pytest.approx(0.95)  # a two-sided 90 % bound has 5 % beyond it
    assert faster(Seconds(1, 1, 1), exact) == 1.0


def test_one_that_is_called_sure_is_the_faster_one_in_as_many_simulated_studies():
    random, right = Random(3), []  # noqa: S311  simulated noise
    for _ in range(50):
        drift = random.gauss(0, 0.05)
        arms = tuple(simulated(name, drift, random, (1, 2, 4)) for name in ("mem_opt", "comm_opt"))
        choice = choose(study_model(Measured("simulated", "gloo", 0.0, arms, True, ())), 8)
        ran = [one for one in choice.candidates if one.ran]
        sureness = faster(choice.seconds(ran[0]), choice.seconds(ran[1]))
        truth = {name: sum(step(name, 8).values()) for name in ("mem_opt", "comm_opt")}
        if sureness >= 0.8:
            right.append(truth[ran[0].name] < truth[ran[1].name])
    assert len(right) > 10
    assert fmean(right) >= 0.8


def test_without_a_reached_target_steps_are_compared_and_the_output_says_so(folder, capsys):
    arms = tuple(simulated(name, 0.0, Random(1), (1, 2)) for name in ARMS)  # noqa: S311  simulated noise
    choice = choose(study_model(Measured("simulated", "gloo", 0.0, arms, True, ())), 4)
    assert not choice.to_target
    assert choice.best.name == "sgd"
    (fastest,) = [one.name for one in choice.candidates if one.step.config is not None][:1]
    text = sentence(choice)
    assert text.startswith(
        f"At 4 ranks the fastest step with K-FAC is that of {fastest} with F = 5 and E = 10: "
    )
    share = choice.best.step.seconds.central / choice.candidates[1].step.seconds.central
    assert f"it pays if it needs less than {share:.2g} of sgd's epochs" in text


def test_the_command_prints_a_table_and_a_sentence_and_leaves_out_what_does_not_fit(folder, capsys):
    command = ["predict", "--from", str(folder), "--world-size"]
    assert main([*command, "16"]) == 0
    out = capsys.readouterr().out
    assert "\nAt 16 ranks use " in out
    assert "never run" in out
    assert main([*command, "16", "--json"]) == 0
    (world,) = json.loads(capsys.readouterr().out)["worlds"]
    totals = [row["seconds_to_target"] for row in world["candidates"]]
    assert totals == sorted(totals)
    assert 0.5 <= world["sureness"] <= 1
    peaks = {row["name"]: row["peak_bytes"] for row in world["candidates"]}
    limit = (max(peaks.values()) + min(peaks.values())) / 2
    assert main([*command, "16", "--json", "--memory-gib", str(limit / 2**30)]) == 0
    content = json.loads(capsys.readouterr().out)
    kept = {name for name, peak in peaks.items() if peak <= limit}
    assert {row["name"] for row in content["worlds"][0]["candidates"]} == kept
    assert 0 < len(kept) < len(peaks)
    assert sum("GiB on a rank" in note for note in content["notes"]) == len(peaks) - len(kept)
    assert main([*command, str(2 * BATCH)]) == 2
    assert "nothing can be predicted at 128 ranks" in capsys.readouterr().err


def test_memory_of_a_rank_is_the_measured_peak_with_the_state_of_the_new_world():
    """Four layers of 100 x 100, two factors each: their eigenbases are shared, owned or kept by all."""
    peak = 1e9
    arms = tuple(
        replace(arm, worlds={1: replace(arm.worlds[1], peak_bytes=peak)})
        for arm in (simulated(name, 0.0, Random(1), (1,)) for name in ARMS)  # noqa: S311  simulated noise
    )
    fitted = study_model(Measured("simulated", "gloo", 0.0, arms, True, ())).arms
    factor, eigen = 4 * N * N, 4 * (N * N + N)
    # On four ranks: a quarter of the factors; all eigenbases with comm_opt, one layer's with mem_opt
    owned = peak - (2 * LAYERS - 2) * (factor + eigen)
    assert fitted["sgd"].peak_bytes(4) == peak
    assert fitted["comm_opt"].peak_bytes(4) == peak - (2 * LAYERS - 2) * factor
    assert fitted["mem_opt"].peak_bytes(4) == owned
    assert fitted["comm_opt"].peak_bytes(4, arms[2].config) == owned


def test_epochs_are_those_of_runs_that_reached_on_the_nearest_world(folder, fitted):
    study = load(folder, cache=False)
    missed = study.evaluations["run"].astype("str").isin(study.cells.query("method == 'mem_opt'")["run"])
    values = study.evaluations["value"].mask(missed, 0.5)
    changed = replace(study, evaluations=study.evaluations.assign(value=values))
    arms = {one.name: one for one in measured(changed).arms}
    assert (arms["mem_opt"].epochs, arms["sgd"].epochs[4]) == ({}, 2.0)
    choice = choose(study_model(measured(changed)), 8)
    assert choice.to_target
    assert "mem_opt" in [one.name for one in choice.others]
    assert "left out: mem_opt: fewer than half of its runs reached the target" in choice.notes
    weak = tuple(
        replace(arm, training=Training(local_batch_size=16, epochs=1, gradient_averaging="flat"))
        for arm in measured(study).arms
    )
    notes = choose(study_model(replace(measured(study), arms=weak)), 8).notes
    assert any("epochs are those of the nearest measured world" in note for note in notes)
    arm = replace(fitted.arms["sgd"].arm, epochs={1: 5.0, 4: 7.0})
    assert [arm.epochs_at(size) for size in (1, 2, 4, 64)] == [5.0, 5.0, 7.0, 7.0]
