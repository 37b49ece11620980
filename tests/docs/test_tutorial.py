"""Promise: the tutorial works from top to bottom, on real ranks: its commands in order, then its Python.

Only the size differs: one seed, three epochs, of the photographs an eighth and on one rank, and one figure a
report. What the commands and programs import is loaded once: they run in this process, in a folder of their
own. That the installed command and every figure work are promises of other tests.
"""

from __future__ import annotations

import csv
import runpy
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from harness.cli import main
from tests.docs.blocks import ROOT, blocks_of

TAKE_SET = {"plan", "run"}
ONE_RANK = ["world_size=1", "kfac.grad_worker_fraction=1.0"]
"""The first study has two; a half of the ranks cannot be a gradient worker where there is one."""


def smaller(arguments: list[str]) -> list[str]:
    """Options that make a command's work small."""
    if arguments[0] == "report":
        return ["--figure", "learning_curves"]
    if arguments[0] not in TAKE_SET:
        return []
    fields = ["repeats=1", "training.epochs=3"]
    if "jobs/sweeps/images.yaml" in arguments:
        fields += ["workload.options.train_examples=256", "workload.options.test_examples=50", *ONE_RANK]
    return [word for field in fields for word in ("--set", field)]


def kronscale(words: list[str]) -> None:
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = main(words)
    assert code == 0, (words, printed.getvalue())


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(1800)  # six cells and two reports, one after another
def test_a_reader_of_the_tutorial_gets_two_studies_and_their_figures(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs", ignore=shutil.ignore_patterns("experiments"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KRONSCALE_CACHE", str(tmp_path / "cache"))
    ran = []
    for block in blocks_of("docs/tutorial.md"):
        if block.language == "yaml":
            name = block.text.split("\n")[0].removeprefix("sweep: ")
            (tmp_path / "jobs" / "sweeps" / f"{name}.yaml").write_text(block.text)
        for arguments in block.commands:
            kronscale([*arguments, *smaller(arguments)])
            ran.append(arguments[0])
        if block.language == "python":
            program = tmp_path / f"line_{block.line}.py"
            program.write_text(block.text)
            with mpl.rc_context({"backend": "agg"}):  # the block may change settings of this process
                runpy.run_path(str(program))
                plt.close("all")
    assert ran == ["plan", "run", "run", "status", "logs", "report", "run", "report"]
    assert (tmp_path / "results/runs/schedule/report/report.html").is_file()
    assert (tmp_path / "learning_curves.pdf").stat().st_size > 5000
    assert (tmp_path / "epochs.pdf").is_file()
    with (tmp_path / "learning_curves.csv").open() as file:
        arms = {row["arm"] for row in csv.DictReader(file)}
    assert {"sgd", "constant", "decaying"} <= {arm.split()[0] for arm in arms}
