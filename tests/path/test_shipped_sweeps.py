"""Promise: every shipped sweep, with all its methods and schedules, reaches its report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import load
from analysis.figures import FIGURES, NothingToDraw
from analysis.regressions import changes
from analysis.report.findings import findings
from analysis.report.page import Panel, write_report
from analysis.rules import SCORINGS
from harness.cell import Cell
from harness.errors import UserError
from harness.exports import EXPORTS
from harness.runs.store import SweepFolder
from harness.study.papers import read_paper
from harness.study.sweep import read_sweep
from tests.path.small_sweeps import FILES, Trained, key, schedules, small, train, write_attempt


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory) -> Callable[[Cell], Trained]:
    """What a cell records; cells that compute the same are trained once."""
    folder, known = str(tmp_path_factory.mktemp("ranks")), {}

    def run(cell: Cell) -> Trained:
        if key(cell) not in known:
            known[key(cell)] = Trained(world(cell.world_size).run(train, cell, folder))
        return known[key(cell)]

    return run


REPORTED = {(file.parts[1:3], file.name): file for file in FILES}.values()
"""One size of each paper's sweeps, and all others: sizes differ in what is trained, not in the page."""


def drawn(file: Path) -> list[str]:
    """The figures of the paper's page that this sweep is for; time and costs of a sweep without a page."""
    if file.parent.name == "sweeps":
        return ["time_to_accuracy", "scaling", "phase_breakdown", "memory"]
    paper, _ = read_paper(file.parent.parent.name, file.parent.name)
    return [figure.figure for figure in paper.figures if figure.sweep == file.stem]


@pytest.mark.parametrize("file", FILES, ids=lambda file: "-".join(file.with_suffix("").parts[1:]))
def test_a_shipped_sweep_reaches_its_report(file, trained, no_images, tmp_path):
    cells = small(read_sweep(file).cells)
    folder = SweepFolder(tmp_path / "runs" / cells[0].sweep)
    for cell in cells:
        write_attempt(folder, cell, trained(cell))
    study = load(folder.path)
    assert set(study.cells["cell"]) == {cell.id for cell in cells}
    scheduled = {cell.id for cell in cells if cell.kfac is not None and schedules(cell.kfac)}
    if file in REPORTED:
        write_report(study, tmp_path / "report", None if scheduled else [Panel(name) for name in drawn(file)])
        page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
        assert all(cell.id in page for cell in cells)
    else:
        for name in drawn(file):
            with suppress(NothingToDraw):
                FIGURES[name].draw(study)
    if file.parent.name == "sweeps":  # with metrics of both directions; papers differ in size
        for scoring in SCORINGS.values():
            findings(replace(study, scoring=scoring))
        assert {one.verdict for one in changes(study, study, least=0.05)} <= {"same", "undecided"}
    attempts = [one.latest() for one in folder.cell_folders()]
    for name, export in EXPORTS.items():
        try:
            assert export(attempts)
        except UserError:
            assert name == "layers"  # no layer of K-FAC was traced
            assert not study.cells["strategy"].notna().any()
    assert set(study.cells["cell"][study.cells["schedules"] != ""]) == scheduled
