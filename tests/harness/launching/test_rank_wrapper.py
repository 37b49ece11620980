"""Promise: the wrapper writes a rank's end and log, readable by the group if the folder is."""

import json
import os
import stat
import subprocess
import sys
import threading

import pytest

from harness.launchers import rank_wrapper


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
        [sys.executable, "-I", "-S", rank_wrapper.__file__, str(attempt), "1", "-", *command],
        env=os.environ | variables, umask=0o027, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    end, log = attempt / "rank-00003.end", attempt / "logs" / "rank-00003.log"
    assert [stat.S_IMODE(file.stat().st_mode) for file in (end, log)] == [file_mode] * 2
    assert log.read_text() == "here\n"
    assert [json.loads(line).get("exit_code") for line in end.read_text().splitlines()] == [None, 0]


def test_a_rank_that_ended_before_it_was_watched_is_no_error_and_no_orphan():
    rank = subprocess.Popen(["/bin/true"])
    rank.wait()
    gone = threading.Event()
    rank_wrapper._end_with_parent(os.getpid(), rank.pid, gone)
    assert not gone.is_set()
