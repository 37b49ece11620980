"""Promises of the wrapper: it writes a rank's end and log, readable by the group if the folder is, and no
signal ends it before it has done so or while it exits."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from harness.launchers.ranks import wrapper


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o2750, 0o640), (0o700, 0o600)])
def test_the_group_may_read_the_files_if_it_may_enter_the_folder(tmp_path, folder_mode, file_mode):
    attempt = tmp_path / "attempt-1"
    (attempt / "logs").mkdir(parents=True)
    attempt.chmod(folder_mode)
    variables = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
    }
    command = [sys.executable, "-c", "print('here')"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", wrapper.__file__, str(attempt), "1", "-", *command],
        env=os.environ | variables, umask=0o027, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    end, log = attempt / "rank-00003.end", attempt / "logs" / "rank-00003.log"
    assert [stat.S_IMODE(file.stat().st_mode) for file in (end, log)] == [file_mode] * 2
    assert log.read_text() == "here\n"
    assert [json.loads(line).get("exit_code") for line in end.read_text().splitlines()] == [None, 0]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_until_it_is_gone_change_neither_line_nor_exit_code(tmp_path, number):
    """Hydra sends SIGUSR1 when a peer has ended, and SIGKILL to all others once that has killed a wrapper."""
    (tmp_path / "logs").mkdir()
    cpu = str(min(os.sched_getaffinity(0)))
    parent = subprocess.Popen(
        [sys.executable, "-I", "-S", wrapper.__file__, str(tmp_path), "1", cpu, "/bin/sleep", "0.2"],
        env=os.environ | {"PMI_RANK": "0", "PMI_SIZE": "1"},
    )  # fmt: skip
    end = tmp_path / "rank-00000.end"
    while not end.exists() or not end.read_text().endswith("\n"):
        assert parent.poll() is None or end.exists()
    while parent.poll() is None:
        parent.send_signal(number)
        time.sleep(0.0002)  # without a pause it would do nothing but handle signals
    assert parent.returncode == 1  # of `sleep`, which knows no --rank
    assert [json.loads(line).get("exit_code") for line in end.read_text().splitlines()] == [None, 1]


def test_a_rank_that_ended_before_it_was_watched_is_no_error_and_no_orphan():
    rank = subprocess.Popen(["/bin/true"])
    rank.wait()
    gone = threading.Event()
    wrapper._end_with_parent(os.getpid(), rank.pid, gone)
    assert not gone.is_set()
