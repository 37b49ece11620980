"""One rank of `kronscale bench ablation`: `python -m harness.bench.ablation_rank OPTIONS.json --rank R`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.bench.ablation import ABLATED, Rounds
from harness.cell import Cell
from harness.runs.heartbeat import HeartbeatWriter
from harness.training.malloc import keep_freed_memory
from harness.training.train import Trainer
from harness.training.world import World
from kfac_core.collectives import connect
from kfac_core.timing.phases import COMM_PHASES, Phase
from kfac_core.timing.timer import WindowTotals

WARMUP_BLOCKS = 3
BATCHES = 4  # of the first epoch, in turn: enough to differ, and drawn before any clock runs


class Subject:
    """A trainer whose parameters stand still, so that every block does the same work.

    Args:
        trainer: of the cell; its learning rate is set to zero.
    """

    def __init__(self, trainer: Trainer) -> None:
        if trainer.state.kfac is None:
            raise ValueError(f"cell {trainer.cell.id} has no K-FAC to leave out")
        if trainer.state.kfac.config.overlap_factors:
            raise ValueError(
                f"cell {trainer.cell.id}: overlap_factors leaves no phase that could be left out alone"
            )
        self.trainer, self.kfac = trainer, trainer.state.kfac
        self._batches = cycle(islice(trainer.workload.batches(0), BATCHES))
        self.steps = trainer.cell.window_steps
        for group in trainer.state.optimizer.param_groups:
            group["lr"] = 0.0
        trainer.state.model.train()

    def block(self, phase: Phase | None = None, times: int = 1, *, timed: bool = True) -> WindowTotals:
        """One inverse period; untimed, by one clock around it alone.

        Args:
            phase: whose work is done another number of times than once.
            times: 0 leaves it out, 2 does it twice.
            timed: whether the timer runs.
        """
        timer, device = self.trainer.timer, self.trainer.world.device
        self._step_with_updates()  # every block finds memory and caches as a whole step leaves them
        with ExitStack() as change:
            if phase is not None and times == 0:
                change.enter_context(self._without(phase))
            elif phase is not None and times == 2:
                change.enter_context(self._twice(phase))
            self.kfac.steps = 0
            self.trainer.world.wait_for_all()
            began = time.perf_counter()
            if timed:
                timer.start()
            for _ in range(self.steps):
                self.trainer.train_step(next(self._batches))
            if timed:
                timer.stop()
            elif device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
        return timer.drain() if timed else WindowTotals(seconds)

    @contextmanager
    def _without(self, phase: Phase) -> Iterator[None]:
        """The work of a phase replaced by nothing; what it leaves behind is what the step before left."""
        kfac = self.kfac
        with ExitStack() as stack:
            if phase == Phase.FACTOR_COMPUTE:
                stack.enter_context(self._kept_grams())
            if phase == Phase.FACTOR_COMM:
                stack.enter_context(self._kept_arrivals())
            for owner, *names in self._parts().get(phase, []):
                for name in names:
                    stack.enter_context(patch.object(owner, name, _nothing))
            if phase == Phase.PRECONDITION:
                stack.enter_context(patch.object(kfac._gradients, "own", []))
            yield

    @contextmanager
    def _twice(self, phase: Phase) -> Iterator[None]:
        """The work of a computing phase done twice in its place; what the second time leaves is used."""
        parts = self._parts().get(phase, [])
        if phase == Phase.FACTOR_COMPUTE:
            parts = [(self.kfac._capture, "_gram")]
        with ExitStack() as stack:
            for owner, *names in parts:
                for name in names:
                    stack.enter_context(patch.object(owner, name, partial(_twice, getattr(owner, name))))
            if phase == Phase.FACTOR_COMPUTE:
                factors = self.kfac._factors
                stack.enter_context(patch.object(factors, "accumulate_received", self._absorbed_twice()))
                for name in ("accumulate_local", "_pack"):
                    stack.enter_context(patch.object(factors, name, partial(_twice, getattr(factors, name))))
            if phase == Phase.PRECONDITION:
                gradients = self.kfac._gradients
                stack.enter_context(patch.object(gradients, "own", gradients.own * 2))
            yield

    def _absorbed_twice(self) -> Callable[[Any], None]:
        """Folding in clears what arrived, so the second time is given it again."""
        factors = self.kfac._factors
        absorb: Callable[[Any], None] = factors.accumulate_received

        def absorb_twice(statistics: Any) -> None:
            received = factors._received
            absorb(statistics)
            factors._received = received
            absorb(statistics)

        return absorb_twice

    def _parts(self) -> dict[Phase, list[tuple[Any, ...]]]:
        """What does a phase's work: an object, and names of its methods."""
        second_order, gradients = self.kfac._second_order, self.kfac._gradients
        return {
            Phase.GRADIENT_COMM: [(self.trainer.gradients, "average")],
            Phase.INVERSE_COMPUTE: [(second_order, "solve")],
            Phase.INVERSE_COMM: [(second_order, "exchange_means", "exchange")],
            Phase.PRECONDITION: [(gradients, "read")],
            Phase.PRECONDITION_COMM: [(gradients, "exchange")],
            Phase.SCALE: [(gradients, "clip", "write")],
        }

    @contextmanager
    def _kept_grams(self) -> Iterator[None]:
        """Hooks and packing run, but hand out what they made in one step before the clock runs."""
        grams: dict[Any, Any] = {}
        factors = self.kfac._factors
        pack: Callable[[Any, Any], Any] = factors._pack
        packed: dict[Any, Any] = {}

        def remember_packed(bucket: Any, statistics: Any) -> Any:
            packed[bucket] = pack(bucket, statistics)
            return packed[bucket]

        capture = self.kfac._capture
        compute: Callable[[int, str, Any], Any] = capture._gram

        def remember(layer: int, kind: str, tensor: Any) -> Any:
            grams[layer, kind] = compute(layer, kind, tensor)
            return grams[layer, kind]

        with ExitStack() as stack:
            stack.enter_context(patch.object(capture, "_gram", remember))
            stack.enter_context(patch.object(factors, "_pack", remember_packed))
            self._step_with_updates()
        with ExitStack() as stack:
            stack.enter_context(patch.object(capture, "_gram", lambda layer, kind, _: grams[layer, kind]))
            for name in ("accumulate_local", "accumulate_received"):
                stack.enter_context(patch.object(factors, name, _nothing))
            stack.enter_context(patch.object(factors, "_pack", lambda bucket, _: packed[bucket]))
            yield

    @contextmanager
    def _kept_arrivals(self) -> Iterator[None]:
        """What arrived of the other ranks' statistics is that of one step taken before the clock runs."""
        factors = self.kfac._factors
        receive: Callable[[], bool] = factors.receive
        received: list[Any] = []

        def remember() -> bool:
            is_last = receive()
            received.extend(factors._received)
            return is_last

        def hand_out() -> bool:
            factors._packed, factors._received = [], list(received)  # `send` has left them there
            return receive()

        with patch.object(factors, "receive", remember):
            self._step_with_updates()
        with patch.object(factors, "receive", hand_out), patch.object(factors, "send", _nothing):
            yield

    def _step_with_updates(self) -> None:
        self.kfac.steps = 0
        self.trainer.train_step(next(self._batches))


