"""Promise: a test that starts ranks says so, and `make test-fast` leaves it out."""

from __future__ import annotations

import multiprocessing

import pytest

from tests import started_ranks
from tests.distribution import group_of

FAST = "not ranks and not slurm and not slow and not gpu"


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (["python", "-m", "harness.training.worker", "attempt-1", "--rank", "0"], True),
        (["python", "-m", "harness.launchers.local.queue", "study"], True),
        (["/usr/bin/mpiexec", "-n", "2", "python", "-c", "pass"], True),
        (["python", "-m", "harness.cli", "run", "-f", "sweep.yaml"], True),
        (["python", "-m", "harness.cli", "submit", "-f", "sweep.yaml", "--dry-run"], False),
        (["python", "-m", "harness.cli", "status"], False),
    ],
)
def test_commands_that_start_ranks_are_recognised(words, starts):
    assert started_ranks.starts_ranks(words) is starts


@pytest.fixture
def noted():
    """What a test starts, which this one is allowed to."""
    yield started_ranks.seen
    started_ranks.seen.clear()


def test_a_new_interpreter_of_multiprocessing_is_noted_and_a_fork_is_not(noted, monkeypatch):
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "_check_closed", lambda self: 1 / 0)
    for method, number in (("fork", 0), ("spawn", 1), ("forkserver", 2)):
        with pytest.raises(ZeroDivisionError):
            multiprocessing.get_context(method).Process(target=print).start()
        assert len(noted) == number
    noted.clear()


def test_a_test_that_starts_ranks_without_the_marker_fails(pytester, noted):
    pytester.makeconftest("from tests.conftest import pytest_runtest_call, pytest_runtest_logstart")
    pytester.makepyfile(
        "import subprocess, pytest\n"
        "def start():\n"
        "    with pytest.raises(FileNotFoundError): subprocess.run(['/nowhere/mpiexec'])\n"
        "@pytest.mark.ranks\n"
        "def test_marked(): start()\n"
        "def test_unmarked(): start()\n"
        "def test_harmless(): pass\n"
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-W", "ignore")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*starts ranks*mark it*ranks*nowhere/mpiexec*"])


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("tests/harness/slurm/test_faults.py::test_a", "tests/harness/test_slurm_cluster.py::test_b", True),
        ("tests/analysis/test_figures.py::test_a[x]", "tests/analysis/test_report.py::test_b", True),
        ("tests/kfac_core/test_state.py::test_a", "tests/kfac_core/test_memory.py::test_a", False),
        ("tests/harness/launching/test_submit.py::a", "tests/harness/launching/test_submit.py::b", False),
    ],
)
def test_tests_that_share_what_is_slow_to_start_run_on_one_worker(one, other, together):
    assert (group_of(one) == group_of(other)) is together


def test_the_fast_tier_is_most_of_the_suite(request):
    """Functions, not parameters, of the tests that this session collected, if it is the whole suite."""
    items = request.session.items
    functions = {(item.path, item.originalname) for item in items}
    if len(functions) < 800:
        pytest.skip("only a part of the suite was collected")
    marked = {"ranks", "slurm", "slow", "gpu"}
    fast = {
        (one.path, one.originalname) for one in items if not marked & {m.name for m in one.iter_markers()}
    }
    assert len(fast) >= 0.7 * len(functions)
