"""Promise: a user's mistake is one line and exit code 2; a traceback means a bug."""

import pytest

from harness import cli
from harness.cell import Cell
from harness.errors import FilterError
from harness.study.filters import select

DEMO = "jobs/sweeps/demo.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pln"], "No such command 'pln'"),
        (["plan"], "Missing option"),
        (["plan", "-f", DEMO, "--wher", "x"], "No such option"),
        (["plan", "-f", DEMO, "--where", "nonsense"], "--where 'nonsense': cannot read 'nonsense'"),
        (["plan", "-f", DEMO, "--where", "seed=99"], "--where 'seed=99': none of the 42 cells has seed=99"),
        (["report"], "report needs either the name of a sweep or its file"),
        (
            ["report", "none", "--runs", "nowhere"],
            "nowhere/none: no runs of sweep 'none'; nothing is stored there",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {message}")
    assert output.err.count("\n") == 1


def test_an_error_of_the_system_is_one_line_with_path_and_reason(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    for runs, reason in ((file / "runs", "Not a directory"), ("/proc/nope", "No such file or directory")):
        assert cli.main(["submit", "-f", DEMO, "--where", "world_size=1", "--runs", str(runs)]) == 2
        assert capsys.readouterr().err == f"error: {runs}: {reason}\n"


def test_interruption_is_130(monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.cli.plan.read_sweep", interrupt)
    assert cli.main(["plan", "-f", DEMO]) == 130


def test_a_bug_is_a_traceback(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("harness.cli.plan.read_sweep", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["plan", "-f", DEMO])


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kronscale ")
    assert cli.main([]) == 2
    assert "Usage: kronscale" in capsys.readouterr().out
    assert cli.main(["report", "--help"]) == 0
    assert "Example: kronscale report" in capsys.readouterr().out


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
    ("expression", "selected"),
    [
        ("method=sgd", [0, 1]),
        ("method != sgd", [2, 3]),
        ("world_size>=2", [1, 2, 3]),
        ("world_size>1 and world_size<=4", [1, 2]),
        ("seed in 1,2", [1, 3]),
        ("seed in 0, 1, method=k", [2]),
        ("kfac.damping<0.05", [2]),
        ("kfac.damping!=0.01", [0, 1, 3]),
        ("workload.options.width=16, training.stop_at_target=true, seed=1", [1]),
        (f"id={CELLS[2].id}", [2]),
        (f"id=s/{CELLS[2].id}", [2]),
        (f"id!={CELLS[2].id}", [0, 1, 3]),
        ("training.window_steps=null", [0, 1, 2, 3]),
        ("kfac.damping=null", [0, 1]),
        ("kfac.strategy in null", [0, 1]),
    ],
)
def test_a_filter_selects_exactly_the_matching_cells(expression, selected):
    assert select(CELLS, expression) == [CELLS[index] for index in selected]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("world=2", "world is not a field; did you mean world_size\\?; allowed: id, method"),
        ("world_size=two", "world_size is a whole number and cannot be compared by = with 'two'"),
        ("method<k", "method is text and cannot be compared by < with 'k'"),
        ("seed=", "'seed=' has no value after the operator"),
        ("seed=0 or seed=1", "`or` is not supported; list the values of one field"),
        ("sgd", "cannot read 'sgd'; write field=value"),
        ("seed=0 and ", "cannot read"),
        ("__class__=Cell", "__class__ is not a field"),
        ("  ", "is empty, which would select every cell"),
        ("method!=kk", "none of the 4 cells has method=kk; their values: k, sgd"),
        ("seed!=7", "none of the 4 cells has seed=7; their values: 0, 1, 2"),
        ("seed!=true", "seed is a whole number and cannot be compared by != with 'true'"),
        ("world_size=1.0", "world_size is a whole number"),
        ("training.stop_at_target<=true", "is true or false and cannot be compared by <="),
        ("kfac.damping<nan", "cannot be compared by < with 'nan'"),
        ("kfac.skip!=fc", "is a list or a mapping"),
        ("workload.options.widht!=4", "is not an option of digits; allowed: width; did you mean width\\?"),
        ("id!=sgd-p1", "none of the 4 cells has id=sgd-p1"),
    ],
)
def test_a_wrong_expression_names_what_is_allowed(expression, message):
    with pytest.raises(FilterError, match=message) as error:
        select(CELLS, expression)
    assert str(error.value).startswith(f"--where {expression!r}: ")


def test_expressions_that_are_repeated_must_all_hold():
    assert select(CELLS, "method=sgd", "seed=1") == [CELLS[1]]
    with pytest.raises(FilterError, match="--where 'method=sgd' --where 'seed=2': none of the 4 cells match"):
        select(CELLS, "method=sgd", "seed=2")


def test_a_schedule_is_no_number_and_has_no_order():
    scheduled = _cell("k", 2, damping={"initial": 0.1, "factor": 0.5, "at": [3]})
    cells = [*CELLS, scheduled]
    assert select(cells, "kfac.damping=0.1") == [CELLS[3]]
    assert scheduled in select(cells, "kfac.damping!=0.1")
    with pytest.raises(FilterError, match=f"kfac.damping is a schedule in cell {scheduled.id}"):
        select(cells, "kfac.damping<0.5")
