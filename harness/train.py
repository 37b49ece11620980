"""The training loop and its clock: an optimizer, or the same optimizer behind K-FAC.

The clock runs from the first batch asked for to the last update. It stands still in evaluations and while
records are written; those have clocks of their own, so that any other rule can be scored afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.averaging import GradientAverage, align
from harness.cell import Cell
from harness.gauges.memory import read_memory
from harness.optimizers import build_optimizer, learning_rate
from harness.pulse import Pulse
from harness.records import EvalRecord, PhaseRecord, Record
from harness.workloads.workload import Share, Workload, build_workload
from harness.world import World
from kfac_core import KFAC, Phase
from kfac_core.collectives import connect
from kfac_core.optimizers import NLCG
from kfac_core.timer import PhaseTimer


@dataclass(frozen=True)
class Result:
    """What training came to; rank 0 leaves it as `result.json`."""

    reached_target: bool
    stop_reason: str
    train_seconds: float
    value: float
    steps: int


class Trainer:
    """Trains one cell on one rank, writing a record a window and an evaluation an epoch."""

    def __init__(self, cell: Cell, world: World, pulse: Pulse, write: Callable[[Record], None]) -> None:
        torch.manual_seed(cell.seed)
        self.cell, self._world, self._pulse, self._write = cell, world, pulse, write
        self._communicator = connect()
        self._timer = PhaseTimer(world.device, observer=pulse.beat, traffic=self._communicator.traffic)
        _, local_batch_size = cell.training.batch_sizes(world.world_size)
        self._share = Share(world.rank, world.world_size, local_batch_size, cell.seed, world.device)
        self._workload: Workload = build_workload(cell, self._share)
        self._model = self._workload.model()
        align(self._model, self._communicator)
        self._gradients = GradientAverage(self._model, self._communicator)
        self._rate = 0.0
        self._kfac = self._build_kfac()
        self._optimizer = build_optimizer(
            cell.optimizer, self._model.parameters(), self._kfac, self._communicator
        )
        self._step = self._window_start = 0
        self._eval_seconds = 0.0
        self._loss_sum = torch.zeros((), device=world.device)
        self._loss_steps = 0
        pulse.total_steps = cell.training.epochs * self._workload.steps_per_epoch

    def run(self) -> Result:
        """Train until the target, the last epoch, or a loss that is no number any more."""
        training = self.cell.training
        self._slowest(0.0)  # wait for each other: start-up is nobody's training time
        self._began = time.perf_counter()
        value, reason = math.nan, "epochs"
        for epoch in range(1, training.epochs + 1):
            self._train_epoch(epoch - 1)
            if epoch % training.evaluate_every_epochs and epoch != training.epochs:
                continue
            value, train_loss = self._evaluate(epoch)
            if not math.isfinite(train_loss):
                reason = "diverged"
                break
            if training.stop_at_target and self.cell.target.reached_by(value):
                reason = "target"
                break
        self._close_window()
        self._pulse.beat("done")
        reached = self.cell.target.reached_by(value) and reason != "diverged"
        return Result(reached, reason, self._slowest(self._timer.elapsed_seconds), value, self._step)

    def _train_epoch(self, epoch: int) -> None:
        steps_per_epoch = self._workload.steps_per_epoch
        self._model.train()
        self._timer.start()
        batches = self._workload.batches(epoch)
        for index in range(steps_per_epoch):
            self._pulse.step = self._step
            self._set_rate(epoch + index / steps_per_epoch)
            with self._timer.phase(Phase.DATA):
                batch = next(batches)
            self._train_step(batch)
            self._step += 1
            if self._step - self._window_start == self.cell.window_steps:
                self._timer.stop()
                self._close_window()
                self._timer.start()
        self._timer.stop()

    def _train_step(self, batch: object) -> None:
        """One update; only here and in `KFAC.step` are phases named."""
        timer = self._timer
        with timer.phase(Phase.FORWARD):
            loss = self._workload.loss(self._model, batch)
        with timer.phase(Phase.BACKWARD):
            self._gradients.clear()
            loss.backward()
        with timer.phase(Phase.GRADIENT_COMM):
            self._gradients.average()
        if self._kfac is not None and not isinstance(self._optimizer, NLCG):
            self._kfac.step()
        with timer.phase(Phase.UPDATE):
            if isinstance(self._optimizer, NLCG):
                self._optimizer.step(loss.detach())  # steers by the loss, and steps K-FAC itself
            else:
                self._optimizer.step()
            self._loss_sum += loss.detach()
            self._loss_steps += 1

    def _set_rate(self, epoch: float) -> None:
        self._rate = learning_rate(self.cell.optimizer, self._world.world_size, epoch)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> tuple[float, float]:
        """Value of the target's metric and mean training loss since the last evaluation, over all ranks."""
        began = time.perf_counter()
        self._pulse.beat("evaluation")
        self._model.eval()
        sums, count = self._workload.evaluate(self._model)
        names = sorted(sums)
        own = [*(sums[name] for name in names), count, float(self._loss_sum), self._loss_steps]
        totals = torch.tensor(own, dtype=torch.float64, device=self._world.device)
        self._communicator.all_reduce(totals)
        *metrics, examples, loss, loss_steps = totals.tolist()
        value = dict(zip(names, metrics, strict=True))[self.cell.target.metric] / examples
        self._loss_sum.zero_()
        self._loss_steps = 0
        train_seconds = self._slowest(self._timer.elapsed_seconds)
        self._eval_seconds += time.perf_counter() - began
        if self._world.rank == 0:
            self._write(self._evaluation(epoch, value, loss / loss_steps, train_seconds))
        return value, loss / loss_steps

    def _evaluation(self, epoch: int, value: float, train_loss: float, train_seconds: float) -> EvalRecord:
        return EvalRecord(
            rank=0,
            step=self._step,
            epoch=float(epoch),
            samples=self._step * self._share.global_batch_size,
            train_seconds=train_seconds,
            eval_seconds=self._eval_seconds,
            wall_seconds=time.perf_counter() - self._began,
            metric=self.cell.target.metric,
            value=value,
            direction=self.cell.target.direction,
            train_loss=train_loss,
            learning_rate=self._rate,
        )

    def _close_window(self) -> None:
        """Write what the timer holds, if there is a step in it; the clock stands still meanwhile."""
        if self._step == self._window_start:
            return
        totals = self._timer.drain()
        kfac_bytes = self._kfac.memory() if self._kfac is not None else {}
        memory = {
            **read_memory(self._world.device),
            "model": sum(p.numel() * p.element_size() for p in self._model.parameters()),
            "optimizer": _optimizer_bytes(self._optimizer),
            **{f"kfac_{kind}": count for kind, count in kfac_bytes.items()},
        }
        steps = self._step - self._window_start
        self._write(
            PhaseRecord(
                rank=self._world.rank,
                first_step=self._window_start,
                steps=steps,
                samples=steps * self._share.local_batch_size,
                wall_seconds=totals.wall_seconds,
                seconds=totals.seconds,
                calls=totals.calls,
                sent_bytes=totals.sent_bytes,
                memory_bytes=memory,
            )
        )
        self._window_start = self._step

    def _slowest(self, seconds: float) -> float:
        """The largest of all ranks' clocks."""
        clocks = torch.zeros(self._world.world_size, dtype=torch.float64, device=self._world.device)
        clocks[self._world.rank] = seconds
        self._communicator.all_reduce(clocks)
        return float(clocks.max())

    def _build_kfac(self) -> KFAC | None:
        if self.cell.kfac is None:
            return None
        return KFAC(
            self._model,
            self.cell.kfac,
            lr=lambda: self._rate,
            steps_per_epoch=self._workload.steps_per_epoch,
            timer=self._timer,
            communicator=self._communicator,
        )


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
