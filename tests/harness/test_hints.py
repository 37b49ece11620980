"""Promise: a command that a message advises can be pasted: it ends its line, parses, and finds its cells."""

import html
import re
import shlex
from pathlib import Path

import pytest

from harness.cli import command_line, main
from harness.cli.cell_selection import selected_cells
from harness.errors import SchedulerError
from harness.launchers import LAUNCHERS
from harness.launchers.site_profile import Site, read_site
from harness.launchers.slurm import launcher, scheduler_state
from harness.launchers.slurm.scheduler import NoAnswerError
from harness.runs.attempt_outcome import Outcome
from harness.runs.store import sweep_folder
from harness.study.papers import read_paper
from harness.study.submit import Submission
from harness.study.sweep import read_sweep

DEMO = "jobs/sweeps/demo.yaml"
HINT = re.compile(r"(?:: |`)(kronscale [^`\n]+)")
GROUP = command_line()


@pytest.fixture
def runs(tmp_path):
    """Two failed cells of the demo, and a pending one without a queue, in a folder that needs quotes."""
    folder = sweep_folder("demo", tmp_path / "my runs")
    cells = read_sweep(Path(DEMO)).cells
    for cell in cells[:3]:
        attempt = folder.stage(cell).new_attempt()
        LAUNCHERS["local"].plan(cell, Site(name="local", oversubscribe=True)).write(attempt)
        if cell is not cells[2]:
            attempt.write_outcome(Outcome("FAILED", "it broke", None, "error", 1.0, 2.0))
    return tmp_path / "my runs"


@pytest.fixture
def printed(capsys):
    def printed(*arguments: str) -> str:
        main(arguments)
        output = capsys.readouterr()
        return output.out + output.err

    return printed


def parsed(hint: str) -> tuple[str, dict]:
    """The command of a hint and its parameters, by the command line's own parser."""
    words = shlex.split(hint)
    assert words[0] == "kronscale"
    context = GROUP.make_context("kronscale", words[1:], resilient_parsing=True)
    name, command, rest = GROUP.resolve_command(context, words[1:])
    return name, command.make_context(name, rest, parent=context).params


def cells_of(parameters: dict) -> list:
    where, set_ = parameters.get("where") or (), parameters.get("set_") or ()
    return selected_cells(parameters.get("sweep"), parameters.get("file"), set_, where, parameters["runs"])


def hints(text: str) -> list[str]:
    return [hint.strip() for hint in HINT.findall(text)]


def test_submit_advises_a_retry_of_what_failed_on_the_same_site(runs, printed, monkeypatch):
    monkeypatch.setattr(LAUNCHERS["local"], "finish_submission", lambda *_, **__: None, raising=False)
    text = printed("submit", "demo", "--runs", str(runs), "--site", "jobs/sites/local.yaml")
    (hint,) = hints(text)
    name, parameters = parsed(hint)
    assert (name, parameters["site"], parameters["runs"]) == ("retry", "jobs/sites/local.yaml", runs)
    assert len(cells_of(parameters)) == 3


def test_status_advises_to_restart_a_killed_queue_by_the_sweeps_name(runs, printed, monkeypatch):
    (hint,) = hints(printed("status", "demo", "--runs", str(runs)))
    name, parameters = parsed(hint)
    assert (name, len(cells_of(parameters))) == ("submit", 3)
    resumed = []
    monkeypatch.setattr(
        LAUNCHERS["local"],
        "finish_submission",
        lambda folder, **_: resumed.append(folder.path),
        raising=False,
    )
    assert main(shlex.split(hint)[1:]) == 0  # it does what it says
    assert resumed == [runs / "demo"]


def test_an_unknown_cell_advises_a_list_of_the_ids(runs, printed):
    (hint,) = hints(printed("logs", "demo/nothing", "--runs", str(runs)))
    text = printed(*shlex.split(hint)[1:])
    assert all(cell.id in text for cell in read_sweep(Path(DEMO)).cells[:3])


def test_no_runs_advises_a_first_submission(tmp_path, printed):
    (hint,) = hints(printed("status", "--runs", str(tmp_path / "no runs")))
    name, parameters = parsed(hint)
    assert (name, parameters["runs"]) == ("submit", tmp_path / "no runs")
    assert len(cells_of(parameters)) == 42


def test_an_interrupted_display_advises_how_to_go_on(runs, printed, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.cli.sweep_statuses.follow", interrupt)
    found = [parsed(hint) for hint in hints(printed("status", "demo", "--watch", "--runs", str(runs)))]
    assert [name for name, _ in found] == ["status", "cancel"]
    assert all(len(cells_of(parameters)) == 3 for _, parameters in found)


def test_slurm_advises_how_to_finish_a_submission(runs, printed, monkeypatch):
    cell = read_sweep(Path(DEMO)).cells[3]
    site = read_site("slurm-test")
    attempt = sweep_folder("demo", runs).stage(cell).new_attempt()
    LAUNCHERS["slurm"].plan(cell, site).write(attempt)
    (state,) = scheduler_state.attempt_states([attempt]).values()
    name, parameters = parsed(hints(state.cause)[0])
    assert (name, parameters["site"], len(cells_of(parameters))) == ("submit", "slurm-test", 4)

    def silent(*_: object) -> None:
        raise NoAnswerError("timed out")

    monkeypatch.setattr(launcher, "submit_manifest", silent)
    launches = [(attempt, LAUNCHERS["slurm"].plan(cell, site))]
    with pytest.raises(SchedulerError) as error:
        LAUNCHERS["slurm"].launch(sweep_folder("demo", runs), launches)
    assert parsed(hints(str(error.value))[0])[1]["site"] == "slurm-test"


def test_reproduce_advises_a_retry_of_each_sweep_with_failures(tmp_path, printed, monkeypatch):
    _, files = read_paper("nlcg", "small")
    for file in files.values():
        cell = read_sweep(file).cells[0]
        attempt = sweep_folder(cell.sweep, tmp_path).stage(cell).new_attempt()
        attempt.write_outcome(Outcome("FAILED", "it broke", None, "error", 1.0, 2.0))

    monkeypatch.setattr("harness.cli.paper_sweeps.start", lambda *_args, **_terms: Submission((), (), (), ()))
    found = [parsed(hint) for hint in hints(printed("reproduce", "nlcg", "--runs", str(tmp_path)))]
    assert [(name, len(cells_of(parameters))) for name, parameters in found] == [("retry", 1)] * len(files)


def test_the_report_tells_how_to_run_each_cell_again(runs, printed, tmp_path, no_images):
    given = ("--runs", str(runs), "--out", str(tmp_path / "report"), "--figure", "time_to_accuracy")
    printed("report", "demo", *given)
    page = (tmp_path / "report" / "report.html").read_text()
    found = re.findall(r"(kronscale run [^<]+)", page)
    assert len(found) == 3
    ids = {cells_of(parsed(html.unescape(hint))[1])[0].id for hint in found}
    assert ids == {cell.id for cell in read_sweep(Path(DEMO)).cells[:3]}


def _examples() -> list[str]:
    epilogs = [command.epilog for command in GROUP.commands.values() if command.epilog]
    return [epilog.removeprefix("Example: ") for epilog in [GROUP.epilog, *epilogs]]


@pytest.mark.parametrize("example", _examples())
def test_every_commands_example_is_parsed(example):
    _, parameters = parsed(example)
    if parameters.get("file"):
        assert cells_of({"runs": Path("results/runs"), **parameters})
