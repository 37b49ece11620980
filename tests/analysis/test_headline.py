"""Promise: the page of the studies follows from their archives, and begins with the answer."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from harness.runs.archive import write_archive
from harness.runs.store import sweep_folder
from tests.analysis.conftest import Plan, make_cell
from tests.analysis.hand_made import Run, write

pytestmark = pytest.mark.slow  # reads archives and writes a page in every test

FOLDER = Path(__file__).parents[2] / "results" / "headline"
SECONDS = {"sgd": 1.0, "nlcg": 2.0, "comm_opt": 1.1, "dp_kfac": 1.2}
EPOCHS = {"sgd": 6, "nlcg": 6, "comm_opt": 3, "dp_kfac": 4}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_headline", FOLDER / "draw.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def drawn(script, tmp_path, monkeypatch, no_images) -> Callable[..., list[str]]:
    """Archives six blocks of these epochs, and draws them; the page's paragraphs, without its title."""
    monkeypatch.setattr(script, "HERE", tmp_path)
    monkeypatch.setattr(script, "KFAC", "comm_opt")
    monkeypatch.setattr(script, "STUDIES", {"made": script.Setting("Digits", "small", (0.95,))})

    def draw(epochs: dict[str, int], missing: str = "") -> list[str]:
        archive(tmp_path / "made", "made-tuning", block(100), trial=1)
        runs = [run for seed in range(6) for run in block(seed, epochs)]
        archive(tmp_path / "made", "made", [replace(run, misses=run.method == missing) for run in runs])
        script.main(tmp_path / "out")
        return (tmp_path / "out" / "README.md").read_text().split("\n\n")[1:]

    return draw


def block(seed: int, epochs: dict[str, int] = EPOCHS) -> list[Run]:
    seconds = {method: SECONDS[method] * (1 + 0.01 * seed) for method in epochs}
    return [Run(method, 2, seed, count, seconds[method]) for method, count in epochs.items()]


def archive(folder: Path, sweep: str, runs: list[Run], trial: int | None = None) -> None:
    stored = sweep_folder(sweep, folder / "runs")
    cells = []
    for run in runs:
        cell = make_cell(run.method, run.world_size, run.seed, Plan(), run.patch)
        cell = cell.model_validate({**cell.model_dump(), "sweep": sweep, "trial": trial})
        cells.append(stored.stage(cell))
        write(cells[-1].new_attempt(), cell, run)
    write_archive(stored, cells, folder / f"{sweep}.tar.xz")


def test_a_faster_kfac_is_said_with_what_it_saves_and_over_whom(drawn, tmp_path):
    said = drawn(EPOCHS)  # 6 epochs of 1 s against 3 of 1.1 s; 4 of 1.2 s, which differ by up to 5 %
    assert said[0] == "- **Digits: small.** To 0.95: K-FAC takes less time than `dp_kfac`, `nlcg` and `sgd`."
    rows = {row.split(" | ")[2]: row[2:-2].split(" | ")[-2:] for row in said[4].splitlines()}
    assert rows["sgd"] == ["45% (43% to 47%), p 0.0065", "45% to 47%"]
    assert rows["dp_kfac"][0].startswith("31% (29% to 33%)")
    assert rows["comm_opt"] == ["", ""]
    ratios = pd.read_csv(tmp_path / "out" / "ratios.csv").set_index(["rule", "method"])["ratio"]
    assert ratios["first", "sgd"] == pytest.approx(6 / 3.3)
    assert ratios["algoperf-style", "nlcg"] == pytest.approx(12 / 3.3)
    times = pd.read_csv(tmp_path / "out" / "times.csv").set_index("method")
    assert list(times["reached"]) == [6] * 4
    assert times.loc["comm_opt", "epochs"] == 3
    assert len(pd.read_csv(tmp_path / "out" / "trials.csv")) == 4


def test_a_slower_kfac_is_said_too(drawn):
    said = drawn(EPOCHS | {"comm_opt": 8})
    assert "K-FAC takes more time than `dp_kfac` and `sgd`" in said[0]
    assert "| -47% (-51% to -42%), p " in said[4]


def test_a_method_that_misses_in_most_runs_has_no_number(drawn, tmp_path):
    said = drawn(EPOCHS, missing="sgd")
    assert "less time than `dp_kfac` and `nlcg`; K-FAC reaches it in 6 of 6 runs, `sgd` in 0." in said[0]
    assert "| sgd |" not in said[4]
    times = pd.read_csv(tmp_path / "out" / "times.csv").set_index("method")
    assert list(times.loc["sgd", ["runs", "reached", "seconds"]]) == [6, 0, math.inf]


def test_the_committed_page_is_what_the_archives_give(script, tmp_path):
    script.main(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        if path.suffix != ".pdf":
            assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name
