"""Promise: whatever happens while cells are submitted, every one of them runs exactly once.

The outcomes are tabulated in harness/launchers/slurm/README.md.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import harness.runs.store
import harness.study.submit
from harness.errors import SchedulerError, SiteError
from harness.study.submit import submit
from tests.harness.slurm.conftest import FAKE_RANK
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

FOREVER = 100_000

QUICK_RANK = (  # a shell: the many jobs of a test that only counts them need no Python for each rank
    "/bin/sh", "-c", """[ "$3" = 0 ] || exit 0
echo '{"reached_target": true, "stop_reason": "target", "train_seconds": 1.0, "value": 0.95, "steps": 3,
"parameters_sha256": "0"}' > "$1/result.json" """, "rank",
)  # fmt: skip


def test_a_refusal_of_sbatch_is_an_error_and_leaves_no_cell_pending(
    on_slurm, tmp_path, make_cell, make_site, ended, look
):
    cell = make_cell(world_size=8)
    with pytest.raises(SiteError, match=r"sbatch refused: .*invalid partition"):
        submit([cell], make_site(partition="nowhere"), tmp_path, FAKE_RANK)
    assert look(cell)[0].state == "STAGED"
    assert submit([cell], make_site(), tmp_path, FAKE_RANK).new == (cell,)
    (one,) = ended([cell])
    assert (one.state, one.attempt.number) == ("COMPLETED", 1)


def test_a_controller_that_is_down_delays_a_submission_and_running_cells_stay_visible(
    on_slurm, tmp_path, make_cell, make_site, ended, training, look
):
    running, late = make_cell(steps=FOREVER), make_cell(seed=1)
    submit([running], make_site(), tmp_path, FAKE_RANK)
    training(running)
    on_slurm.stop("slurmctld")
    try:
        (seen,) = look(running)
        assert seen.state == "RUNNING"
        assert seen.step > 1
        assert "Slurm does not answer" in seen.cause
        with pytest.raises(SchedulerError, match="to finish the submission: kronscale submit"):
            submit([late], make_site(), tmp_path, FAKE_RANK)
        assert look(late)[0].state == "PENDING"
    finally:
        on_slurm.start("slurmctld")
        wait_for(lambda: answers(on_slurm))
    assert submit([late], make_site(), tmp_path, FAKE_RANK).in_flight == (late,)
    (done,) = ended([late])
    assert (done.state, done.attempt.number) == ("COMPLETED", 1)
    assert look(running)[0].state == "RUNNING"


@pytest.mark.parametrize("locks_work", [True, False])
def test_two_submitters_at_once_run_every_cell_once(
    on_slurm, tmp_path, make_cell, make_site, ended, monkeypatch, locks_work
):
    if not locks_work:  # as between the login nodes of a file system without locks
        monkeypatch.setattr(harness.study.submit, "exclusive", lambda _path: contextlib.nullcontext())
    cells = [make_cell(world_size=2, seed=seed) for seed in range(6)]
    children = [fork(lambda: submit(cells, make_site(), tmp_path, FAKE_RANK)) for _ in range(2)]
    for child in children:
        os.waitpid(child, 0)
    submit(cells, make_site(), tmp_path, FAKE_RANK)
    ended(cells)
    for cell in cells:
        assert runs_of(tmp_path, cell) == 1


def test_a_login_process_killed_at_any_write_of_submit_loses_and_doubles_no_cell(
    on_slurm, tmp_path, make_cell, make_site, ended
):
    cells = [make_cell(world_size=1), make_cell(world_size=2)]  # two layouts, two arrays
    roots: list[Path] = []
    while True:
        root = tmp_path / f"killed-{len(roots)}"
        status = os.waitpid(fork(lambda: dying_submit(cells, make_site(), root, len(roots))), 0)[1]  # noqa: B023
        roots.append(root)
        if status == 0:  # it ended before the write at which it would have been killed
            break
        submit(cells, make_site(), root, QUICK_RANK)
    assert len(roots) > 15
    for root in roots:
        assert {(one.state, one.cause) for one in ended(cells, root)} == {("COMPLETED", "")}
        for cell in cells:
            assert runs_of(root, cell) == 1


def dying_submit(cells, site, root, writes_left):
    """Submit; die by SIGKILL after `writes_left` writes, of files or by sbatch."""
    left = [writes_left]

    def deadly(real: Callable) -> Callable:
        def call(*args, **options):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return real(*args, **options)

        return call

    for name in ("mkdir", "write_text", "unlink", "replace"):
        setattr(Path, name, deadly(getattr(Path, name)))
    os.link, os.fsync = deadly(os.link), deadly(os.fsync)
    subprocess.run = deadly(subprocess.run)
    submit(cells, site, root, QUICK_RANK)


def fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def runs_of(root: Path, cell) -> int:
    """How many attempts at the cell ever started a rank 0."""
    return len(list((root / "study" / cell.id).glob("attempt-*/rank-00000.end")))


def answers(cluster) -> bool:
    try:
        return "4" in cluster.run("sinfo", "-h", "-p", "main", "-t", "idle,mix,alloc", "-o", "%D")
    except subprocess.CalledProcessError:
        time.sleep(0.2)
        return False
