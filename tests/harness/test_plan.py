"""Promise: `plan` shows what a sweep would run and what is completed, and changes nothing on disk."""

import json
from pathlib import Path

import pytest

from harness.cli import main
from harness.launchers import LAUNCHERS
from harness.launchers.launch import WORKER_COMMAND
from harness.launchers.site_profile import read_site
from harness.runs.attempt_outcome import Outcome
from harness.runs.store import sweep_folder
from harness.study.plan_summary import placement_in_words, plan_summary
from harness.study.status import read_statuses
from harness.study.sweep import read_sweep
from kfac_core.config import KFACConfig
from kfac_core.schedule import Milestones

DEMO = "tests/strategies.yaml"


@pytest.fixture
def runs(tmp_path):
    """The demo's first four cells: completed, failed, failed and then completed, pending."""
    cells = read_sweep(Path(DEMO)).cells
    for cell, states in zip(cells, (["COMPLETED"], ["OOM"], ["FAILED", "COMPLETED"], [None]), strict=False):
        folder = sweep_folder("demo", tmp_path).stage(cell)
        for state in states:
            attempt = folder.new_attempt()
            LAUNCHERS["local"].plan(cell, read_site("local"), WORKER_COMMAND).write(attempt)
            if state:
                attempt.write_outcome(Outcome(state, "", None, "epochs", 1000.0, 1060.0))
    sweep_folder("demo", tmp_path).stage(cells[4])  # a folder without an attempt is new
    return tmp_path


def test_the_state_of_a_cell_is_that_of_its_newest_attempt(runs):
    seen = plan_summary(read_sweep(Path(DEMO)).cells, runs)
    assert list(seen.states.values())[:6] == ["done", "failed", "done", "pending", "new", "new"]
    assert seen.counts == {"done": 2, "failed": 1, "pending": 1, "new": 32}
    assert [seconds for _, seconds in seen.taken] == [60.0, 60.0]
    cut_off = read_sweep(Path(DEMO)).cells[5]  # killed before it wrote launch.json
    sweep_folder("demo", runs).stage(cut_off).new_attempt()
    assert plan_summary([cut_off], runs).states[cut_off.id] == "new"
    assert read_statuses(sweep_folder("demo", runs), [cut_off])[0].state == "STAGED"


