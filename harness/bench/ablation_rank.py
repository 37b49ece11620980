"""One rank of `kronscale bench ablation`: `python -m harness.bench.ablation_rank OPTIONS.json --rank R`."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, islice

import torch

from harness.bench.ablation import PHASES, AblationBench, Rounds
from harness.bench.phase_work import PhaseWork
from harness.bench.rank import Rank
from harness.cell import Cell
from harness.runs.heartbeat import HeartbeatWriter
from harness.training.train import Trainer
from harness.training.world import World
from harness.training.world.single_copy import find_readable_peers
from kfac_core.collectives import connect
from kfac_core.timing.phases import COMM_PHASES, Phase
from kfac_core.timing.timer import WindowTotals

WARMUP_BLOCKS = 3
BATCHES = 4  # of the first epoch, in turn: enough to differ, and drawn before any clock runs


class RepeatedBlock:
    """Trains one inverse period repeatedly at learning rate zero, so that every block does the same work."""

    def __init__(self, trainer: Trainer) -> None:
        kfac, cell = trainer.state.kfac, trainer.cell
        if kfac is None:
            raise ValueError(f"cell {cell.id} must have K-FAC for an ablation of its phases")
        if kfac.config.overlap_factors:
            raise ValueError(f"cell {cell.id}: overlap_factors must be off, no phase can be left out alone")
        self.steps = cell.window_steps
        self.world_size = trainer.world.world_size
        self._trainer, self._kfac = trainer, kfac
        self._work = PhaseWork(trainer, kfac, self._full_step)
        self._batches = cycle(islice(trainer.workload.batches(0), BATCHES))
        for group in trainer.state.optimizer.param_groups:
            group["lr"] = 0.0
        trainer.state.model.train()

    def run(self, phase: Phase | None = None, times: int = 1, *, timed: bool = True) -> WindowTotals:
        """Train one block.

        Args:
            phase: the phase whose work `times` applies to; None for none.
            times: how often its work is done: 0, 1 or 2.
            timed: whether the phase timer runs; else only `wall_seconds` is measured.
        """
        timer, world = self._trainer.timer, self._trainer.world
        self._full_step()  # every block finds memory and caches as a full step leaves them
        changed: AbstractContextManager[None] = nullcontext()
        if phase is not None and times != 1:
            changed = self._work.doubled(phase) if times else self._work.left_out(phase)
        with changed:
            self._kfac.steps = 0
            world.wait_for_all()
            began = time.perf_counter()
            if timed:
                timer.start()
            for _ in range(self.steps):
                self._trainer.train_step(next(self._batches))
            if timed:
                timer.stop()
            seconds = time.perf_counter() - began
        return timer.drain() if timed else WindowTotals(seconds)

    def _full_step(self) -> None:
        self._kfac.steps = 0
        self._trainer.train_step(next(self._batches))


def measure(block: RepeatedBlock, rounds: int) -> dict[str, Rounds]:
    """Rounds of each phase in turn; the order within every second round is reversed."""
    phases = [phase for phase in PHASES if block.world_size > 1 or phase not in COMM_PHASES]
    for _ in range(WARMUP_BLOCKS):
        block.run()
    for phase in phases:
        for times in _other_times(phase):
            block.run(phase, times)
    table: dict[str, Rounds] = {phase.value: [] for phase in phases}
    for number in range(rounds):
        for phase in phases:
            table[phase.value].append(_round(block, phase, backwards=bool(number % 2)))
    return table


def _round(block: RepeatedBlock, phase: Phase, *, backwards: bool) -> dict[str, float]:
    """Blocks with the phase once, not at all and twice; with the timer once and not at all."""
    kinds = [(1, False), *((times, False) for times in _other_times(phase)), (1, True), (0, True)]
    totals = {
        (times, timed): block.run(phase, times, timed=timed)
        for times, timed in (reversed(kinds) if backwards else kinds)
    }
    whole, part = totals[1, True], totals[0, True]
    booked = whole.seconds.get(phase.value, 0.0) - part.seconds.get(phase.value, 0.0)
    figures = {
        "with_seconds": totals[1, False].wall_seconds,
        "without_seconds": totals[0, False].wall_seconds,
        "timed_with_seconds": whole.wall_seconds,
        "timed_without_seconds": part.wall_seconds,
        "timer_seconds": booked,
        "calls": whole.calls.get(phase.value, 0),
    }
    if (2, False) in totals:
        figures["twice_seconds"] = totals[2, False].wall_seconds
    return {name: value / block.steps for name, value in figures.items()}


def _other_times(phase: Phase) -> tuple[int, ...]:
    """How often a phase's work is done besides once; no communication twice, as ranks wait only once."""
    return (0,) if phase in COMM_PHASES else (0, 2)


def main() -> None:
    """Measure, and write the figures beside the options."""
    rank = Rank.join(__doc__)
    bench = AblationBench(**rank.options)
    communicator = connect(find_peers=find_readable_peers)
    world = World(rank.number, bench.ranks, torch.device("cpu"), "gloo", communicator)
    cell = Cell.model_validate_json(bench.cell)
    flat = cell.training.model_copy(update={"gradient_averaging": "flat"})  # a phase that can be left out
    cell = cell.model_copy(update={"training": flat})
    heartbeat = HeartbeatWriter(rank.folder / f"rank-{rank.number}.heartbeat")
    block = RepeatedBlock(Trainer(cell, world, heartbeat, lambda record: None))
    rank.finish(measure(block, bench.rounds))


if __name__ == "__main__":
    main()
