"""Promise: `compare` reports a regression only if effect, interval and p agree, and then exits with 3."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from analysis.records.loading import load
from analysis.regressions import Change, changes, differing_environments
from analysis.statistics.intervals import Interval
from harness.cli import main
from tests.analysis.conftest import Plan

SIX = Plan(methods=("sgd", "comm_opt"), world_sizes=(1,), seeds=tuple(range(6)), misses=(), epochs=8)


@pytest.fixture(scope="module")
def sets(write_study):
    """The same cells twice; in the second, every clock of comm_opt runs a fifth longer."""
    return write_study(SIX), write_study(replace(SIX, slower=(("comm_opt", 1.2),)))


def verdicts(found):
    return {(change.arm, change.quantity): change.verdict for change in found}


def test_what_got_slower_is_a_regression_and_nothing_else_is(sets, odd_studies):
    found = verdicts(changes(load(sets[0]), load(sets[1]), least=0.05))
    assert {key for key, verdict in found.items() if verdict == "regression"} == {
        ("comm_opt", "seconds to target"),
        ("comm_opt", "seconds per step"),
    }
    assert found["comm_opt", "epochs to target"] == "same"
    assert found["comm_opt", "K-FAC bytes"] == "same"
    assert ("sgd", "K-FAC bytes") not in found
    back = verdicts(changes(load(sets[1]), load(sets[0]), least=0.05))
    assert back["comm_opt", "seconds per step"] == "improvement"
    tested = [one for one in changes(load(sets[0]), load(sets[1]), least=0.05) if one.holm_p is not None]
    surest = min(tested, key=lambda one: one.ratio.p_value)
    assert surest.holm_p == pytest.approx(len(tested) * surest.ratio.p_value)  # Holm over all quantities
    large = verdicts(changes(load(sets[0]), load(sets[1]), least=0.3))
    assert "regression" not in large.values()
    for other in ("weak scaling", "no cells"):  # cells that only one has are not compared
        assert changes(load(sets[0]), odd_studies[other], least=0.05) == []


def test_a_version_that_never_reaches_the_target_any_more_is_a_regression(sets, write_study):
    broken = write_study(replace(SIX, misses=tuple(("comm_opt", 1, seed) for seed in SIX.seeds)))
    found = verdicts(changes(load(sets[0]), load(broken), least=0.05))
    assert {key for key, verdict in found.items() if verdict == "regression"} == {
        ("comm_opt", "seconds to target"),
        ("comm_opt", "epochs to target"),
    }


def test_bytes_are_exact_so_two_runs_show_that_they_grew(sets):
    before = load(sets[0])
    before = before.only(before.cells["seed"] < 2)
    kinds = before.windows.filter(like="memory_bytes.kfac_").columns
    more = before.windows[kinds].where(before.windows[kinds].isna(), 9_000_000.0)
    after = replace(before, windows=before.windows.assign(**more))
    found = verdicts(changes(before, after, least=0.05))
    assert found["comm_opt", "K-FAC bytes"] == "regression"


@pytest.mark.parametrize(
    ("estimate", "low", "high", "p", "verdict"),
    [
        (1.2, 1.1, 1.3, 0.01, "regression"),
        (1.2, 0.9, 1.5, 0.01, "undecided"),  # the interval holds 1
        (1.2, 1.1, 1.3, 0.20, "undecided"),  # not after Holm
        (1.03, 1.01, 1.05, 0.01, "same"),  # sure, but too small to matter
        (1.2, None, None, None, "undecided"),  # two runs
        (0.8, 0.7, 0.9, 0.01, "improvement"),
        (1.0, 0.98, 1.02, 0.9, "same"),
    ],
)
def test_a_verdict_needs_effect_interval_and_p(estimate, low, high, p, verdict):
    change = Change("arm", 1, "seconds per step", Interval(estimate, low, high, 6, "", p), 0.05, p)
    assert change.verdict == verdict


@pytest.mark.slow
def test_the_command_ends_with_3_only_on_a_regression(sets, capsys):
    assert main(["compare", str(sets[0]), str(sets[1]), "--json"]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert sum(change["verdict"] == "regression" for change in shown) == 2
    assert main(["compare", str(sets[0]), str(sets[0])]) == 0
    assert "0 regressions" in capsys.readouterr().out
    assert main(["compare", str(sets[1]), str(sets[0])]) == 0


def test_nothing_in_common_is_a_mistake_of_usage(sets, ordinary_folder, capsys):
    other = ordinary_folder.parent / "nowhere"
    assert main(["compare", str(sets[0]), str(other)]) == 2
    assert "no run folder" in capsys.readouterr().err
    assert main(["compare", str(sets[0]), str(ordinary_folder)]) == 2
    assert "nothing to compare" in capsys.readouterr().err


def test_environments_that_differ_are_named(sets):
    before = load(sets[0])
    changed = before.environments.assign(
        value=before.environments["value"].where(before.environments["key"] != "python", "3.13.0")
    )
    assert differing_environments(before, replace(before, environments=changed)) == [
        "python: 3.11.7, then 3.13.0"
    ]
    assert differing_environments(before, before) == []
