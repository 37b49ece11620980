"""Promise: ranks run in the software environment that the profile names, whatever runs the submission."""

import json
import os
import subprocess
import sys

import pytest

from harness.cli import main
from harness.doctor.examine import check_program
from harness.launchers import LAUNCHERS
from harness.launchers.launch import job_python, rank_words
from harness.launchers.ranks import srun as step
from harness.launchers.site_profile import Site, read_site
from harness.launchers.slurm.job_layout import JobLayout
from harness.launchers.slurm.sbatch import batch_text
from harness.launchers.slurm.submission_manifest import SubmissionManifest
from harness.runs.store import sweep_folder

pytestmark = pytest.mark.ranks

# A new root, in which /mnt has a Python that the host does not have: what a container does.
CONTAINER = """#!/bin/sh
if [ "$1" != inside ]; then exec unshare --mount "$0" inside "$@"; fi
shift
mount --rbind / {root} && mount -t tmpfs none {root}/mnt && cp {python} {root}/mnt/python || exit 125
exec chroot {root} "$@"
"""


def _program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def container(tmp_path):
    """A prefix that starts a command under another root."""
    (tmp_path / "root").mkdir()
    python = _program(tmp_path / "inside", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    text = CONTAINER.format(root=tmp_path / "root", python=python)
    prefix = _program(tmp_path / "container", text)
    if subprocess.run([prefix, "/mnt/python", "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip("this user may not change the root of a process")
    return prefix


def test_ranks_run_under_another_root_with_its_own_python_and_doctor_says_what_is_there(
    container, tmp_path, capsys
):
    site = tmp_path / "contained.yaml"
    data = tmp_path / "data"
    data.mkdir()
    site.write_text(
        f"oversubscribe: true\npython: /mnt/python\nlaunch_prefix: [{container}]\n"
        f"environment: {{KRONSCALE_DATA: {data}}}\n"
    )
    words = ["doctor", "--site", str(site), "--runs", str(tmp_path / "runs"), "--ranks", "2", "--json"]
    code = main(words)
    shown = json.loads(capsys.readouterr().out)
    found = {one["check"]: one for one in shown["findings"]}
    assert code == 0, found
    assert found["ranks: job"]["state"] == "ok"
    assert found["ranks: data"]["found"] == f"KRONSCALE_DATA={data} behind {container}"
    assert not os.path.lexists("/mnt/python")


@pytest.mark.parametrize("field", ["python", "launch_prefix"])
def test_doctor_names_a_program_that_this_host_lacks(field):
    value = "/nowhere/python" if field == "python" else ("/nowhere/python", "exec")
    found = check_program(Site(name="here", **{field: value}))
    assert found.state == "fault"
    assert found.found == f"{field}: /nowhere/python is not a program on this host's PATH"
    assert check_program(Site(name="here")).state == "ok"


def test_the_command_of_a_rank_has_the_prefix_and_the_sites_python():
    command = (sys.executable, "-m", "harness.training.worker")
    plain = Site(name="here")
    assert rank_words(plain, command) == command
    assert job_python(plain) == sys.executable
    modules = plain.model_copy(update={"python": "python3"})
    assert rank_words(modules, command) == ("python3", *command[1:])
    assert job_python(modules) == "python3"
    image = modules.model_copy(update={"launch_prefix": ("apptainer", "exec", "--nv", "a b.sif")})
    assert rank_words(image, command) == ("apptainer", "exec", "--nv", "a b.sif", "python3", *command[1:])
    assert job_python(image) == sys.executable
    assert rank_words(image, ("/bin/probe",))[-1] == "/bin/probe"


@pytest.fixture
def manifest(make_cell, tmp_path):
    """Of a job whose Python prints its environment."""
    (tmp_path / "cluster.yaml").write_text(
        f"launcher: slurm\ncpus_per_rank: 3\npython: {tmp_path / 'python'}\n"
        "environment: {MINE: 'from $HOME', BOTH: environment}\n"
        "slurm:\n  ranks_per_node: 2\n"
        "  setup: ['export BOTH=\"$BOTH and setup\"', export OMP_NUM_THREADS=7]\n"
    )
    dump = f"import json, os, sys; json.dump([dict(os.environ), sys.argv[1:]], open('{tmp_path}/seen', 'w'))"
    _program(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} -c "{dump}" "$@"\n')
    site = read_site(str(tmp_path / "cluster.yaml"))
    attempt = sweep_folder("study", tmp_path).stage(make_cell(2)).new_attempt()
    launches = {attempt: LAUNCHERS["slurm"].plan(make_cell(2), site)}
    found = SubmissionManifest.plan(
        sweep_folder("study", tmp_path), JobLayout(2, 1, 1, 1), launches, [[[attempt]]]
    )
    found.path.mkdir(parents=True)
    return found


def test_setup_has_the_last_word_over_environment_and_threads(manifest, tmp_path, monkeypatch):
    shell = {**os.environ, "SLURM_ARRAY_TASK_ID": "0", "OMP_NUM_THREADS": "99", "BOTH": "shell"}
    subprocess.run(["bash", "-c", batch_text(manifest)], env=shell, check=True)
    environment, words = json.loads((tmp_path / "seen").read_text())
    assert words[:4] == ["-P", "-u", "-m", "harness.launchers.slurm.batch_job"]
    assert environment["MINE"] == "from $HOME"
    assert environment["BOTH"] == "environment and setup"
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["MKL_NUM_THREADS"] == "3"
    monkeypatch.setattr(step.os, "environ", environment)
    of_ranks = step._environment(manifest.launch, "")
    assert {name: of_ranks[name] for name in ("MINE", "BOTH", "OMP_NUM_THREADS")} == {
        "MINE": "from $HOME", "BOTH": "environment and setup", "OMP_NUM_THREADS": "7",
    }  # fmt: skip
