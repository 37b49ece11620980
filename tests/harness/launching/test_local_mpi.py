"""Promise: ranks of one MPI world train as over Gloo; ranks that are not one MPI world are detected."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cell import Cell
from harness.errors import SiteError
from harness.launchers import LAUNCHERS
from harness.launchers.ranks import local as local_ranks
from harness.runs.store import Attempt, sweep_folder
from harness.study.submit import submit
from harness.training.malloc import keep_freed_memory
from tests.harness.checkpoint.runs import train
from tests.kfac_core.mpi_worlds import MPIEXEC

pytestmark = pytest.mark.ranks


@pytest.fixture
def real_attempt(tmp_path, site):
    """An attempt at digits, whose ranks are the real worker."""

    def make(world_size: int, backend: str, epochs: int = 2) -> Attempt:
        cell = Cell.model_validate({
            "sweep": "study", "method": "kfac", "world_size": world_size, "workload": "digits",
            "target": {"metric": "accuracy", "at_least": 0.9999}, "optimizer": {"lr": 0.1},
            "training": {"global_batch_size": 240, "epochs": epochs},
            "kfac": {"strategy": "mem_opt", "factor_update_steps": 1, "inverse_update_steps": 5},
        })  # fmt: skip
        attempt = sweep_folder("study", tmp_path / backend).stage(cell).new_attempt()
        LAUNCHERS["local"].plan(cell, site.model_copy(update={"backend": backend})).write(attempt)
        return attempt

    return make


def run(*command, env=None):
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def shared_memory(pids):
    """Files of shared memory that these processes have mapped; other tests' ranks have others."""
    mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {Path(name) for name in re.findall(r"/\S+/mpich_shm_\w+", mapped)}


def evaluations(attempt):
    records = [json.loads(line) for line in attempt.records(0).read_text().splitlines()]
    return [
        (record["step"], record["value"], record["train_loss"])
        for record in records
        if record["kind"] == "evaluation"
    ]


def sent_bytes(attempt, rank):
    records = [json.loads(line) for line in attempt.records(rank).read_text().splitlines()]
    return [record["sent_bytes"] for record in records if record["kind"] == "phases"]


def test_two_ranks_train_over_mpi_as_they_do_over_gloo(real_attempt, start_supervisor, world):
    over = {backend: real_attempt(2, backend) for backend in ("mpi", "gloo")}
    attempt = over["mpi"]
    assert start_supervisor(attempt).outcome().state == "COMPLETED", attempt.log(0).read_text()
    environment = attempt.read("environment.json")
    assert environment["backend"] == "mpi"
    assert len(environment["hosts"]) == 2
    assert environment["keeps_freed_memory"] == keep_freed_memory()  # as in this process
    assert not (attempt.path / "rendezvous.json").exists()  # MPI carried the address
    world(2).run(train, over["gloo"].cell_folder.cell(), over["gloo"])
    for got, want in zip(evaluations(over["mpi"]), evaluations(over["gloo"]), strict=True):
        assert got == pytest.approx(want, rel=1e-5)
    assert len(evaluations(over["mpi"])) == 2
    for rank in (0, 1):
        assert sent_bytes(over["mpi"], rank) == sent_bytes(over["gloo"], rank) != []


def test_a_rank_killed_in_an_mpi_world_is_named_and_takes_the_others_along(
    real_attempt, start_supervisor, wait_for, is_gone
):
    attempt = real_attempt(2, "mpi", epochs=100_000)
    supervisor = start_supervisor(attempt)
    wait_for(lambda: all((beat := attempt.last_heartbeat(r)) and beat.step > 2 for r in range(2)))
    ranks = supervisor.rank_pids()
    shared = shared_memory(ranks)
    assert shared
    [victim] = [pid for pid in ranks if "--rank\0001\0" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(victim, signal.SIGKILL)
    outcome = supervisor.outcome()
    assert outcome.state == "FAILED"
    assert outcome.cause.startswith("rank 1 was killed by SIGKILL at step ")
    wait_for(lambda: all(is_gone(pid) for pid in ranks))  # by a signal
    assert not any(path.exists() for path in shared)


def test_without_mpiexec_a_cell_is_refused_before_anything_is_written(
    make_cell, site, tmp_path, monkeypatch, command
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SiteError, match=r"site test: backend: mpi needs the mpiexec of MPICH .* pip install"):
        submit([make_cell(2)], site.model_copy(update={"backend": "mpi"}), tmp_path, command)
    assert not (tmp_path / "study").exists() or not list((tmp_path / "study").glob("*/attempt-*"))


def test_an_mpiexec_that_does_not_know_hydras_options_is_the_cause(
    make_cell, make_attempt, start_supervisor, tmp_path, monkeypatch
):
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho unknown option $1 >&2; exit 213\n")
    other.chmod(0o755)
    monkeypatch.setattr(local_ranks, "find_mpiexec", lambda: other)
    attempt = make_attempt(make_cell(2), backend="mpi")
    cause = start_supervisor(attempt).outcome().cause
    assert cause.startswith("the ranks could not be run: ")
    assert cause.endswith("did not start 2 ranks: unknown option -launcher")


FINDS_MPI = """
import json, logging, os, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from harness.training.world.world import find_mpi
started = dict(os.environ)
for case, (rank, size) in json.loads(sys.argv[1]).items():
    os.environ.update(started)
    own = int(started["PMI_RANK"])
    world, reason = find_mpi(own if rank is None else rank, size, required=False)
    inherited = sorted(name for name in os.environ if "PMI" in name)
    line = f"rank {own}, {case}: {'found' if world else 'not found:'} {reason} {inherited}\\n"
    os.write(1, line.encode())  # in one piece: the other rank writes to the same pipe
"""


def test_mpi_is_used_only_if_its_rank_and_size_are_the_launchers():
    cases = {"the same": (None, 2), "another size": (None, 4), "another rank": (0, 2)}
    done = run(str(MPIEXEC), "-n", "2", sys.executable, "-c", FINDS_MPI, json.dumps(cases))
    assert done.returncode == 0
    for rank in (0, 1):
        assert f"rank {rank}, the same: found  []" in done.stdout
        other = f"MPI reports rank {rank} of 2, the launcher reports rank {rank} of 4"
        assert f"rank {rank}, another size: not found: {other}" in done.stdout
    assert "rank 0, another rank: found  []" in done.stdout
    other = "MPI reports rank 1 of 2, the launcher reports rank 0 of 2"
    assert f"rank 1, another rank: not found: {other}" in done.stdout
    assert done.stdout.count("the rendezvous goes through the run folder instead") == 3
    assert done.stdout.count("[]\n") == 6  # no identity is left for children


def test_a_plain_rank_starts_no_mpi():
    program = (
        "import sys; from harness.training.world.world import find_mpi\n"
        "print(find_mpi(0, 2, required=False));"
        "sys.exit('mpi4py.MPI' in sys.modules)"
    )
    plain = {name: value for name, value in os.environ.items() if "PMI" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program], env=plain, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "no process manager" in done.stdout


def test_asking_for_mpi_without_an_mpi_launch_fails_with_what_to_do(real_attempt):
    attempt = real_attempt(2, "mpi")
    rank = [
        sys.executable,
        "-m",
        "harness.training.worker",
        str(attempt.path),
        "--rank",
        "0",
        "--world-size",
        "2",
    ]
    done = subprocess.run(
        [*rank, "--local-rank", "0", "--threads", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "backend=mpi, but MPI reports rank 0 of 1, the launcher reports rank 0 of 2" in done.stderr
    assert "or use backend: gloo" in done.stderr
