"""Promise: `harness.bench core` times real steps on real ranks; its averages are those of the intervals."""

import json

import pytest

from harness.bench.__main__ import main
from harness.bench.core import amortised, slowest, summary


def test_an_inverse_period_is_one_full_step_its_factor_steps_and_the_rest():
    seconds = {"full": 1000.0, "factor": 100.0, "plain": 1.0}
    assert amortised(seconds, 1, 1) == 1000.0
    assert amortised(seconds, 10, 10) == pytest.approx((1000 + 9) / 10)
    assert amortised(seconds, 10, 100) == pytest.approx((1000 + 9 * 100 + 90) / 100)


def test_a_repetition_takes_as_long_as_its_slowest_rank():
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]
    kinds = {kind: [{"total": 4.0, "scale": 1.0}] for kind in ("full", "factor", "plain")}
    rank = {"sgd": [2.0, 2.0], "kinds": kinds, "calls": {}, "memory": {}}
    figures = summary([rank, {**rank, "sgd": [1.0, 1.0]}])
    assert figures["sgd"]["median"] == 2.0
    assert figures["ratios"]["10/100"] == pytest.approx(2.0)
    assert figures["phases"]["scale"]["of_sgd"]["plain"] == 0.5


@pytest.mark.ranks
def test_two_ranks_are_measured(tmp_path, capfd):
    out = tmp_path / "core.json"
    assert main(["core", "--batch", "2", "--ranks", "2", "--repeats", "1", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert len(figures["ranks"]) == 2
    for rank in figures["ranks"]:
        for step in rank["kinds"]["full"]:
            assert sum(step.values()) - step["total"] == pytest.approx(step["total"], rel=0.02)
        assert rank["kinds"]["plain"][0].get("factor_compute", 0.0) == 0.0
    calls = {"gradient_comm": 0, "factor_comm": 2, "inverse_comm": 1, "precondition_comm": 0}
    assert figures["calls"] == calls
    assert "factor_compute" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "commopt"], "did you mean comm_opt?"),
        (["--set", "{"], "--set must be JSON"),
        (["--set", '{"dampng": 1}'], "dampng"),
    ],
)
def test_bad_settings_are_errors_before_a_rank_starts(arguments, message, capfd):
    assert main(["core", *arguments]) == 2
    assert message in capfd.readouterr().err
