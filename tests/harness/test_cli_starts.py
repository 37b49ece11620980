"""Promise: on a login node the command line starts without torch, and writes no colours into a pipe."""

import os
import subprocess
import sys

import pytest

BLOCKED = ("torch", "transformers", "tokenizers", "pandas", "matplotlib", "mpi4py", "submitit", "pynvml")
RUNNER = (
    f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r}))\n"
    "from harness.cli import main\nsys.exit(main())"
)


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUNNER, *arguments],
        env={**os.environ, **environment}, text=True, capture_output=True, check=False, timeout=60,
    )  # fmt: skip


def test_help_starts_without_the_heavy_libraries():
    """Of every command, one after another in one process: what is blocked stays blocked."""
    all_of_them = (
        "from harness.cli import COMMANDS\n"
        "sys.exit(main(['--help']) or [name for name in COMMANDS if main([name, '--help'])] or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", RUNNER.replace("sys.exit(main())", all_of_them)],
        text=True, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    helps = done.stdout.split("Usage: kronscale")[1:]
    assert len(helps) == 18
    assert max(text.count("\n") for text in helps) <= 40  # each on one screen
    light = ("pydantic", "yaml", "kfac_core.placement")
    runner = (
        "import sys; from harness.cli import main; code = main(['--help'])\n"
        f"sys.exit(code or [name for name in {light} if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", runner], text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")  # the list of commands loads even less


@pytest.mark.slow  # new interpreters
@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "-f", "jobs/sweeps/demo.yaml", "--site", "local", "--where", "world_size>=2"],
        ["status", "-f", "jobs/sweeps/demo.yaml"],
        ["predict", "--model", "resnet152", "--world-size", "4096", "--memory-gib", "16"],
    ],
)
def test_plan_status_and_predict_start_without_the_heavy_libraries(arguments):
    done = start(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    if arguments[0] == "predict":
        assert "At 4096 ranks the fastest step with K-FAC is that of d_kfac with F = " in done.stdout
        assert "it pays if it needs less than 0." in done.stdout
        assert "rates: 64 RTX 2080 Ti" in done.stdout


def test_no_color_is_respected_where_colour_is_forced():
    done = start("plan", "-f", "jobs/sweeps/demo.yaml", FORCE_COLOR="1", NO_COLOR="1")
    assert done.returncode == 0
    assert not any(f"\x1b[{code}m" in done.stdout for code in range(30, 48))


def test_a_closed_pipe_gives_no_traceback():
    command = f'{sys.executable} -c "$RUNNER" plan -f jobs/sweeps/demo.yaml --all | head -n 1'
    environment = {**os.environ, "RUNNER": RUNNER}
    done = subprocess.run(["sh", "-c", command], env=environment, text=True, capture_output=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("demo: ")


@pytest.mark.ranks
def test_commands_that_run_studies_import_no_more_of_analysis_than_a_formula(tmp_path):
    sweep = tmp_path / "one.yaml"
    sweep.write_text(
        "sweep: one\nworkload: digits\ntarget: {metric: accuracy, at_least: 0.5}\noptimizer: {lr: 0.1}\n"
        "training: {global_batch_size: 256, epochs: 1}\nmethods: [{name: sgd}]\nworld_size: 1\nrepeats: 1\n"
    )
    loop = RUNNER.replace(
        "sys.exit(main())",
        "codes = [main([*command, '--runs', sys.argv[1]]) for command in (\n"
        "    ['plan', '-f', sys.argv[2], '--site', 'local'], ['submit', '-f', sys.argv[2], '--dry-run'],\n"
        "    ['run', '-f', sys.argv[2]], ['status', 'one'], ['status', 'one', '--json'],\n"
        "    ['logs', 'sgd-p1'], ['submit', '-f', sys.argv[2]], ['cancel', 'one'], ['retry', 'one'])]\n"
        "sys.exit(any(codes) or str([name for name in sys.modules if name.split('.')[0] == 'analysis'\n"
        "    and name not in ('analysis', 'analysis.statistics', 'analysis.statistics.power',\n"
        "                     'analysis.statistics.ranks')]))",
    )
    done = subprocess.run(
        [sys.executable, "-c", loop, str(tmp_path / "runs"), str(sweep)],
        env={**os.environ, "KRONSCALE_LOCKS": str(tmp_path / "locks")},
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert "[]" in done.stderr, done.stdout + done.stderr
    assert "1 cell completed already" in done.stdout


@pytest.mark.ranks  # its text names the launchers
@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        ("plan", ("harness.launchers.slurm.launcher", "submitit")),  # the local one estimates the cost
        ("status", ("harness.launchers.local", "harness.launchers.slurm.launcher")),
    ],
)
def test_plan_and_status_import_no_launcher_that_they_do_not_use(command, heavy):
    runner = (
        "import sys; from harness.cli import main; code = main(sys.argv[1:])\n"
        f"sys.exit(code or str([name for name in {heavy} if name in sys.modules]))"
    )
    arguments = [sys.executable, "-c", runner, command, "-f", "jobs/sweeps/demo.yaml"]
    done = subprocess.run(arguments, text=True, capture_output=True, check=False)
    assert done.stderr == "[]\n"