def measure(subject: Subject, rounds: int) -> dict[str, Rounds]:
    """Rounds of each phase in turn; every second one is turned round."""
    several = subject.trainer.world.world_size > 1
    phases = [phase for phase in ABLATED if several or phase not in COMM_PHASES]
    for _ in range(WARMUP_BLOCKS):
        subject.block()
    for phase in phases:
        for times in _changes(phase):
            subject.block(phase, times)
    table: dict[str, Rounds] = {phase.value: [] for phase in phases}
    for turn in range(rounds):
        for phase in phases:
            table[phase.value].append(_round(subject, phase, turned=bool(turn % 2)))
    return table


def _round(subject: Subject, phase: Phase, *, turned: bool) -> dict[str, float]:
    """Blocks beside each other: the phase once, not at all and twice; with the timer once and not at all."""
    kinds = [(1, False), *((times, False) for times in _changes(phase)), (1, True), (0, True)]
    totals = {
        (times, timed): subject.block(phase, times, timed=timed)
        for times, timed in (reversed(kinds) if turned else kinds)
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
    return {name: value / subject.steps for name, value in figures.items()}


def _changes(phase: Phase) -> tuple[int, ...]:
    """How often a phase's work is done instead of once; no exchange twice, for ranks wait only once."""
    return (0,) if phase in COMM_PHASES else (0, 2)


def _twice(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    work(*args, **kwargs)
    return work(*args, **kwargs)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a phase that is left out does."""


def main() -> None:
    """Measure, and write the figures beside the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    given = parser.parse_args()
    options = json.loads(given.options.read_text())
    ranks, folder = options["ranks"], given.options.parent
    torch.set_num_threads(options["threads"])
    keep_freed_memory()
    if ranks > 1:
        store = FileStore(options["store"], ranks)
        dist.init_process_group("gloo", store=store, rank=given.rank, world_size=ranks)
    world = World(given.rank, ranks, given.rank, torch.device("cpu"), "gloo", connect())
    cell = Cell.model_validate_json(options["cell"])
    trainer = Trainer(cell, world, HeartbeatWriter(folder / f"rank-{given.rank}.pulse"), lambda record: None)
    figures = measure(Subject(trainer), options["rounds"])
    (folder / f"rank-{given.rank}.json").write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
