"""The training loop and its clock: an optimizer, or the same optimizer behind K-FAC.

The train clock runs from the request for the first batch to the last update; building the workload and
staging data come before. It stops during evaluations, checkpoints and the writing of records. Evaluations and
checkpoints have clocks of their own, so that other rules can be scored later.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from harness.cell import Cell, Training
from harness.runs.attempt_outcome import Result
from harness.runs.checkpoint_store import Request
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import EvalRecord, Record
from harness.training.batch_norm import synchronise_batch_norm
from harness.training.checkpoint import Checkpoints
from harness.training.gradient_averaging import broadcast_model, build_average
from harness.training.measurement.windows import WindowRecorder
from harness.training.optimizers import build_optimizer, learning_rate
from harness.training.passes import ModelPrecision, evaluate, micro_batches
from harness.training.training_state import RunClocks, TrainingState
from harness.training.world import World
from harness.workloads.workload import (
    Batch,
    CountedLoss,
    LeastSquares,
    Share,
    SumOfMeans,
    Workload,
    build_workload,
)
from kfac_core import KFAC, Phase
from kfac_core.optimizers import NLCG, AdaptiveDamping, LevenbergMarquardt
from kfac_core.timing import PhaseTimer, seconds_per_entry

StopReason = Literal["target", "epochs", "diverged", "preempted"]


class Trainer:
    """Trains one cell on one rank; writes a record per window and evaluation.

    Args:
        checkpoints: what to resume from and save to; None trains from start to end.
        traced_steps: steps whose phases are recorded one by one.
        profiler_ranges: whether phases show up in profilers.

    Attributes:
        state: model, optimizer, K-FAC and progress.
    """

    def __init__(
        self,
        cell: Cell,
        world: World,
        heartbeat: HeartbeatWriter,
        write: Callable[[Record], None],
        checkpoints: Checkpoints | None = None,
        traced_steps: range = range(0),
        *,
        profiler_ranges: bool = False,
    ) -> None:
        torch.manual_seed(cell.seed)
        self.cell, self.world, self._heartbeat, self._write = cell, world, heartbeat, write
        traffic = world.communicator.traffic
        self.timer = PhaseTimer(
            world.device, observer=heartbeat.write, traffic=traffic, ranges=profiler_ranges
        )
        entry_seconds = seconds_per_entry(world.device, heartbeat.write)
        heartbeat.write("start")
        self._traced_steps = traced_steps
        self._precision = ModelPrecision(cell.training.precision, world.device)
        _, local_batch_size = cell.training.batch_sizes(world.world_size)
        self._share = Share(world.rank, world.world_size, local_batch_size, cell.seed, world.device)
        self._windows = WindowRecorder(self.timer, world, write, entry_seconds, local_batch_size)
        self.workload: Workload = build_workload(cell, self._share)
        model = self.workload.model()
        world.wait_for_data()
        if cell.training.sync_batch_norm:
            waiting = partial(self.timer.phase, Phase.GRADIENT_COMM)
            synchronise_batch_norm(model, world.communicator, waiting)
        broadcast_model(model, world.communicator)
        self.gradients = build_average(
            cell.training.gradient_averaging,
            model,
            world.communicator,
            waiting=partial(self.timer.phase, Phase.GRADIENT_COMM),
        )
        self._factor_passes = cell.training.factor_micro_batches or cell.training.accumulate
        kfac = self._build_kfac(model)
        optimizer = build_optimizer(cell.optimizer, model.parameters(), kfac, world.communicator)
        loss_sum = torch.zeros((), device=world.device)
        self.state = TrainingState(model, optimizer, kfac, RunClocks(self.timer), loss_sum)
        heartbeat.total_steps = cell.training.epochs * self.workload.steps_per_epoch
        self._residuals: Tensor | None = None  # of the last pass, for least squares
        self._last_pass = True  # whether the pass in progress is the step's last that makes factors
        self._evaluated_at = _evaluated_at(cell.training, self.workload.steps_per_epoch)
        self._value = math.nan  # of the target's metric, at the last evaluation
        self._checkpoints = checkpoints
        if checkpoints is not None:
            checkpoints.resume(self.state)
        self._kfac_first_step = round(cell.training.kfac_start_epoch * self.workload.steps_per_epoch)
        self._kfac_pending = kfac is not None and self.state.step < self._kfac_first_step
        if kfac is not None and self._kfac_pending:
            kfac.remove()  # until then its hooks would cost time and count statistics

    def run(self) -> Result:
        """Train until the target, the last epoch, or a loss that is not finite."""
        self._slowest(0.0)  # wait for all ranks: start-up is not training time
        self.state.clocks.begin()
        reason: StopReason = "epochs"
        for epoch in range(self.state.step // self.workload.steps_per_epoch, self.cell.training.epochs):
            if (stopped := self._train_epoch(epoch)) is not None:
                reason = stopped
                break
        value = self._value
        if reason != "preempted":  # else the open window is in the checkpoint
            self._windows.close(self.state, self._segment)
        self._heartbeat.write("done")
        reached = reason != "diverged" and self.cell.target.reached_by(value)
        train_seconds, digest = self._slowest(self.state.clocks.train_seconds), _digest(self.state.model)
        result = Result(reached, reason, train_seconds, value, self.state.step, digest)
        if self._checkpoints is not None:
            self._checkpoints.close()
        return result

    def train_step(self, batch: object) -> None:
        """One update of the parameters."""
        timer, state = self.timer, self.state
        if self._kfac_pending and state.step == self._kfac_first_step:
            state.kfac, self._kfac_pending = self._build_kfac(state.model), False
        if isinstance(state.optimizer, torch.optim.LBFGS):
            with timer.phase(Phase.UPDATE):
                loss = state.optimizer.step(lambda: self._mean_loss(self._passes(batch)))
        else:
            loss = self._passes(batch)
            self._update(loss, batch)
        state.loss_sum += loss
        state.loss_steps += 1

    def _update(self, loss: Tensor, batch: object) -> None:
        """Precondition the averaged gradients, and step."""
        state, optimizer = self.state, self.state.optimizer
        inside = isinstance(optimizer, NLCG | LevenbergMarquardt)  # they step K-FAC themselves
        if state.kfac is not None and not self._kfac_pending and not inside:
            state.kfac.step()
        with self.timer.phase(Phase.UPDATE):
            if isinstance(optimizer, NLCG):
                optimizer.step(loss)
            elif isinstance(optimizer, LevenbergMarquardt):
                optimizer.step(partial(self.workload.residuals, state.model, batch), self._residuals)  # type: ignore[attr-defined]  # checked with the cell
            else:
                optimizer.step()

    def _mean_loss(self, loss: Tensor) -> Tensor:
        """Over all ranks, so that they search along a line in the same way."""
        mean = loss.clone().reshape(1)
        self.world.communicator.all_reduce(mean)
        return mean[0] / self.world.world_size

    def _passes(self, batch: object) -> Tensor:
        """Forward and backward pass of a batch, and the average of the gradients; returns the local loss."""
        timer, state = self.timer, self.state
        parts = micro_batches(self.workload, batch, self.cell.training.accumulate)
        losses: list[Tensor] = []
        for part in parts:
            number = len(losses) + 1
            self._last_pass = number == self._factor_passes
            with (
                nullcontext() if number == len(parts) else self.gradients.no_sync(),
                nullcontext() if state.kfac is None or number <= self._factor_passes else state.kfac.paused(),
            ):
                losses.append(self._forward_and_backward(part, len(parts), clear=not losses))
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        with timer.phase(Phase.GRADIENT_COMM):
            self.gradients.average()
        return loss

    def _forward_and_backward(self, part: Batch, parts: int, *, clear: bool) -> Tensor:
        """Add the gradients of one of `parts` micro-batches; returns its share of the loss."""
        timer, kfac = self.timer, self.state.kfac
        if kfac is not None and isinstance(self.workload, CountedLoss):
            of = self.workload.loss_terms_of(part) if isinstance(self.workload, SumOfMeans) else None
            kfac.set_loss_terms(self.workload.loss_terms(part), of)
        with timer.phase(Phase.FORWARD), self._precision.autocast():
            if kfac is not None and isinstance(self.workload, LeastSquares):
                residuals = self._residuals = self.gradients.forward(self.workload.residuals, part)
                loss = residuals.square().sum() / 2
            else:
                loss = self.gradients.forward(self.workload.loss, part)
            if parts > 1:
                loss = loss / parts
        with timer.phase(Phase.BACKWARD):
            if clear:
                self.gradients.clear()
            if kfac is not None and isinstance(self.workload, LeastSquares):
                if kfac.renews_factors:
                    of_mean = residuals.sum() / math.sqrt(self.workload.loss_terms(part))
                    trained = [p for p in self.state.model.parameters() if p.requires_grad]
                    torch.autograd.grad(of_mean, trained, retain_graph=True)
                with kfac.paused():
                    loss.backward()
            else:
                loss.backward()
        return loss.detach()

    def _train_epoch(self, epoch: int) -> StopReason | None:
        """Train from the present step to the end of the epoch; why the run must stop, if it must."""
        state, steps_per_epoch = self.state, self.workload.steps_per_epoch
        first = state.step - epoch * steps_per_epoch
        state.model.train()
        self.timer.start()
        batches = self.workload.batches(epoch, first)
        for index in range(first, steps_per_epoch):
            request = self._checkpoints.request(state.step, epoch, index) if self._checkpoints else None
            if request is not None and self._save(request):
                return "preempted"
            self._heartbeat.step = state.step
            self.timer.sampled_step = state.step if state.step in self._traced_steps else None
            self.timer.step(self._kind_of_step())
            self._set_rate()
            with self.timer.phase(Phase.DATA):
                batch = next(batches)
            self.train_step(batch)
            state.step += 1
            if state.step - state.window_start == self.cell.window_steps:
                self.timer.stop()
                self._windows.close(state, self._segment)
                self.timer.start()
            if state.step in self._evaluated_at:
                self.timer.stop()
                if (reason := self._evaluate()) is not None or index + 1 == steps_per_epoch:
                    return reason  # the clock stays what the evaluation recorded
                state.model.train()
                self.timer.start()
        self.timer.stop()
        return None

    def _save(self, request: Request) -> bool:
        """Save between two steps, off the train clock; returns whether the run must stop now."""
        assert self._checkpoints is not None  # noqa: S101  it made the request
        self.timer.stop()
        self._windows.suspend(self.state, self._segment)
        self._heartbeat.write("checkpoint")
        with self.state.clocks.checkpoint():
            self._checkpoints.save(self.state, request)
        if not request.stops:
            self.timer.start()
        return request.stops

    def _kind_of_step(self) -> str:
        """Steps of a kind do the same work."""
        kfac = self.state.kfac
        if kfac is None or self.state.step < self._kfac_first_step:
            return "plain"
        return f"{kfac.renews_factors} {kfac.renews_second_order}"

    def _set_rate(self) -> None:
        steps_per_epoch, epochs = self.workload.steps_per_epoch, self.cell.training.epochs
        rate = self.state.learning_rate = learning_rate(
            self.cell.optimizer, self.world.world_size, self.state.step, steps_per_epoch, epochs
        )
        for group in self.state.optimizer.param_groups:
            group["lr"] = rate

    def _evaluate(self) -> StopReason | None:
        """Evaluate and record all metrics, off the train clock; why the run must stop, if it must."""
        state = self.state
        began = time.perf_counter()
        self._heartbeat.write("evaluation")
        metrics, train_loss = evaluate(self.cell, self.world, self.workload, state, self._precision)
        value = metrics[self.cell.target.metric]
        state.loss_sum.zero_()
        state.loss_steps = 0
        train_seconds = self._slowest(state.clocks.train_seconds)
        state.clocks.eval_seconds += time.perf_counter() - began
        if self.world.rank == 0:
            self._write(
                EvalRecord(
                    rank=0,
                    step=state.step,
                    epoch=state.step / self.workload.steps_per_epoch,
                    samples=state.step * self._share.global_batch_size,
                    train_seconds=train_seconds,
                    eval_seconds=state.clocks.eval_seconds,
                    wall_seconds=state.clocks.wall_seconds,
                    metric=self.cell.target.metric,
                    value=value,
                    direction=self.cell.target.direction,
                    train_loss=train_loss,
                    learning_rate=state.learning_rate,
                    checkpoint_seconds=state.clocks.checkpoint_seconds,
                    segment=self._segment,
                    metrics=metrics,
                )
            )
        self._value = value
        if not math.isfinite(train_loss):
            return "diverged"
        reached = self.cell.target.reached_by(value)
        return "target" if reached and self.cell.training.stop_at_target else None

    @property
    def _segment(self) -> int:
        return self._checkpoints.segment if self._checkpoints is not None else 0

    def _slowest(self, seconds: float) -> float:
        """The largest of all ranks' values."""
        return max(map(float, self.world.all_gather(seconds)))

    def _build_kfac(self, model: nn.Module) -> KFAC | None:
        if self.cell.kfac is None:
            return None
        config = self.cell.kfac
        if self.cell.optimizer.name == "lm":
            config = replace(config, damping=AdaptiveDamping(float(config.damping)))  # type: ignore[arg-type]  # a number, as the cell says
        return KFAC(
            model,
            config,
            lr=lambda: self.state.learning_rate,
            steps_per_epoch=self.workload.steps_per_epoch,
            timer=self.timer,
            communicator=self.world.communicator,
            is_last_pass=lambda: self._last_pass,
            captured_share=self._factor_passes / self.cell.training.accumulate,
        )


def _evaluated_at(training: Training, steps_per_epoch: int) -> frozenset[int]:
    """Steps after which the model is evaluated: those nearest to multiples of the interval, and the last."""
    last = training.epochs * steps_per_epoch
    interval = training.evaluate_every_epochs * steps_per_epoch
    multiples = range(1, math.floor(last / interval) + 1)
    return frozenset({max(1, round(number * interval)) for number in multiples} | {last})


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        values = parameter.detach().cpu().contiguous().reshape(-1)  # a single number has no dimension to view
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
