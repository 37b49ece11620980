"""Promise: commands print in one line what they did, exit with 0, 1 or 2."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys

import pytest

from harness.cli import main, status_view
from harness.cli.status_view import print_log
from harness.launchers import LAUNCHERS, AttemptState
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.launchers.site_profile import Site
from harness.study.submit import submit
from tests.harness.launching.conftest import FAKE_RANK, digits_cell

pytestmark = pytest.mark.ranks


def call(root, *arguments):
    """Run a command on these runs; returns its exit code and output."""
    with io.StringIO() as printed:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main([*arguments, "--runs", str(root)])
        return code, printed.getvalue()


@pytest.fixture
def cli(tmp_path):
    """Run a command on this test's runs."""
    return lambda *arguments: call(tmp_path, *arguments)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """One completed and one failed cell, run by the queue: their runs, and what watching them gave."""
    root = tmp_path_factory.mktemp("ended")
    cells = [digits_cell(seed=0), digits_cell(seed=1, act="exit")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KRONSCALE_LOCKS", str(root / "locks"))
        patched.setenv("COLUMNS", "200")
        submit(cells, Site(name="test", oversubscribe=True), root, FAKE_RANK)
        return root, cells, call(root, "status", "study", "--watch")


@pytest.fixture
def ended(watched):
    """The cells of `watched`, and a command on their runs, which tests only read."""
    root, cells, _ = watched
    return cells, lambda *arguments: call(root, *arguments)


def test_watching_ends_with_the_runs_and_exits_with_1_if_one_failed(watched):
    *_, (code, printed) = watched
    assert code == 1
    assert "1 COMPLETED" in printed
    assert "1 FAILED" in printed
    assert "rank 0 exited with code 3" in " ".join(printed.split())


def test_status_counts_states_filters_and_prints_json(ended):
    _, cli = ended
    code, printed = cli("status")
    assert code == 0
    assert printed.startswith("study: 1 COMPLETED, 1 FAILED")
    statuses = json.loads(cli("status", "study", "--where", "seed=1", "--json")[1])
    assert [(one["state"], one["seed"], one["step"]) for one in statuses] == [("FAILED", 1, 1)]


def test_logs_prints_a_ranks_log_and_refuses_a_rank_that_does_not_exist(ended):
    cells, cli = ended
    assert cli("logs", cells[1].id) == (0, "cannot find the data set\n")
    assert cli("logs", cells[1].id, "--follow")[1] == "cannot find the data set\n"
    code, printed = cli("logs", "sgd-p1", "--rank", "0")
    assert code == 2
    assert "2 cells" in printed
    code, printed = cli("logs", cells[0].id, "--rank", "4")
    assert (code, "ranks 0 to 0" in printed) == (2, True)


class Clock:
    """Time that passes only in `sleep`; what is `at` a second happens once that has passed."""

    def __init__(self):
        self.now, self.at = 0.0, {}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for second in [second for second in self.at if second <= self.now]:
            self.at.pop(second)()


def test_following_a_log_calls_the_launcher_at_intervals(
    make_cell, make_attempt, tmp_path, capsys, monkeypatch
):
    attempt = make_attempt(make_cell())
    calls = []

    class Counting:
        poll_seconds = 0.0

        def attempt_states(self, attempts):
            calls.append(len(attempts))
            return {} if len(calls) < 4 else {attempts[0]: AttemptState("LOST", "gone")}

    monkeypatch.setitem(LAUNCHERS, "local", Counting())
    clock = Clock()
    monkeypatch.setattr(status_view, "time", clock)
    attempt.log(0).write_text("first\n")
    clock.at[10] = lambda: attempt.write_outcome(outcome_without_ranks("FAILED", ""))
    print_log(attempt.cell_folder, 0, follow=True)
    assert (capsys.readouterr().out, len(calls)) == ("first\n", 1)
    assert 10 <= clock.now < 30

    (attempt.path / "outcome.json").unlink()
    began = clock.now
    print_log(attempt.cell_folder, 0, follow=True)
    assert len(calls) == 4  # an attempt that ended without an outcome ends the loop
    assert 60 <= clock.now - began < 65  # two intervals of 30 seconds after the call at the start


def test_cancel_and_retry_without_a_matching_cell_report_it(ended):
    _, cli = ended
    assert cli("cancel", "study")[1].startswith("nothing to cancel")
    assert cli("retry", "study", "--where", "seed=0")[1].startswith("nothing to retry")
    code, printed = cli("cancel", "studie")
    assert code == 2
    assert "study" in printed


def test_ctrl_c_stops_the_watching_and_not_the_runs(make_cell, site, tmp_path, command, wait_for, cli):
    cell = make_cell(steps=3000)
    submit([cell], site, tmp_path, command)
    arguments = ["status", "study", "--watch", "--runs", str(tmp_path)]
    program = "import sys; from harness.cli import main; sys.exit(main(sys.argv[1:]))"
    watcher = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    assert "study" in cli("status")[1]
    assert watcher.stdout.readline()  # it watches
    wait_for(lambda: "RUNNING" in cli("status")[1])
    os.kill(watcher.pid, signal.SIGINT)
    output, _ = watcher.communicate(timeout=120)
    assert watcher.returncode == 130
    assert "kronscale cancel study" in output
    assert "RUNNING" in cli("status")[1]
    assert cli("cancel", "study") == (0, "1 cell cancelled\n")
