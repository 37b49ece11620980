"""Promise: a sweep on Slurm has the records of a local one, and needs few jobs and few calls."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from harness.cell import Target
from harness.cli import main
from harness.errors import BudgetError
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.runs.store import sweep_folder
from harness.study.status import read_statuses
from harness.study.submit import cancel, preview, retry, submit
from tests.harness.slurm.conftest import FAKE_RANK
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

STUDY = """\
sweep: study
workload: digits
target: {metric: accuracy, at_least: 0.9}
training: {global_batch_size: 256, epochs: 6}
optimizer: {lr: 0.4, warmup_epochs: 2}
methods:
  - {name: comm_opt, kfac: {paper: sc20, damping: 0.003, factor_update_steps: 1, inverse_update_steps: 5}}
grid: {world_size: [4]}
repeats: 1
"""


def test_two_nodes_of_two_ranks_write_the_records_that_one_host_writes(on_slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("KRONSCALE_LOCKS", str(tmp_path / "locks"))
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    (tmp_path / "here.yaml").write_text("oversubscribe: true\n")
    places = {
        "slurm": "jobs/sites/slurm-test.yaml", "mpi": "jobs/sites/slurm-test-mpi.yaml",
        "local": str(tmp_path / "here.yaml"),
    }  # fmt: skip
    seen = {}
    for name, site in places.items():
        runs = tmp_path / name
        assert main(["run", "-f", str(file), "--site", site, "--runs", str(runs)]) == 0
        for folder in sweep_folder("study", runs).cell_folders():
            attempt = folder.latest()
            lines = [json.loads(line) for line in attempt.records(0).read_text().splitlines()]
            losses = [(one["train_loss"], one["value"]) for one in lines if one["kind"] == "evaluation"]
            windows = [one["sent_bytes"] for one in lines if one["kind"] == "phases"]
            seen[name, folder.id] = losses, windows, attempt.outcome().state
            assert len(list(attempt.path.glob("rank-*.jsonl"))) == 4
            backend = attempt.read("environment.json")["backend"]
            assert backend == ("mpi" if name == "mpi" else "gloo")
    ids = {id for _, id in seen}
    assert len(ids) == 1
    for id in ids:
        assert seen["slurm", id] == seen["local", id]
        assert seen["mpi", id][1:] == seen["local", id][1:]
        # MPI may add in another order, and training makes such differences grow: over Gloo alone, with shared
        # memory or without, from 2e-7 after three evaluations to 2e-3 after eight
        over_mpi, local = ([loss for loss, _ in seen[name, id][0]] for name in ("mpi", "local"))
        assert over_mpi[:4] == pytest.approx(local[:4], rel=1e-4)
        assert over_mpi == pytest.approx(local, rel=1e-2)
        values = ([value for _, value in seen[name, id][0]] for name in ("mpi", "local"))
        assert next(values) == pytest.approx(next(values), abs=0.01)
        ends = [json.loads(line) for path in (tmp_path / "slurm/study" / id).glob("attempt-1/rank-*.end")
                for line in path.read_text().splitlines() if "node" in line]  # fmt: skip
        assert sorted(end["rank"] for end in ends) == [0, 1, 2, 3]
        assert len({end["node"] for end in ends}) == 2
    jobs = lambda: [one["State"] for one in on_slurm.accounting(["JobName", "State"])  # noqa: E731
                    if one["JobName"].startswith("kronscale-study")]  # fmt: skip
    wait_for(lambda: jobs()[-2:] == ["COMPLETED"] * 2)


def test_arms_of_a_block_run_in_one_job_one_after_another(on_slurm, tmp_path, make_cell, make_site, ended):
    cells = [make_cell(method=method, seed=seed, steps=4) for method in "ab" for seed in (0, 1)]
    submit(cells, make_site(pair_arms=True), tmp_path, FAKE_RANK)
    assert {one.state for one in ended(cells)} == {"COMPLETED"}
    jobs = {}
    for cell in cells:
        attempt = sweep_folder("study", tmp_path).cell_folder(cell).latest()
        used = json.loads((attempt.path / "used-0.json").read_text())
        job = json.loads((attempt.path / "taken.json").read_text())["job"]
        jobs.setdefault(job, []).append((used["from"], used["to"], cell.seed))
    assert len(jobs) == 2
    for first, second in map(sorted, jobs.values()):
        assert first[2] == second[2]
        assert first[1] <= second[0]


def test_small_cells_share_a_job_side_by_side(
    on_slurm, tmp_path, make_cell, make_site, training, look, ended
):
    cells = [make_cell(world_size=2, seed=seed, steps=100_000) for seed in range(2)]  # none ends by itself
    submit(cells, make_site(cells_per_job=2, ranks_per_node=4), tmp_path, FAKE_RANK)
    attempts = [training(cell) for cell in cells]
    assert [one.state for one in look(*cells)] == ["RUNNING"] * 2
    assert len({attempt.read("taken.json")["job"] for attempt in attempts}) == 1
    cancel(cells, tmp_path)
    assert {one.state for one in ended(cells)} == {"CANCELLED"}


def test_names_are_never_interpreted_by_a_shell(on_slurm, tmp_path, make_cell, make_site, ended, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / 'it\'s a "run"\n$(touch broken) `touch broken` %j;&& #'
    root.mkdir()
    cell = make_cell(world_size=2, note="$(touch broken)'\"\n;touch broken")
    site = make_site(ranks_per_node=1).model_copy(update={"environment": {"NOTE": "$(touch broken)\n'\""}})
    submit([cell], site, root, FAKE_RANK)
    (one,) = ended([cell], root)
    assert one.state == "COMPLETED"
    used = json.loads((one.attempt.path / "used-1.json").read_text())
    assert used["environment"]["NOTE"] == "$(touch broken)\n'\""
    assert not list(tmp_path.rglob("broken"))
    assert one.attempt.log(1).exists()


def test_variables_of_the_submitting_allocation_do_not_reach_ranks(
    on_slurm, tmp_path, make_cell, make_site, ended, monkeypatch
):
    for name in (
        "SLURM_CPU_BIND",
        "SBATCH_PARTITION",
        "PMI_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.setenv(name, "leaked")
    cell = make_cell(world_size=2)
    submit([cell], make_site(), tmp_path, FAKE_RANK)
    (one,) = ended([cell])
    assert one.state == "COMPLETED", one.cause
    environment = json.loads((one.attempt.path / "used-0.json").read_text())["environment"]
    assert "leaked" not in environment.values()
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("export", ["NONE", "HOME,PATH"])
def test_ranks_have_the_sites_variables_where_sbatch_exports_none(
    on_slurm, tmp_path, make_cell, make_site, ended, export
):
    site = make_site(sbatch={"export": export}, setup=("export SET_UP=yes", 'PATH="/own/bin:$PATH"'))
    cell = make_cell()
    submit([cell], site.model_copy(update={"environment": {"SITES": "own"}}), tmp_path, FAKE_RANK)
    (one,) = ended([cell])
    assert one.state == "COMPLETED", one.cause
    for rank in range(4):
        environment = json.loads((one.attempt.path / f"used-{rank}.json").read_text())["environment"]
        names = ("SITES", "SET_UP", "OMP_NUM_THREADS")
        assert [environment[name] for name in names] == ["own", "yes", "1"]
        assert environment["PATH"].startswith("/own/bin:")


@pytest.mark.parametrize("command", ["run", "reproduce"])
def test_files_named_like_modules_in_the_working_folder_are_not_imported(on_slurm, tmp_path, command):
    for name in ("random.py", "platform.py", "types.py", "harness/__init__.py", "torch/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('a file of the working folder was imported')\n")
    sweeps = tmp_path / "jobs" / "papers" / "tiny" / "small"
    sweeps.mkdir(parents=True)
    one_epoch = STUDY.replace("epochs: 6", "epochs: 1").replace(", warmup_epochs: 2", "")
    (sweeps / "study.yaml").write_text(one_epoch.replace("sweep: study", "sweep: tiny-small-study"))
    figure = {"shows": "Fig. 1", "figure": "learning_curves", "sweep": "study"}
    paper = {"paper": "tiny", "title": "Tiny", "about": "digits", "summary": "study", "figures": [figure]}
    (sweeps.parent / "small.yaml").write_text(json.dumps(paper))
    what = ["-f", "jobs/papers/tiny/small/study.yaml"] if command == "run" else ["tiny", "--watch"]
    started = subprocess.run(
        [sys.executable, "-P", "-c", "import sys; from harness.cli import main; sys.exit(main(sys.argv[1:]))",
         command, *what, "--site", "slurm-test", "--runs", "runs"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr
    (cell,) = sweep_folder("tiny-small-study", tmp_path / "runs").cell_folders()
    assert cell.latest().outcome().state == "COMPLETED"


def test_cancelling_ends_running_and_waiting_cells(on_slurm, tmp_path, make_cell, make_site, training):
    cells = [make_cell(seed=seed, steps=100_000) for seed in range(3)]
    submit(cells, make_site(at_once=1), tmp_path, FAKE_RANK)
    training(cells[0])
    assert len(cancel(cells, tmp_path)) == 3
    found = read_statuses(sweep_folder("study", tmp_path), cells)
    assert [one.state for one in found] == ["CANCELLED"] * 3
    wait_for(lambda: not on_slurm.run("squeue", "--noheader"))


def test_cancelling_a_part_of_an_array_keeps_the_rest(on_slurm, tmp_path, make_cell, make_site):
    cells = [make_cell(world_size=1, seed=seed) for seed in range(6)]
    site = make_site(cells_per_job=2, ranks_per_node=4, sbatch={"begin": "now+1hour"})
    submit(cells, site, tmp_path, FAKE_RANK)
    packed = {  # by their place in the array of three
        seed: read_statuses(sweep_folder("study", tmp_path), [cell])[0].cause.split()[1]
        for seed, cell in enumerate(cells)
    }
    whole = [seed for seed in range(6) if packed[seed] == packed[0]]
    half = next(seed for seed in range(6) if packed[seed] != packed[0])
    cancel([cells[seed] for seed in (*whole, half)], tmp_path)
    queued = on_slurm.run("squeue", "--noheader", "--array", "--format=%F_%K").split()
    assert sorted(queued) == sorted(set(packed.values()) - {packed[0]})
    found = read_statuses(sweep_folder("study", tmp_path), cells)
    assert [one.state for one in found] == [
        "CANCELLED" if seed in (*whole, half) else "PENDING" for seed in range(6)
    ]
    cancel(cells, tmp_path)
    assert on_slurm.run("squeue", "--noheader") == ""


def test_a_thousand_cells_need_few_calls_to_submit_and_to_read_their_status(
    on_slurm, tmp_path, make_cell, make_site, monkeypatch
):
    calls_made = []
    real = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda words, **options: calls_made.append(words[0]) or real(words, **options)
    )
    cells = [make_cell(world_size=2, seed=seed) for seed in range(1000)]
    site = make_site(at_once=1, ranks_per_node=1, sbatch={"begin": "now+1hour"})
    began = time.process_time()  # CPU seconds: the machine may be busy
    submit(cells, site, tmp_path, FAKE_RANK)
    submitted, to_submit = time.process_time(), list(calls_made)
    calls_made.clear()
    found = read_statuses(sweep_folder("study", tmp_path), cells)
    looked = time.process_time()
    assert {one.state for one in found} == {"PENDING"}
    assert all(one.cause.startswith("job ") for one in found)
    assert len(to_submit) <= 4, to_submit
    assert len(calls_made) <= 4, calls_made
    assert submitted - began < 60
    assert looked - submitted < 6
    assert len(cancel(cells, tmp_path)) == 1000


def test_a_dry_run_shows_the_script_and_a_budget_refuses_before_anything_is_written(
    tmp_path, make_cell, make_site, capsys
):
    site = make_site(
        timeout_minutes=58, partition="gpu", account="m1", sbatch={"reservation": "r 1", "hint": None}
    )
    site = site.model_copy(update={"cpus_per_rank": 4})
    cells = [make_cell(world_size=4, seed=seed) for seed in range(3)] + [make_cell(world_size=1)]
    seen = preview(cells, site, tmp_path)
    assert seen.cost.core_hours == pytest.approx(3 * 16 * 1 + 4)
    first, second = seen.text.split("#!/bin/bash")[1:]
    for line in (
        "--array=0-2%3", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=4", "--time=60", "--account=m1",
        "--partition=gpu", "--reservation='r 1'", "--hint", "--no-requeue",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in first
    assert "wckey" not in seen.text
    assert "--signal" not in seen.text
    assert "--nodes=1\n" in second
    with pytest.raises(BudgetError, match="52 core-hours"):
        submit(cells, site, tmp_path, FAKE_RANK, budget=51)
    assert not list(tmp_path.rglob("attempt-*"))


def test_a_node_that_failed_twice_is_excluded_from_new_jobs(on_slurm, tmp_path, make_cell, make_site, ended):
    cells = [make_cell(world_size=1, seed=seed) for seed in range(2)]
    for cell in cells:
        attempt = sweep_folder("study", tmp_path).stage(cell).new_attempt()
        attempt.write("launch.json", {"launcher": "slurm"})
        attempt.write_outcome(replace(outcome_without_ranks("NODE_FAIL", "", 0.0), failed_nodes=("n1",)))
    retry(cells, make_site(exclude_nodes=("n4",)), tmp_path, FAKE_RANK)
    for one in ended(cells):
        assert one.state == "COMPLETED"
        assert one.attempt.read("taken.json")["node"] in ("n2", "n3")


def test_ranks_of_two_nodes_run_by_another_python_behind_a_prefix_and_meet_without_a_polled_file(
    make_site, make_cell, ended, tmp_path, on_slurm
):
    """The prefix runs the rank as its child, and so does what stands for another Python."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$KRONSCALE_BOARD $*" >> {tmp_path}/calls\nexec {sys.executable} "$@"\n'
    )
    prefix = tmp_path / "prefix"
    prefix.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/prefixed\n"$@"\n')
    for program in (python, prefix):
        program.chmod(0o755)
    site = make_site(ranks_per_node=1).model_copy(
        update={"python": str(python), "launch_prefix": (str(prefix),)}
    )
    cell = make_cell(2).model_copy(update={"target": Target(metric="accuracy", at_least=0.0)})
    submit([cell], site, tmp_path)
    (status,) = ended([cell])
    assert status.state == "COMPLETED", status.cause
    assert len((tmp_path / "prefixed").read_text().splitlines()) == 2
    calls = (tmp_path / "calls").read_text().splitlines()
    boards = {line.split()[0] for line in calls if "harness.training.worker" in line}
    assert len(boards) == 1
    assert ":" in boards.pop()
