"""Promise: the command line answers a mistake with one line and exit code 2, and a traceback means a bug."""

import sys
from types import SimpleNamespace

import pandas as pd
import pytest

from analysis.records.study import Study
from harness import cli
from harness.cell import Cell
from harness.errors import FilterError
from harness.study.filters import parse_filter, select

DEMO = "jobs/sweeps/demo.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pln"], "No such command 'pln'"),
        (["plan"], "Missing option"),
        (["plan", "-f", DEMO, "--wher", "x"], "No such option"),
        (["plan", "-f", DEMO, "--where", "nonsense"], "--where 'nonsense': cannot read 'nonsense'"),
        (["plan", "-f", DEMO, "--where", "seed=99"], "--where 'seed=99': none of the 36 cells matches"),
        (["report"], "report needs either the name of a sweep or its file"),
        (
            ["report", "none", "--runs", "nowhere"],
            "nowhere/none: no runs of sweep 'none'; nothing is stored there",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {message}")
    assert said.err.count("\n") == 1


def test_what_the_system_refuses_is_one_line_with_path_and_reason(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    for runs, reason in ((file / "runs", "Not a directory"), ("/proc/nope", "No such file or directory")):
        assert cli.main(["submit", "-f", DEMO, "--where", "world_size=1", "--runs", str(runs)]) == 2
        assert capsys.readouterr().err == f"error: {runs}: {reason}\n"


def test_interruption_is_130(monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.study.sweep.read_sweep", interrupt)
    assert cli.main(["plan", "-f", DEMO]) == 130


def test_a_bug_is_a_traceback(monkeypatch):
    def stumble(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("harness.study.sweep.read_sweep", stumble)
    with pytest.raises(ZeroDivisionError):
        cli.main(["plan", "-f", DEMO])


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kronscale ")
    assert cli.main([]) == 2
    assert "Usage: kronscale" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["plan", "report"])
def test_every_verb_shows_an_example(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    assert f"Example: kronscale {verb}" in capsys.readouterr().out


def test_report_prints_the_summary_as_it_is_and_the_pages_path(monkeypatch, tmp_path, capsys):
    summary = pd.DataFrame({
        "arm": ["sgd"], "world_size": ["4*"], "runs": [3], "reached": ["3/3"], "epochs": ["5"],
        "median_seconds": ["1.5 [bold, 2.0]"], "speedup": [""], "verdict": [""], "method": ["Welch t"],
    })  # fmt: skip
    for module, stub in (
        ("summary", SimpleNamespace(summary_table=lambda _: summary)),
        ("page", SimpleNamespace(write_report=lambda _, out: out / "report.html")),
    ):
        monkeypatch.setitem(sys.modules, f"analysis.report.{module}", stub)
    frames = ("cells", "phases", "memory", "evaluations", "environments", "layers", "devices", "fields")
    empty = Study(**{name: pd.DataFrame({"segments": []}) for name in frames})
    monkeypatch.setitem(sys.modules, "analysis.records.tables", SimpleNamespace(load=lambda folder: empty))
    (tmp_path / "demo").mkdir()
    assert cli.main(["report", "-f", DEMO, "--runs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "1.5 [bold, 2.0]" in said
    assert "speedup: Welch t\n*: more ranks than CPUs" in said
    assert f"report: {tmp_path}/demo/report/report.html\n" in said


def _cell(method: str = "sgd", world_size: int = 1, seed: int = 0, **kfac: object) -> Cell:
    return Cell.model_validate(
        {
            "sweep": "s", "method": method, "workload": {"name": "digits", "options": {"width": 16}},
            "target": {"metric": "accuracy", "at_least": 0.9},
            "training": {"global_batch_size": 64, "epochs": 1},
            "optimizer": {"lr": 0.1}, "kfac": kfac or None, "world_size": world_size, "seed": seed,
        }
    )  # fmt: skip


CELLS = [_cell(), _cell(world_size=2, seed=1), _cell("k", 4, damping=0.01), _cell("k", 8, 2, damping=0.1)]


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("method=sgd", [0, 1]),
        ("method != sgd", [2, 3]),
        ("world_size>=2", [1, 2, 3]),
        ("world_size>1 and world_size<=4", [1, 2]),
        ("seed in 1,2", [1, 3]),
        ("seed in 0, 1, method=k", [2]),
        ("method in sgd,k and seed=2", [3]),
        ("kfac.damping<0.05", [2]),
        ("kfac.damping!=0.01", [0, 1, 3]),
        ("workload.options.width=16, training.stop_at_target=true, seed=1", [1]),
        (f"id={CELLS[2].id}", [2]),
        ("", [0, 1, 2, 3]),
    ],
)
def test_where_keeps_exactly_what_it_says(expression, chosen):
    assert select(CELLS, expression) == [CELLS[index] for index in chosen]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("world=2", "world is no field; did you mean world_size\\?; allowed: id, method"),
        ("world_size=two", "world_size=1 is a number and cannot be compared by = with 'two'"),
        ("method<k", "method='sgd' is text and cannot be compared by < with 'k'"),
        ("seed=", "'seed=' compares with nothing"),
        ("seed in 0,,1", "'seed in 0,,1' compares with nothing"),
        ("seed=0 or seed=1", "there is no `or`; values of one field go in a list"),
        ("sgd", "cannot read 'sgd'; write field=value"),
        ("seed=0 and ", "cannot read"),
        ("__class__=Cell", "__class__ is no field"),
    ],
)
def test_a_mistaken_expression_says_what_is_allowed(expression, message):
    with pytest.raises(FilterError, match=message) as refusal:
        select(CELLS, expression)
    assert str(refusal.value).startswith(f"--where {expression!r}: ")


def test_an_empty_expression_has_no_clauses():
    assert parse_filter("  ").clauses == ()
