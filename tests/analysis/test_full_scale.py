"""Promise: a paper's page is drawn at the paper's own scale, from what its hundreds of ranks would record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.prediction.fitted import WAITING
from analysis.prediction.machine import RTX_2080_TI
from analysis.prediction.networks import network_named
from harness.cell import Cell
from harness.cli.reproduce import reproduce
from harness.runs.attempt_outcome import Outcome
from harness.runs.layers_file import describe
from harness.runs.record_lines import RecordWriter
from harness.runs.records import EvalRecord, PhaseRecord
from harness.runs.store import SweepFolder
from harness.study.papers import read_paper
from harness.study.sweep import read_sweep
from kfac_core.config import KFACConfig
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.placement.strategies import place

MODELS = ("resnet50", "resnet101", "resnet152")
SEEDS, WINDOWS, STEPS = 1, 2, 10
SHAPES = [LayerShape(f"layer{n}", FactorShape(64 + n), FactorShape(32)) for n in range(8)]


def phase_seconds(cell: Cell) -> dict[str, float]:
    """A step by phase, as it is predicted; other networks cost as much as ResNet-50 here."""
    named = str(cell.workload.options.get("model", ""))
    network = network_named(named if named in MODELS else MODELS[0])
    config = KFACConfig() if cell.kfac is None else cell.kfac
    batch = cell.training.batch_sizes(cell.world_size)[1]
    model = RTX_2080_TI.model(network, replace(config, solver="inverse"), batch)
    step = model.predict("sgd" if cell.kfac is None else config.strategy, cell.world_size)
    return {phase: seconds for phase, seconds in step.phases.items() if phase != WAITING}


def write_run(folder: SweepFolder, cell: Cell) -> None:
    """A few windows of every rank and an evaluation after each; the last rank is the slowest."""
    attempt = folder.stage(cell).new_attempt()
    attempt.write("launch.json", {"launcher": "slurm", "allocation": f"block{cell.seed}"})
    attempt.write("environment.json", {"host": "nowhere"})
    if cell.kfac is not None:
        attempt.write("layers.json", describe(SHAPES, place(cell.kfac, SHAPES, cell.world_size)))
    window = {name: STEPS * seconds for name, seconds in phase_seconds(cell).items()}
    for rank in range(cell.world_size):
        late = 1 + 0.02 * cell.seed + 0.05 * rank / cell.world_size
        seconds = {name: value * late for name, value in window.items()}
        with RecordWriter(attempt.records(rank)) as writer:
            for first in range(0, WINDOWS * STEPS, STEPS):
                writer.write(
                    PhaseRecord(
                        rank, first, STEPS, STEPS * cell.training.batch_sizes(cell.world_size)[1],
                        sum(seconds.values()), seconds, dict.fromkeys(seconds, STEPS), {},
                        {"rss_peak": 10**9 + rank, "kfac_factors": 10**8, "kfac_second_order": 10**8},
                    )
                )  # fmt: skip
                if rank == 0:
                    writer.write(_evaluation(cell, first + STEPS, sum(seconds.values())))
            writer.write_checksum(rank)
    clock = WINDOWS * sum(window.values()) * (1 + 0.02 * cell.seed)  # rank 0's, as in the evaluations
    attempt.write_outcome(
        Outcome("COMPLETED", "", reached_target=True, stop_reason="epochs", started_at=0.0, ended_at=clock,
                train_seconds=clock, value=_value(cell, WINDOWS * STEPS))
    )  # fmt: skip


def _evaluation(cell: Cell, step: int, window_seconds: float) -> EvalRecord:
    seconds, epoch = step / STEPS * window_seconds, cell.training.epochs * step / (WINDOWS * STEPS)
    batch = cell.training.batch_sizes(cell.world_size)[0]
    return EvalRecord(
        0, step, epoch, step * batch, seconds, 0.0, seconds, cell.target.metric, _value(cell, step),
        cell.target.direction, 1.0, 0.1,
    )  # fmt: skip


def _value(cell: Cell, step: int) -> float:
    """Approaches the target, and reaches it in the last evaluation."""
    missing = 0.1 * (WINDOWS - step / STEPS) + 0.001 * cell.seed * (step < WINDOWS * STEPS)
    return cell.target.value * (1 - missing if cell.target.direction == "higher" else 1 + missing)


@pytest.mark.slow
@pytest.mark.parametrize("paper", ["dp_kfac", "nlcg", "tpds22", "sc20"])
def test_a_papers_page_is_drawn_at_full_scale(paper, tmp_path, capsys, no_images):
    runs = tmp_path / "runs"
    described, sweeps = read_paper(paper, "full")
    for file in sweeps.values():
        sweep = read_sweep(file)
        for cell in sweep.cells:
            if cell.seed < SEEDS:
                write_run(SweepFolder(runs / sweep.name), cell)
    reproduce(paper, "full", runs=runs, out=None, report_only=True)
    out = tmp_path / "papers" / f"{paper}-full"
    assert capsys.readouterr().out == f"report: {out / 'report.html'}\n"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Not drawn" not in page
    drawn = {path.name for path in (out / "figures").glob("*.csv")}
    assert drawn == {f"{n:02}-{figure.figure}.csv" for n, figure in enumerate(described.figures, start=1)}