def test_json_holds_every_cell(runs, capsys):
    assert main(["plan", "-f", DEMO, "--runs", str(runs), "--json", "--where", "method=hybrid_opt"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["sweep"], output["total_ranks"], output["largest_world"]) == ("demo", 12, 4)
    assert [(cell["world_size"], cell["local_batch_size"]) for cell in output["cells"]] == [
        (2, 128), (2, 128), (4, 64), (4, 64),
    ]  # fmt: skip
    assert {cell["state"] for cell in output["cells"]} == {"new"}


def test_cells_with_equal_method_ranks_and_seed_show_how_they_differ(tmp_path, capsys):
    file = tmp_path / "grid.yaml"
    file.write_text(Path(DEMO).read_text().replace(
        "grid: {world_size: [1, 2, 4]}", "grid: {world_size: [1, 2, 4], kfac.damping: [0.01, 0.1]}"
    ))  # fmt: skip
    words = ["plan", "-f", str(file), "--runs", str(tmp_path)]
    assert main([*words, "--where", "method=mem_opt and seed=0", "--all"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("new ")]
    assert [line.split()[2:] for line in lines] == [["damping=0.01"], ["damping=0.1"]] * 3
    assert main([*words, "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    names = {(cell["method"], cell["world_size"], cell["seed"], cell["differs"]) for cell in cells}
    assert len(names) == len(cells)


def test_the_table_is_plain_text_and_names_the_placements(runs, capsys):
    before = sorted(runs.rglob("*"))
    assert main(["plan", "-f", DEMO, "--runs", str(runs), "--all"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "36 cells: 2 done, 1 failed, 1 pending, 32 new" in output
    assert "gradient workers per layer: 1 of 2, 2 of 4" in output
    assert all(cell.id in output for cell in read_sweep(Path(DEMO)).cells)
    assert sorted(runs.rglob("*")) == before


def test_plan_shows_what_a_site_could_not_run(tmp_path, capsys):
    profile = tmp_path / "small.yaml"
    profile.write_text("cpus: 2\n")
    assert main(["plan", "-f", DEMO, "--site", str(profile), "--runs", str(tmp_path)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "site small: 10 of 36 cells cannot run, the first: " in output
    assert "needs 4 CPUs, 1 for each of 4 ranks; site small has 2: use fewer ranks" in output
    profile.write_text("cpus: 2\noversubscribe: true\n")
    assert main(["plan", "-f", DEMO, "--site", str(profile), "--runs", str(tmp_path)]) == 0
    assert (
        "site small: 10 cells have more ranks than CPUs: their epochs count, their seconds do not"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("cpuinfo", "said"),
    [
        ("model name\t: x\nflags\t\t: fpu avx2 avx512f\n", True),
        ("Features\t: fp asimd bf16\n", False),
        ("processor\t: 0\n", False),  # not known
    ],
)
def test_plan_says_that_the_cpus_of_this_host_emulate_bfloat16(cpuinfo, said, tmp_path, capsys, monkeypatch):
    read = Path.read_text

    def faked(path, *words, **options):
        return cpuinfo if str(path) == "/proc/cpuinfo" else read(path, *words, **options)

    monkeypatch.setattr(Path, "read_text", faked)
    words = ["plan", "-f", DEMO, "--runs", str(tmp_path), "--set", "training.precision=bfloat16"]
    assert main(words) == 0
    found = "36 cells with training.precision=bfloat16: this host's CPUs emulate bfloat16" in " ".join(
        capsys.readouterr().out.split()
    )
    assert found == said


def test_a_cluster_is_not_limited_by_the_cpus_of_the_login_node(tmp_path, capsys):
    sweep, profile = tmp_path / "wide.yaml", tmp_path / "far.yaml"
    sweep.write_text(
        "sweep: wide\nworkload: digits\ntarget: {metric: accuracy, at_least: 0.9}\noptimizer: {lr: 0.1}\n"
        "training: {local_batch_size: 4, epochs: 1}\nmethods: [{name: sgd}]\ngrid: {world_size: [34, 64]}\n"
    )
    profile.write_text("launcher: slurm\nslurm: {ranks_per_node: 32}\n")
    assert main(["plan", "-f", str(sweep), "--site", str(profile), "--runs", str(tmp_path)]) == 0
    assert "site far: every cell fits" in capsys.readouterr().out
    sweep.write_text(sweep.read_text().replace("[34, 64]", "[37, 64]"))
    assert main(["plan", "-f", str(sweep), "--site", str(profile), "--runs", str(tmp_path)]) == 0
    assert "37 ranks do not spread evenly over nodes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cpu: 2",
            "s.yaml:1: cpu is not a key of a site; allowed: name, launcher, cpus, gpus, cpus_per_rank, ",
        ),
        ("\ncpus: 0", "s.yaml:2: cpus must be >= 1, got 0"),
        ("launcher: locl", "s.yaml:1: launcher='locl' is not one of "),
        ("environment: {A: 1}", "s.yaml:1: environment.A must be text in quotes, got 1"),
        ("name: other", "s.yaml:1: name='other' is not the file's name, s"),
    ],
)
def test_a_mistaken_site_is_one_line(text, message, tmp_path, monkeypatch, capsys):
    sweep = Path(DEMO).resolve()
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(text)
    assert main(["plan", "-f", str(sweep), "--site", "s.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_an_unknown_site_lists_the_known_ones(capsys):
    assert main(["plan", "-f", DEMO, "--site", "locl"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: jobs/sites/locl.yaml: no such site profile; jobs/sites has ")
    assert error.endswith("did you mean local?\n")
    assert main(["plan", DEMO]) == 2
    assert capsys.readouterr().err.rstrip().endswith("a sweep file is given as -f FILE")


def test_the_description_of_a_placement_counts_its_gradient_workers():
    assert placement_in_words(None, [1]) == "no K-FAC"
    assert placement_in_words(KFACConfig.sc20(strategy="mem_opt"), [1, 64]).endswith(
        "per layer: 1 of 1, 1 of 64"
    )
    assert placement_in_words(KFACConfig.sc20(strategy="comm_opt"), [64]).endswith("per layer: 64 of 64")
    growing = KFACConfig.sc20(inverse_update_steps=Milestones(initial=20, factor=2, at=(3, 6)))
    assert placement_in_words(growing, [2]).endswith("; inverse_update_steps=20 x 2 at epochs 3, 6")
