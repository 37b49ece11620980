"""Promise: every shipped sweep, with all its methods and schedules, reaches its figures and its exports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from analysis import load
from analysis.figures import FIGURES, NothingToDraw
from analysis.figures.drawing import save
from analysis.regressions import changes
from analysis.report.alt_texts import alt_text
from analysis.report.findings import findings
from analysis.report.page import write_report
from analysis.rules import SCORINGS
from harness.cell import Cell
from harness.errors import UserError
from harness.exports import EXPORTS
from harness.runs.store import SweepFolder
from harness.study.papers import read_paper
from harness.study.sweep import read_sweep
from tests.path.small_sweeps import FILES, Trained, key, schedules, small, train, write_attempt

PAGES = {"demo", "multi30k"}
"""Sweeps of which the whole page is written, with metrics of both directions; it draws as the figures do."""

NEED_MORE = {"solver_by_batch", "eigen_imbalance"}
"""Figures over several batches or worlds, of which the small cells of a sweep may have one."""


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory) -> Callable[[Cell], Trained]:
    """What a cell records; cells that compute the same are trained once."""
    folder, known = str(tmp_path_factory.mktemp("ranks")), {}

    def run(cell: Cell) -> Trained:
        if key(cell) not in known:
            known[key(cell)] = Trained(world(cell.world_size).run(train, cell, folder))
        return known[key(cell)]

    return run


@cache
def drawn(file: Path) -> list[str]:
    """The figures of the paper's page that this sweep is for; time and costs of a sweep without a page."""
    if file.parent.name == "sweeps":
        return ["time_to_accuracy", "scaling", "phase_breakdown", "memory"]
    paper, _ = read_paper(file.parent.parent.name, file.parent.name)
    return [figure.figure for figure in paper.figures if figure.sweep == file.stem]


def _without_size(file: Path) -> str:
    """The sweep's name: the sizes of a paper's sweep share it, and train much the same cells."""
    return f"papers-{file.parts[2]}-{file.stem}" if file.parts[1] == "papers" else f"sweeps-{file.stem}"


@pytest.mark.parametrize("sweep", sorted({_without_size(file) for file in FILES}))
def test_a_shipped_sweep_reaches_its_report(sweep, trained, no_images, tmp_path):
    files, shown = [file for file in FILES if _without_size(file) == sweep], set()
    for file in files:
        _reaches_its_report(file, trained, shown, tmp_path / file.parent.name)
    assert {name for file in files for name in drawn(file)} - shown <= NEED_MORE


def _reaches_its_report(file: Path, trained: Callable[[Cell], Trained], shown: set[str], out: Path) -> None:
    cells = small(read_sweep(file).cells)
    folder = SweepFolder(out / "runs" / cells[0].sweep)
    for cell in cells:
        write_attempt(folder, cell, trained(cell))
    study = load(folder.path, cache=False)
    assert set(study.cells["cell"]) == {cell.id for cell in cells}
    scheduled = {cell.id for cell in cells if cell.kfac is not None and schedules(cell.kfac)}
    assert set(study.cells["cell"][study.cells["schedules"] != ""]) == scheduled
    for name in set(drawn(file)) - shown:  # what another size of the sweep has not drawn
        with suppress(NothingToDraw):
            drawing = FIGURES[name].draw(study)
            shown.add(name)
            save(drawing, out / "figures", name)  # this and the text are what a page does with it
            assert alt_text(FIGURES[name].title, drawing)
    if file.stem in PAGES:
        page = write_report(study, out / "report").read_text(encoding="utf-8")
        assert all(cell.id in page for cell in cells)
    for scoring in SCORINGS.values():
        assert findings(replace(study, scoring=scoring)) is not None
    assert {one.verdict for one in changes(study, study, least=0.05)} <= {"same", "undecided"}
    # Seeds of a cell differ in their clocks only.
    exported = [one for one in folder.cell_folders() if one.cell().seed == cells[0].seed]
    attempts = [attempt for one in exported if (attempt := one.latest()) is not None]
    assert len(attempts) == len(exported)
    for name, export in EXPORTS.items():
        try:
            assert export(attempts)
        except UserError:
            assert name == "layers"  # no layer of K-FAC was traced
            assert not study.cells["strategy"].notna().any()
