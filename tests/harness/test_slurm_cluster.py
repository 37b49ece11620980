"""Promise: the tests' Slurm is a real one of four nodes with accounting, and leaves nothing behind."""

import subprocess
import sys

import psutil
import pytest

from tests.waiting import wait_for

pytestmark = pytest.mark.slurm


def test_a_job_over_two_nodes_runs_and_is_accounted_for(cluster):
    said = cluster.run(
        "srun", "--job-name=pair", "--nodes=2", "--ntasks-per-node=2", "--mpi=pmi2", "--gpus-per-node=4",
        "sh", "-c", "echo $SLURM_PROCID $SLURM_LOCALID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES",
    )  # fmt: skip
    places = sorted(line.split()[:2] for line in said.splitlines())
    assert places == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    assert len({line.split()[2] for line in said.splitlines()}) == 2
    assert all(line.endswith(" 0,1,2,3") for line in said.splitlines())
    accounted = {"JobName": "pair", "State": "COMPLETED", "NNodes": "2"}
    wait_for(lambda: accounted in cluster.accounting(list(accounted)), seconds=20)


def test_a_killed_owner_leaves_no_daemon_and_no_job():
    script = (
        "import sys, time; from tests.slurm_cluster.cluster import Cluster\n"
        "with Cluster() as c:\n"
        "    c.run('sbatch', '--wrap', f'exec sleep 86400 # {c.folder}', '--chdir', '/tmp')\n"
        "    print(c.folder, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        folder = owner.stdout.readline().strip()  # type: ignore[union-attr]
        daemons = belonging_to(folder)
        assert {"slurmctld", "slurmdbd", "munged", "mariadbd"} <= {one.name() for one in daemons}
        owner.kill()
    _, left = psutil.wait_procs(daemons, timeout=30)
    assert not left
    assert not belonging_to(folder)


def belonging_to(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        environment = process.info["environ"] or {}
        if environment.get("SLURM_CONF", "").startswith(folder) or folder in " ".join(
            process.info["cmdline"] or []
        ):
            found.append(process)
    return found
