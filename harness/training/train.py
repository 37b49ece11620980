"""The training loop and its clock: an optimizer, or the same optimizer behind K-FAC.

The clock runs from the first batch asked for to the last update. It stands still in evaluations and while
records are written; those have clocks of their own, so that any other rule can be scored afterwards.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from harness.cell import Cell
from harness.runs.checkpoint_requests import Request
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import EvalRecord, PhaseRecord, Record
from harness.training.all_gather import all_gather_bytes, all_gather_rows
from harness.training.checkpoint.checkpoints import Checkpoints
from harness.training.checkpoint.trainer_state import restore, state_of
from harness.training.clocks import Clocks
from harness.training.gauges.device import DeviceGauge
from harness.training.gauges.memory import read_memory
from harness.training.gradient_averaging import GradientAverage, align
from harness.training.optimizers import build_optimizer, learning_rate
from harness.training.precision import Arithmetic
from harness.training.tracing import trace_record
from harness.training.world import World
from harness.workloads import WORKLOADS
from harness.workloads.workload import Pooled, Share, Workload, build_workload
from kfac_core import KFAC, Phase
from kfac_core.optimizers import NLCG
from kfac_core.timing.timer import PhaseTimer, WindowTotals, seconds_per_entry


@dataclass(frozen=True)
class Result:
    """What training came to; rank 0 leaves it as `result.json`, unless it stopped to be resumed.

    Attributes:
        stop_reason: `target`, `epochs`, `diverged`, or `preempted`: saved, or not, at someone's request.
        parameters_sha256: of rank 0's parameters at the end: two runs that agree in it agree bit for bit.
    """

    reached_target: bool
    stop_reason: str
    train_seconds: float
    value: float
    steps: int
    parameters_sha256: str


class Trainer:
    """Trains one cell on one rank, writing a record a window and an evaluation an epoch.

    Args:
        checkpoints: where to go on from and to save to; None trains from start to end.
        traced: steps whose phases are recorded one by one.
        ranges: whether profilers are shown the phases.
    """

    def __init__(
        self,
        cell: Cell,
        world: World,
        pulse: HeartbeatWriter,
        write: Callable[[Record], None],
        checkpoints: Checkpoints | None = None,
        traced: range = range(0),
        *,
        ranges: bool = False,
    ) -> None:
        torch.manual_seed(cell.seed)
        self.cell, self._world, self._pulse, self._write = cell, world, pulse, write
        self._communicator = world.communicator
        traffic = self._communicator.traffic
        self._timer = PhaseTimer(world.device, observer=pulse.beat, traffic=traffic, ranges=ranges)
        self._entry_seconds = seconds_per_entry(world.device, pulse.beat)
        pulse.beat("start")
        self._traced, self._device = traced, DeviceGauge(world.device)
        self._arithmetic = Arithmetic(cell.training.precision, world.device)
        _, local_batch_size = cell.training.batch_sizes(world.world_size)
        self._share = Share(world.rank, world.world_size, local_batch_size, cell.seed, world.device)
        self._workload: Workload = build_workload(cell, self._share)
        self._model = self._workload.model()
        align(self._model, self._communicator)
        self._gradients = GradientAverage(self._model, self._communicator)
        self._rate = 0.0
        self.kfac = self._build_kfac()
        self._kfac_first_step = round(cell.training.kfac_start_epoch * self._workload.steps_per_epoch)
        self._optimizer = build_optimizer(
            cell.optimizer, self._model.parameters(), self.kfac, self._communicator
        )
        self._step = self._window_start = 0
        self._clocks = Clocks()
        self._carried = WindowTotals(0.0)
        self._loss_sum = torch.zeros((), device=world.device)
        self._loss_steps = 0
        pulse.total_steps = cell.training.epochs * self._workload.steps_per_epoch
        self._checkpoints = checkpoints
        loaded = checkpoints.load() if checkpoints is not None else None
        if loaded is not None:
            restore(self, loaded)
        self._kfac_waits = self.kfac is not None and self._step < self._kfac_first_step
        if self.kfac is not None and self._kfac_waits:
            self.kfac.remove()  # until then its hooks would cost time and count statistics

    def run(self) -> Result:
        """Train until the target, the last epoch, or a loss that is no number any more."""
        training = self.cell.training
        self._slowest(0.0)  # wait for each other: start-up is nobody's training time
        self._clocks.begin()
        value, reason = math.nan, "epochs"
        for epoch in range(self._step // self._workload.steps_per_epoch + 1, training.epochs + 1):
            if not self._train_epoch(epoch - 1):
                reason = "preempted"
                break
            if epoch % training.evaluate_every_epochs and epoch != training.epochs:
                continue
            value, train_loss = self._evaluate(epoch)
            if not math.isfinite(train_loss):
                reason = "diverged"
                break
            if training.stop_at_target and self.cell.target.reached_by(value):
                reason = "target"
                break
        if reason != "preempted":  # else the open window is in the checkpoint
            self._close_window()
        self._pulse.beat("done")
        reached = reason != "diverged" and self.cell.target.reached_by(value)
        train_seconds, digest = self._slowest(self._train_seconds), _digest(self._model)
        result = Result(reached, reason, train_seconds, value, self._step, digest)
        if self._checkpoints is not None:
            self._checkpoints.close()
        return result

    def _train_epoch(self, epoch: int) -> bool:
        """Train from where the run stands to the epoch's end; False if it has to stop before."""
        steps_per_epoch = self._workload.steps_per_epoch
        first = self._step - epoch * steps_per_epoch
        self._model.train()
        self._timer.start()
        batches = self._workload.batches(epoch, first)
        for index in range(first, steps_per_epoch):
            request = self._checkpoints.request(self._step, epoch, index) if self._checkpoints else None
            if request is not None and self._save(request):
                return False
            self._pulse.step = self._step
            self._timer.sampled_step = self._step if self._step in self._traced else None
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
        return True

    def _save(self, request: Request) -> bool:
        """Save between two steps, off the train clock; whether the run has to stop now."""
        assert self._checkpoints is not None  # noqa: S101  it made the request
        self._timer.stop()
        self._carried += self._timer.drain()
        self._write_if_any(trace_record(self._timer, self._world.rank, self._segment))
        self._pulse.beat("checkpoint")
        with self._clocks.checkpoint():
            self._checkpoints.save(self._step, request, *state_of(self))
        if not request.stops:
            self._timer.start()
        return request.stops

    def _train_step(self, batch: object) -> None:
        """One update; only here and in `KFAC.step` are phases named."""
        timer = self._timer
        if self._kfac_waits and self._step == self._kfac_first_step:
            self.kfac, self._kfac_waits = self._build_kfac(), False
        with timer.phase(Phase.FORWARD), self._arithmetic.of_the_model():
            loss = self._workload.loss(self._model, batch)
        with timer.phase(Phase.BACKWARD):
            self._gradients.clear()
            loss.backward()
        with timer.phase(Phase.GRADIENT_COMM):
            self._gradients.average()
        if self.kfac is not None and not self._kfac_waits and not isinstance(self._optimizer, NLCG):
            self.kfac.step()
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
        with self._arithmetic.of_the_model():
            sums, count = self._workload.evaluate(self._model)
        names = sorted(sums)
        own = [*(sums[name] for name in names), count, float(self._loss_sum), self._loss_steps]
        totals = torch.tensor(own, dtype=torch.float64, device=self._world.device)
        self._communicator.all_reduce(totals)
        *metrics, examples, loss, loss_steps = totals.tolist()
        means = {name: metric / examples for name, metric in zip(names, metrics, strict=True)}
        if isinstance(self._workload, Pooled):
            means |= self._pool(self._workload)
        value = WORKLOADS[self.cell.workload.name].value(self.cell.target.metric, means)
        self._loss_sum.zero_()
        self._loss_steps = 0
        train_seconds = self._slowest(self._train_seconds)
        self._clocks.eval_seconds += time.perf_counter() - began
        if self._world.rank == 0:
            self._write(self._evaluation(epoch, value, loss / loss_steps, train_seconds))
        return value, loss / loss_steps

    def _pool(self, workload: Pooled) -> Mapping[str, float]:
        """Metrics that rank 0 makes of what all ranks found, known to all of them."""
        findings = all_gather_bytes(self._communicator, self._world.device, workload.findings())
        names = workload.pooled_metrics
        values = torch.zeros(len(names), dtype=torch.float64)
        if self._world.rank == 0:
            scores = workload.score(findings)
            values = torch.tensor([scores[name] for name in names], dtype=torch.float64)
        values = values.to(self._world.device)
        self._communicator.broadcast(values, 0)
        return dict(zip(names, values.tolist(), strict=True))

    def _evaluation(self, epoch: int, value: float, train_loss: float, train_seconds: float) -> EvalRecord:
        return EvalRecord(
            rank=0,
            step=self._step,
            epoch=float(epoch),
            samples=self._step * self._share.global_batch_size,
            train_seconds=train_seconds,
            eval_seconds=self._clocks.eval_seconds,
            wall_seconds=self._clocks.wall_seconds,
            metric=self.cell.target.metric,
            value=value,
            direction=self.cell.target.direction,
            train_loss=train_loss,
            learning_rate=self._rate,
            checkpoint_seconds=self._clocks.checkpoint_seconds,
            segment=self._segment,
        )

    def _close_window(self) -> None:
        """Write what the timer holds, if there is a step in it; the clock stands still meanwhile."""
        if self._step == self._window_start:
            return
        totals = self._carried + self._timer.drain()
        self._carried = WindowTotals(0.0)
        kfac_bytes = self.kfac.memory() if self.kfac is not None else {}
        memory = {
            **read_memory(self._world.device),
            "model": sum(p.numel() * p.element_size() for p in self._model.parameters()),
            "optimizer": _optimizer_bytes(self._optimizer),
            **{f"kfac_{kind}": count for kind, count in kfac_bytes.items()},
        }
        steps = self._step - self._window_start
        waited = self._communicator.traffic.wait_seconds
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
                segment=self._segment,
                wait_seconds=None if waited is None else totals.wait_seconds,
                instrument_seconds=totals.entries * self._entry_seconds,
            )
        )
        rank, segment = self._world.rank, self._segment
        self._write_if_any(trace_record(self._timer, rank, segment))
        self._write_if_any(self._device.read(rank, segment, self._window_start, steps))
        self._window_start = self._step

    def _write_if_any(self, record: Record | None) -> None:
        if record is not None:
            self._write(record)

    @property
    def _train_seconds(self) -> float:
        """This rank's train clock over all segments; read it while the clock stands still."""
        return self._clocks.train_seconds + self._timer.elapsed_seconds

    @property
    def _segment(self) -> int:
        return self._checkpoints.segment if self._checkpoints is not None else 0

    def _slowest(self, seconds: float) -> float:
        """The largest of all ranks' clocks."""
        return max(clock for (clock,) in all_gather_rows(self._communicator, self._world.device, [seconds]))

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


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
