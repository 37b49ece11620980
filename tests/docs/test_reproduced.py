"""Promise: the committed pages of the papers' reproductions are what the committed runs give."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from harness.cli import main

FOLDERS = sorted(path.parent for path in Path("results/figures").glob("*/report.md"))


def bytes_of_runs(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("runs/*"))


def test_every_committed_page_has_its_runs_and_every_figure_its_numbers():
    assert {"sc20-small", "tpds22-small", "dp_kfac-small", "nlcg-small"} <= {path.name for path in FOLDERS}
    for folder in FOLDERS:
        assert bytes_of_runs(folder) > 0, folder
        images = {path.stem for path in folder.glob("figures/*.png")}
        assert images == {path.stem for path in folder.glob("figures/*.csv")} != set(), folder
        text = (folder / "report.md").read_text(encoding="utf-8")
        assert all(f"figures/{name}.png" in text and f"figures/{name}.csv" in text for name in images), folder


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(FOLDERS, key=bytes_of_runs)[:2], ids=lambda folder: folder.name)
def test_a_committed_page_is_drawn_again_from_its_archives(folder, tmp_path, no_images):
    paper, _, size = folder.name.rpartition("-")
    words = ["--size", size, "--report-only", "--runs", str(folder / "runs"), "--out", str(tmp_path)]
    assert main(["reproduce", paper, *words]) == 0
    assert (tmp_path / "report.md").read_text() == (folder / "report.md").read_text()
    drawn = {path.name for path in (tmp_path / "figures").glob("*.csv")}
    assert drawn == {path.name for path in (folder / "figures").glob("*.csv")}
    for name in drawn:
        ours, theirs = (pd.read_csv(path / "figures" / name) for path in (tmp_path, folder))
        pd.testing.assert_frame_equal(ours, theirs, rtol=1e-9)
