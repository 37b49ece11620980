"""Promise: `status` says why a cell is pending: what it waits for, and who has it."""

from harness.cli import main
from harness.launchers.launch import ProcessIdentity
from harness.launchers.local.host_locks import holders, locked
from harness.launchers.local.queue import pending
from harness.launchers.slurm import scheduler_state
from harness.launchers.slurm.scheduler import Job
from harness.runs.store import sweep_folder
from harness.study.status import read_statuses
from harness.study.submit import cancel

POOL = [("cpu", (0, 1, 2, 3), 2)]


def test_a_lock_names_its_holder_while_it_is_held(tmp_path):
    assert holders() == {}
    with locked(POOL, label="/runs/demo/sgd-p2-s0-0123456789/attempt-1"):
        assert holders() == dict.fromkeys(("cpu-0", "cpu-1"), "/runs/demo/sgd-p2-s0-0123456789/attempt-1")
        with locked([("cpu", (2,), 1)]):
            assert holders()["cpu-2"].startswith("process ")
    assert holders() == {}


def test_the_first_waits_for_locks_and_the_others_for_the_first(make_cell, make_attempt, tmp_path):
    cells = [make_cell(2, seed=seed) for seed in range(3)]
    attempts = [make_attempt(cell, oversubscribe=False) for cell in cells]
    for attempt in attempts:
        launch = attempt.read("launch.json")
        attempt.write("launch.json", launch | {"cpus": [0, 1, 2, 3], "cpus_per_rank": 2})
    attempts[0].write("supervisor.json", ProcessIdentity.mine().to_dict())
    folder = sweep_folder("study", tmp_path)
    with locked(POOL, label="/runs/other/k-p2-s0-0123456789/attempt-3"):
        causes = [one.cause for one in read_statuses(folder, cells)]
    assert causes[0] == "waits for 4 of 4 CPUs; other/k-p2-s0-0123456789 holds 2"
    assert causes[1:] == [f"queued behind {cells[0].id}"] * 2
    assert {one.state for one in read_statuses(folder, cells)} == {"PENDING"}


def test_where_cells_run_one_at_a_time_none_has_a_supervisor_while_another_runs(
    make_cell, make_attempt, tmp_path
):
    cells = [make_cell(2, seed=seed) for seed in range(2)]
    for attempt in map(make_attempt, cells):
        launch = attempt.read("launch.json")
        site = launch["site"] | {"one_at_a_time": True}
        attempt.write("launch.json", launch | {"cpus": [0, 1, 2, 3], "site": site})
    with locked(POOL, label="/runs/study/k-p2-s7-0123456789/attempt-1"):
        causes = [one.cause for one in read_statuses(sweep_folder("study", tmp_path), cells)]
    assert causes == ["waits for 4 of 4 CPUs; study/k-p2-s7-0123456789 holds 2"] * 2


def test_what_a_cell_has_already_counts(make_cell, make_attempt, tmp_path):
    cell = make_cell(2)
    attempt = make_attempt(cell)
    attempt.write("launch.json", attempt.read("launch.json") | {"cpus": [0, 1, 5, 7], "cpus_per_rank": 2,
                                                                "oversubscribed": False})  # fmt: skip
    attempt.write("supervisor.json", ProcessIdentity.mine().to_dict())
    folder = sweep_folder("study", tmp_path)
    with (
        locked([("cpu", (0, 1), 2)], label=str(attempt.path.resolve())),
        locked([("cpu", (5,), 1)], label="/runs/demo/a-p1-s0-0123456789/attempt-1"),
        locked([("cpu", (7,), 1)], label="/runs/demo/b-p1-s0-0123456789/attempt-1"),
    ):
        (one,) = read_statuses(folder, [cell])
    assert one.cause == (
        "waits for 4 of 4 CPUs; demo/a-p1-s0-0123456789 holds 1, demo/b-p1-s0-0123456789 holds 1"
    )
    assert read_statuses(folder, [cell])[0].cause == ""  # all are free: it starts at any moment


def test_a_cell_whose_supervisor_is_not_known_holds_up_no_other_and_can_be_cancelled(
    make_cell, make_attempt, tmp_path, capsys
):
    cells = [make_cell(seed=seed) for seed in range(2)]
    damaged, whole = (make_attempt(cell) for cell in cells)
    path, folder = damaged.path / "supervisor.json", sweep_folder("study", tmp_path)
    path.write_text("")
    assert list(pending(folder)) == [whole]
    assert capsys.readouterr().err.startswith(f"kronscale: passed over: {path}: holds nothing")
    first, second = read_statuses(folder, cells)
    assert (first.state, second.state, second.cause) == ("PENDING", "PENDING", "")
    assert first.cause.startswith(f"no queue starts it: {path}: holds nothing")
    assert first.cause.endswith("; cancel it, then retry it")
    assert cancel(cells, tmp_path) == cells
    assert [one.state for one in read_statuses(folder, cells)] == ["CANCELLED"] * 2


def test_a_pending_job_has_the_schedulers_reason(make_cell, make_attempt, tmp_path, monkeypatch, capsys):
    cell = make_cell()
    attempt = make_attempt(cell)
    launch = attempt.read("launch.json") | {"launcher": "slurm", "manifest": "m1", "manifest_job": 4}
    attempt.write("launch.json", launch)
    manifest = tmp_path / "study" / "jobs" / "m1"
    manifest.mkdir(parents=True)
    (manifest / "submitted.json").write_text('{"job_id": "77"}')
    job = Job("77_4", "PENDING", "PENDING", "", "QOSMaxGRESPerUser", 0)
    monkeypatch.setattr(scheduler_state, "jobs_of", lambda users: {"77_4": job})
    assert main(["status", "study", "--runs", str(tmp_path)]) == 0
    assert "job 77_4 waits: QOSMaxGRESPerUser" in " ".join(capsys.readouterr().out.split())
