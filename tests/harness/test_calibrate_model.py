"""Promise: a calibration can measure the model of a sweep, and predictions use what it measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.cli import main

CALIBRATION = Path("results/calibrations/spd_kfac_64_release.json")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> Path:
    """A stored calibration, and the demo's model added to it."""
    path = tmp_path_factory.mktemp("calibrations") / "here.json"
    shutil.copy(CALIBRATION, path)
    assert (
        main(["calibrate", "--name", "here", "--out", str(path.parent), "-f", "jobs/sweeps/demo.yaml"]) == 0
    )
    return path


def predicted(
    calibration: Path, batch: int, capsys: pytest.CaptureFixture[str]
) -> dict[str, dict[str, float]]:
    """By arm, the seconds of its phases on one rank."""
    command = ["predict", "--model", "demo", "--calibration", str(calibration), "--world-size", "1", "--json"]
    assert (
        main(
            [
                *command,
                "--set",
                "solver=inverse",
                "--set",
                "factor_update_steps=1",
                "--local-batch-size",
                str(batch),
            ]
        )
        == 0
    )
    return {arm["arm"]: arm["phase_seconds"] for arm in json.loads(capsys.readouterr().out)["arms"]}


def test_the_rest_of_the_calibration_stays_as_it_was(calibration):
    stored, grown = (json.loads(path.read_text()) for path in (CALIBRATION, calibration))
    assert grown["models"].keys() - stored.get("models", {}).keys() == {"demo"}
    del grown["models"]["demo"]
    assert grown == {**stored, "models": grown["models"]}


def test_the_layers_are_those_of_the_network(calibration):
    """Two 3 x 3 convolutions with 8 x 8 and 4 x 4 output pixels, two linear layers; all have a bias."""
    layers = json.loads(calibration.read_text())["models"]["demo"]["layers"]
    found = [(one["a"][0], one["g"][0], one["positions"]) for one in layers]
    width = 16
    assert found == [
        (9 + 1, width, 64), (9 * width + 1, 2 * width, 16), (8 * width + 1, 64, 1), (64 + 1, 10, 1),
    ]  # fmt: skip


def test_a_pass_costs_what_was_measured_in_proportion_to_the_batch(calibration, capsys):
    facts = json.loads(calibration.read_text())["models"]["demo"]
    assert facts["local_batch_size"] == 256
    for batch in (256, 64):
        phases = predicted(calibration, batch, capsys)
        share = batch / 256
        passes = phases["sgd"]["forward"] + phases["sgd"]["backward"]
        assert passes == pytest.approx(share * facts["forward_backward_seconds"])
        assert phases["comm_opt"]["factor_compute"] == pytest.approx(share * facts["factor_seconds"])


def test_a_model_is_not_measured_over_another(calibration, capsys):
    before = calibration.read_bytes()
    command = ["calibrate", "--name", "here", "--out", str(calibration.parent), "-f", "jobs/sweeps/demo.yaml"]
    assert main(command) == 2
    assert "has the model of demo" in capsys.readouterr().err
    assert calibration.read_bytes() == before


def test_an_unknown_model_is_answered_with_those_that_were_measured(calibration, capsys):
    assert main(["predict", "--model", "demi", "--calibration", str(calibration)]) == 2
    assert "calibration spd_kfac_64_release has demo" in capsys.readouterr().err
