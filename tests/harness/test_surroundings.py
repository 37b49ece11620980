"""Promise: terminals, closed streams and a user's matplotlib settings change no result and no exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest

from analysis.figures import FIGURES
from analysis.records.loading import load

ROOT = Path(__file__).parents[2]
PLAN = ["plan", "-f", str(ROOT / "jobs/sweeps/demo.yaml"), "--where", "method=nobody-é×"]
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PREDICT = ["predict", "--model", "resnet50", "--world-size", "4"]
COMMAND = "import sys; from harness.cli import main; sys.exit(main(sys.argv[1:]))"
SETTINGS = {
    "usetex": {"text.usetex": True, "font.size": 22, "axes.facecolor": "black", "axes.grid": True},
    "shapes": {
        "figure.figsize": (2, 2),
        "savefig.bbox": "tight",
        "lines.linewidth": 9,
        "font.family": "serif",
    },
    "files": {"savefig.format": "pdf", "savefig.dpi": 30, "savefig.transparent": True, "xtick.labelsize": 3},
}


def ran(arguments: list[str], redirect: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, env=os.environ | environment, cwd=ROOT, check=False)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "coding", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_terminal_that_is_not_utf_8_gets_other_letters_and_the_same_exit_code(coding):
    want, got = ran(PLAN), ran(PLAN, **coding)
    assert (got.returncode, b"Traceback" in got.stderr) == (want.returncode, False)
    assert b"nobody-" in got.stderr


@pytest.mark.ranks
@pytest.mark.parametrize("redirect", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("arguments", [PLAN[:3], PREDICT, ["--help"]])
def test_closed_streams_change_no_exit_code(arguments, redirect):
    got = ran(arguments, redirect)
    assert (got.returncode, b"Traceback" in got.stderr) == (0, False)


@pytest.mark.ranks
def test_a_notebook_s_backend_has_no_effect(tmp_path):
    runs = str(ROOT / "results/figures/nlcg-embedded/runs")
    got = ran(
        ["reproduce", "nlcg", "--size", "embedded", "--report-only", "--runs", runs, "--out", str(tmp_path)],
        MPLBACKEND="module://nobody.has_this",
    )
    assert got.returncode == 0, got.stderr
    (image,) = tmp_path.glob("figures/01-*.png")
    assert image.read_bytes() == (ROOT / "results/figures/nlcg-embedded/figures" / image.name).read_bytes()


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_figure_is_the_same_under_any_matplotlibrc(settings):
    study = load(ROOT / "results/figures/nlcg-embedded/runs/nlcg-embedded-batch.tar.xz")
    plain = FIGURES["loss_curves"].draw(study).image("png")
    with mpl.rc_context(SETTINGS[settings]):
        assert FIGURES["loss_curves"].draw(study).image("png") == plain
