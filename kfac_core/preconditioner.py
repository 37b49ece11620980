"""The K-FAC preconditioner: the phases of a step, in order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kfac_core.capture import Capture, full_precision
from kfac_core.collectives import Communicator, connect
from kfac_core.config import Execution, KFACConfig, check_schedules
from kfac_core.coverage import Summary, log_coverage, summarised
from kfac_core.device_grams import DeviceGrams
from kfac_core.errors import ConfigError
from kfac_core.factors import Factors
from kfac_core.gradient_check import GradientCheck
from kfac_core.gradients import Gradients
from kfac_core.guards import (
    AddedGradients,
    Failure,
    ModelChanges,
    Progress,
    SameGradients,
    missing_statistics,
    refuse_other_configs,
    refuse_other_kinds,
    refuse_setting,
    warn_of_other_kfac,
)
from kfac_core.layers import find_layers
from kfac_core.overflow import Overflow, UndecidedSteps
from kfac_core.phases import Phase
from kfac_core.placement import Placement
from kfac_core.placement.balance import CostModel
from kfac_core.placement.placement import state_bytes
from kfac_core.placement.strategies import place
from kfac_core.schedule import decay_at, interval_at, value_at
from kfac_core.second_order import BatchedSecondOrder, SecondOrder
from kfac_core.state import Counters, Resumable, Snapshot, restore_known
from kfac_core.timing import PhaseTimer
from kfac_core.wrappers import (
    LearningRate,
    discard_compiled,
    read_rates,
    refuse_join,
    refuse_parts_of_layers,
    refuse_unsupported,
    sharded_modules,
    unwrap,
    warn_of_adaptive,
)


class KFAC(Resumable):
    """Replaces the gradients of supported layers by F^-1 times the gradient, F Kronecker-factored.

    Call `step()` after the gradients are averaged over ranks (and unscaled, with a GradScaler) and before
    the optimizer's own step. Layers of other kinds keep their averaged gradient. All ranks construct it at
    the same time.

    Args:
        model: the model, also wrapped in DistributedDataParallel or compiled by torch.compile.
        config: hyperparameters and distribution strategy.
        lr: the learning rate in the kl-clip bound: a number, a callable without arguments, or the optimizer,
            whose parameter groups have it. Not needed without a kl-clip.
        steps_per_epoch: needed by schedules that count in epochs.
        grad_scaler: the GradScaler that scales the loss; a step that overflowed is skipped whole.
        cost: cost model of the machine for placement; None is `config.costs`, and without them n^3.
        timer: books the time and traffic of each phase; a new one by default.
        process_group: the ranks that share their gradients and the work; by default those of the model's
            DistributedDataParallel wrapper, else torch.distributed's world, else this process alone.
        communicator: carries the traffic instead of torch.distributed.
        execution: how steps are issued; by default as the model's device asks for. The results are the same
            but for rounding.
        is_last_pass: whether a forward pass belongs to the last backward pass before `step()`; asked in each.
            `overlap_factors` needs it where gradients are accumulated; by default the `no_sync()` of the
            model's DistributedDataParallel wrapper says it. With `captured_share`, the last captured one.
        captured_share: of a step's loss terms, those whose backward passes make the factors, where the others
            run in `paused()`: 0.25 for the first of four micro-batches. Range: (0, 1].

    Attributes:
        placement: who computes what; `print(kfac.placement)` draws the grid of the KAISA paper.
        steps: steps taken so far, without skipped ones.
        skipped_steps: steps that overflowed under the GradScaler on any rank. On a GPU the host learns of
            one a step later; it has no effect, and the updates it was due are made up for in the step after
            that.
        plain_modules: modules with trained parameters that K-FAC does not precondition; logged once, as a
            warning where K-FAC takes less than 80 % of the parameters. `print(kfac)` says why.

    Raises:
        ConfigError: the model has no layer that K-FAC supports, or all of them are skipped; a pattern of
            `skip` matches none; a schedule in epochs lacks `steps_per_epoch`, or sets the inverse interval
            below the factor interval; this rank is not a member of the process group;
            TF32 or bfloat16 on a CPU; a kl-clip without `lr`; a model under DataParallel, FSDP1, tensor
            parallelism or `torch.compile(fullgraph=True)`, on several devices, or on the meta device;
            fully_shard over other ranks than K-FAC's; an argument of another kind than its own; a lazy module
            that is not initialised yet.
        PlacementError: the strategy cannot divide this world.

    Source: Pauloski et al., "Convolutional neural network training with distributed K-FAC", SC20;
    Pauloski et al., "KAISA", SC21; Zhang et al., "Scalable K-FAC training with distributed preconditioning".
    """

    def __init__(
        self,
        model: nn.Module,
        config: KFACConfig | None = None,
        *,
        lr: LearningRate | None = None,
        steps_per_epoch: int | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        cost: CostModel | None = None,
        timer: PhaseTimer | None = None,
        process_group: dist.ProcessGroup | None = None,
        communicator: Communicator | None = None,
        execution: Execution | None = None,
        is_last_pass: Callable[[], bool] | None = None,
        captured_share: float = 1.0,
    ) -> None:
        refuse_other_kinds(
            model,
            {
                "config": config, "lr": lr, "steps_per_epoch": steps_per_epoch, "grad_scaler": grad_scaler,
                "cost": cost, "timer": timer, "process_group": process_group, "execution": execution,
                "is_last_pass": is_last_pass, "captured_share": captured_share,
            },
        )  # fmt: skip
        self.config = config if config is not None else KFACConfig()
        self.steps = self.skipped_steps = 0
        self._rates = read_rates(lr, self.config)
        self._steps_per_epoch = steps_per_epoch
        check_schedules(self.config, steps_per_epoch)
        self._captured_share = captured_share
        scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self._timer = timer if timer is not None else PhaseTimer()
        refuse_unsupported(model)
        self._model, self._wrapper = unwrap(model)
        ddp_group = self._wrapper.process_group if self._wrapper is not None else None
        self._communicator = communicator if communicator is not None else connect(process_group or ddp_group)
        self._timer.count(self._communicator.traffic)
        self._cost, self._asked_execution = cost, execution
        self._is_last_pass = is_last_pass or (
            lambda: bool(getattr(self._wrapper, "require_backward_grad_sync", True))
        )
        self._scaler = scaler
        self._must_solve = self._owes_factors = self._paused = self._named_repeat = False
        self._named_order = False
        self._solved_at: tuple[int, float] | None = None
        self._undecided = UndecidedSteps()
        self._pending_warnings: list[str] = []
        self._build()
        warn_of_adaptive(lr, self.config)

    def _build(self) -> None:
        """All that depends on the layers of the model as it is now."""
        bare = self._model
        discard_compiled(bare)
        self._fully_sharded = sharded_modules(bare)
        self._reshard()
        refuse_parts_of_layers(bare, self._communicator.world_size)
        self._layers = find_layers(bare, self.config)
        if not self._layers:
            skipped = f"; skip={list(self.config.skip)} leaves out all" if self.config.skip else ""
            raise ConfigError(
                f"{type(bare).__name__} has no trained layer that K-FAC supports and may take{skipped}"
            )
        self.shapes = [layer.shape for layer in self._layers]
        self.placement: Placement = place(self.config, self.shapes, self._communicator.world_size, self._cost)
        dtype = reduce(torch.promote_types, (layer.weight.dtype for layer in self._layers), torch.float32)
        like = torch.empty(0, dtype=dtype, device=self._layers[0].weight.device)
        self._communicator.prepare(self.placement.groups, like)
        refuse_other_configs(self._communicator, self.config, self.shapes, like)
        self._execution = self._asked_execution or Execution.on(like.device.type)
        self._choose_grams(like.dtype)
        batched = self._execution is Execution.BATCHED
        arguments = self.shapes, self.placement, self._communicator, self.config, like
        self._factors = Factors(*arguments, self._execution)
        self._second_order = (BatchedSecondOrder if batched else SecondOrder)(*arguments)
        self._gradients = Gradients(self._layers, self.placement, self._communicator, like, self._execution)
        warn_of_other_kfac(self._layers)  # before any hook: a filter may turn the warning into an error
        scaler = self._scaler
        self._overflow = Overflow(scaler, self._communicator, like) if scaler is not None else None
        self._capture = self._install_capture(like.dtype)
        self._factor_update = _FactorUpdate(self._factors, self._capture, self._communicator, self._timer)
        self._check_statistics = True  # once, at the first second-order update
        self._changes = ModelChanges(bare, self._layers, like.device)
        self._gradient_check = GradientCheck(bare, self._layers, lambda: not self._paused)
        self._progress = Progress()
        averaged = self._wrapper is not None or bool(self._fully_sharded)
        self._same_gradients = SameGradients(self._communicator, averaged=averaged)
        self._added_gradients = AddedGradients(self._layers, self._gradients)
        self._removed = False
        summary = self.summary()
        self.plain_modules = [f"{each.name} ({each.kind})" for each in summary.plain]
        log_coverage(summary, self._communicator.rank)

    @torch.no_grad()
    def step(self) -> None:
        """Precondition the gradients in place; on update steps, first update factors and second order."""
        self._check_use()
        with self._timer.phase(Phase.PRECONDITION):
            self._gradients.read()
        if self._overflow is not None and self._has_overflowed(self._overflow):
            self._gradient_check.end(None)
            self.discard()
            self.skipped_steps += 1
            return
        self._same_gradients.ask(self._gradients.raw[0])
        renews = self.renews_factors, self.renews_second_order
        with full_precision(self._gradients.raw[0]):  # also when called inside autocast
            self._read_guards()
            self._gradient_check.end(self._loss_scale)
            if renews[0]:
                self._update_factors()
                self._owes_factors = False
            if renews[1]:
                self._update_second_order()
            self._precondition()
            self._ask_progress(renewed=renews[1])
        self.steps += 1
        if self.steps == 1:
            self._added_gradients.watch()
        self._undecided.issued(factors=renews[0], second_order=renews[1])
        self._capture.loss_terms.clear()  # also in a step that updates no factor
        self._settle(leave=1)
        self._warn()

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse settings, which are fixed when KFAC is made.

        Raises:
            ConfigError: saying how the setting is changed.
        """
        refuse_setting(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> NoReturn:
        """KFAC cannot be copied or pickled: a copy would share the hooks of the original."""
        raise TypeError("KFAC belongs to one model: make another for a copy, and load_state_dict() into it")

    def discard(self) -> None:
        """Discard the statistics of the last backward pass, as when its gradients are thrown away.

        With `overlap_factors`, which may have sent some of them already, every rank must call this.
        """
        try:
            if self.config.overlap_factors:
                self._factor_update.send()
        finally:
            self._factor_update.discard()

    def _discard_stale(self) -> None:
        """Discard the statistics of weights that an optimizer has changed since, without a step here."""
        if self.config.overlap_factors:
            self._factor_update.send()
        self._factor_update.forget_backward_passes()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose forward and backward passes do not count, as of a gradient penalty or `torch.func`.

        That holds also for a backward pass in it through a forward pass before it.
        """
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def set_loss_terms(self, count: float, of: Mapping[str, float] | None = None) -> None:
        """State how many loss terms this rank's next backward pass averages; forgotten at `step()`.

        Where neither examples nor tokens are right: with padding that the loss leaves out, the tokens that
        it counts. Where it divides by the tokens of all ranks, their mean number over the ranks.

        Args:
            count: of all layers that `of` does not name.
            of: for a loss that is a sum of means, such as BERT's over words and over sentences: the terms of
                a mean by the name of a module that no other mean's gradient reaches; it holds for all layers
                inside.

        Raises:
            ConfigError: the model has no module of that name.
        """
        self._capture.loss_terms.state(count, of or {})

    @property
    def failures(self) -> list[Failure]:
        """Factors that could not be used on this rank, each with layer, step and reason; oldest first."""
        return self._second_order.failures

    @property
    def nonfinite_steps(self) -> int:
        """Steps whose gradients were not finite, without a GradScaler: they were set to zero.

        On a GPU known after second-order updates, and gradients of parameters that K-FAC does not take are
        as they are.
        """
        return self._progress.nonfinite_steps

    @property
    def renews_factors(self) -> bool:
        """Whether the next step updates the factors, and so needs statistics."""
        return self._due("factor_update_steps") or self._owes_factors

    @property
    def renews_second_order(self) -> bool:
        """Whether the next step updates the second-order data."""
        return self._due("inverse_update_steps") or self._must_solve

    @property
    def damping(self) -> float:
        """The damping of the next step."""
        return self._damping_at(self.steps)

    def memory(self, rank: int | None = None) -> dict[str, int]:
        """Bytes of K-FAC state by kind, on this rank or any other, from the placement.

        Returns:
            `factors`: running means; `second_order`: eigen data or inverses; `gradients`: the two flat
            gradient buffers; `statistics`: sums kept from a backward pass to the end of a factor update.
            Not included is what a process allocates once: scratch memory of its largest factor (at least
            65,536 elements if ranks share a host) and 6 n^2 bytes of index tables for each size n <= 320
            that is sent.
        """
        own = self._communicator.rank if rank is None else rank
        return state_bytes(
            self.placement, self.shapes, self.config, own, self._gradients.raw[0].element_size()
        )

    def summary(self) -> Summary:
        """Each layer with its factors, their bytes and owners; and what stays plain, and why."""
        item_bytes = self._gradients.raw[0].element_size()
        return summarised(self._model, self._layers, self.placement, self.config, item_bytes)

    def __str__(self) -> str:
        """The summary."""
        return str(self.summary())

    def refresh(self) -> None:
        """Take the model as it is now: layers that were added, unfrozen, replaced or resized.

        Layers of the same name and shape keep their factors. Every rank must call it, outside of a forward
        and backward pass.

        Raises:
            ConfigError: as when a KFAC is made.
        """
        saved = self.state_dict()
        self.discard()
        self.remove()
        self._build()
        restore_known(self._snapshot(), saved)
        self._must_solve = self.steps > 0

    def parameters(self) -> list[nn.Parameter]:
        """Those whose gradients K-FAC preconditions; the others may have an optimizer of their own."""
        return list({id(each): each for layer in self._layers for each in layer.parameters()}.values())

    def remove(self) -> None:
        """Take K-FAC's hooks off the model; with `overlap_factors` every rank calls this."""
        self._removed = True
        self._capture.remove()
        self._gradient_check.remove()
        self._added_gradients.remove()
        self._factors.close()

    def _snapshot(self) -> Snapshot:
        self._settle(leave=0)
        progress = Counters(
            self.steps, self.skipped_steps, self._must_solve, self._owes_factors, self._solved_at
        )
        return Snapshot(
            self.config, self.shapes, self._communicator, self._factors, self._second_order, progress,
            self._damping_at,
        )  # fmt: skip

    def _reshard(self) -> None:
        for module in self._fully_sharded:
            module.reshard()

    def _damping_at(self, step: int) -> float:
        """The damping of a step; `solvers/` say how it enters."""
        return value_at(self.config.any_damping, step, self._steps_per_epoch)

    def _check_use(self) -> None:
        """Refuse or name a step that cannot mean what it would do."""
        if self._removed:
            raise ConfigError("kfac.step() after kfac.remove(): make a new KFAC, or call kfac.refresh()")
        self._reshard()
        self._pending_warnings += self._changes.warnings()
        refuse_join(self._wrapper, self._communicator.world_size)
        self._pending_warnings += self._added_gradients.read()
        if self._gradients.are_as_written() and not self._named_repeat:
            self._named_repeat = True
            self._pending_warnings.append(
                "K-FAC: step() was called again without a backward pass since the last one: it preconditions "
                "gradients that are preconditioned already"
            )

    def _read_guards(self) -> None:
        """What the step before has asked the device for."""
        scaled = self._scaler is not None
        self._pending_warnings += self._gradient_check.read(
            scaled=scaled, alone=self._communicator.world_size == 1
        )
        self._pending_warnings += self._progress.read(self.steps) + self._same_gradients.read()

    def _ask_progress(self, *, renewed: bool) -> None:
        """Whether the gradients were finite: read at once on a CPU, on a GPU after an update."""
        gradients = self._gradients
        at_once = self._scaler is None and gradients.finite.device.type == "cpu"
        if renewed or at_once:
            scale = gradients.clip_scale if renewed else None
            self._progress.ask(gradients.checked, gradients.finite, scale)
        if at_once:
            self._pending_warnings += self._progress.read(self.steps + 1)

    def _choose_grams(self, dtype: torch.dtype) -> None:
        """How the layers sum outer products."""
        if self._execution is Execution.BATCHED:
            for layer in self._layers:
                layer.grams = DeviceGrams(dtype, self.config.gram_precision or "tf32")
            return
        for name in ("gram_precision", "product_precision"):
            precision = getattr(self.config, name)
            if precision not in (None, "ieee"):
                raise ConfigError(f"{name}={precision} needs a GPU, and this model is on a CPU; leave it out")

    def _has_overflowed(self, overflow: Overflow) -> bool:
        """Whether to skip this step; with batched execution it goes on, without effect if it did overflow."""
        batched = self._factors.batched
        with self._timer.phase(Phase.PRECONDITION_COMM):
            if batched is None:
                return overflow.on_host(self._model.parameters())
            batched.overflowed = overflow.on_device(self._model.parameters())
        self._undecided.ask(batched.overflowed)
        return False

    def _settle(self, *, leave: int) -> None:
        """Count the steps that overflowed, but the newest; an update that was lost is made up for."""
        for factors, second_order in self._undecided.lost(leave=leave):
            self.steps -= 1
            self.skipped_steps += 1
            self._owes_factors |= factors
            self._must_solve |= second_order

    def _due(self, interval: str) -> bool:
        steps = interval_at(getattr(self.config, interval), self.steps, self._steps_per_epoch)
        return self.steps % steps == 0

    def _install_capture(self, dtype: torch.dtype) -> Capture:
        placed, rank = self.placement.layers.values(), self._communicator.rank
        return Capture(
            self._model,
            self._layers,
            [index for index, layer in enumerate(placed) if rank in layer.factor_workers],
            {(job.layer, job.kind) for job in self._factors.jobs if rank not in job.unpacked_on},
            dtype,
            is_active=lambda: not self._paused and self.renews_factors,
            on_stale=self._discard_stale,
            timed=self._factor_compute,
            loss_scale=self._loss_scale,
            is_last=self._is_last_pass,
            on_gradient=self._on_gradient if self.config.overlap_factors else None,
            captured_share=self._captured_share,
        )

    def _on_gradient(self, layer: int, complete: bool) -> None:
        self._factor_update.on_gradient(layer, complete)

    def _loss_scale(self) -> float | Tensor:
        if self._scaler is None or self._overflow is None:
            return 1.0
        return self._scaler.get_scale() if self._factors.batched is None else self._overflow.scale()

    @contextmanager
    def _factor_compute(self, layer: int) -> Iterator[None]:
        with self._timer.phase(Phase.FACTOR_COMPUTE), self._timer.layer(self.shapes[layer].name):
            yield

    def _update_factors(self) -> None:
        if self._capture.has_changed() and not self._named_order:
            self._named_order = True
            self._pending_warnings.append(
                "K-FAC: weights have changed between the backward pass and step(): call kfac.step() before "
                "optimizer.step(), which otherwise takes plain gradients"
            )
        captured = any(each.shares() is not None for each in self._capture.statistics)
        self._pending_warnings += self._progress.of_eval(captured=captured, in_eval=self._capture.in_eval)
        self._pending_warnings += self._capture.loss_terms.warnings()
        decay = decay_at(self.config.factor_decay, self.steps, self._steps_per_epoch)
        self._factor_update.run(decay, self._gradients.raw[0])

    def _update_second_order(self) -> None:
        second_order = self._second_order
        known_failures = len(self.failures)
        with self._timer.phase(Phase.INVERSE_COMM):
            second_order.exchange_means(self._factors.running)
        with self._timer.phase(Phase.INVERSE_COMPUTE):
            counts = second_order.solve(self._factors, self.damping, self.steps, self._timer.layer)
            for (layer, kind), count in counts.items():
                if count.refused:
                    second_order.report(layer, kind, self.steps, f"{count.refused} updates were not finite")
                    self._factors.refused[layer, kind].zero_()
        with self._timer.phase(Phase.INVERSE_COMM):
            second_order.exchange()
        self._must_solve = False
        self._solved_at = self.steps, self.damping
        self._pending_warnings += [str(failure) for failure in self.failures[known_failures:]]
        if self._check_statistics and not self._undecided.overflows_now():  # else there are none
            self._check_statistics = False
            taken = {key: count.taken for key, count in counts.items()}
            self._pending_warnings += missing_statistics(taken, self.shapes, self.failures, self.steps)

    def _warn(self) -> None:
        """Last in a step: a filter may turn a warning into an error, and other ranks would hang."""
        messages, self._pending_warnings = self._pending_warnings, []
        for message in messages:
            warnings.warn(message, RuntimeWarning, stacklevel=4)  # where step() was called

    def _precondition(self) -> None:
        gradients = self._gradients
        with self._timer.phase(Phase.PRECONDITION):
            self._second_order.precondition(
                gradients.own, gradients.raw, self.damping, gradients.preconditioned, self._timer.layer
            )
        with self._timer.phase(Phase.PRECONDITION_COMM):
            gradients.exchange()
        with self._timer.phase(Phase.SCALE):
            if self.config.grafting or self.config.fixed_norm is not None:
                gradients.graft(self.config.fixed_norm)
            elif self.config.kl_clip is not None:
                kl_clip = value_at(self.config.kl_clip, self.steps, self._steps_per_epoch)
                gradients.clip(self._rates(self._layers), kl_clip)
            if self._scaler is None:
                gradients.drop_unless_finite(self._model.parameters())
            gradients.write()


class _FactorUpdate:
    """The factor phases of a step: statistics are packed, exchanged, and averaged into the factors.

    Ranks exchange bucket after bucket in the same order, and a rank that fails has to send its share all the
    same, or the others wait for it forever.
    """

    def __init__(
        self, factors: Factors, capture: Capture, communicator: Communicator, timer: PhaseTimer
    ) -> None:
        self._factors, self._capture = factors, capture
        self._communicator, self._timer = communicator, timer

    def on_gradient(self, layer: int, complete: bool) -> None:
        """Send what a layer's backward pass completed, while that of the layers before it goes on."""
        with self._timer.phase(Phase.FACTOR_COMPUTE):
            packed = self._factors.on_gradient(layer, self._capture.statistics, complete=complete)
        if packed:
            with self._timer.phase(Phase.FACTOR_COMM):
                self._factors.send()

    def run(self, decay: float, like: Tensor) -> None:
        """Exchange the statistics, and average them into the factors.

        Args:
            decay: weight of the old factors.
            like: dtype and device of the gradients.
        """
        self._factors.decay = decay
        try:
            with self._timer.phase(Phase.FACTOR_COMM):
                self._capture.join_ties(like, self._communicator.all_reduce)
            self.send()
            self._average()
        finally:
            self.discard()

    def send(self) -> None:
        """Send all buckets; after an error the remaining ones without this rank's statistics."""
        try:
            self._pack_and_send()
        except BaseException:
            self._capture.clear()
            self._pack_and_send()
            raise

    def discard(self) -> None:
        """Leave no statistics to the next step; after an error, also receive and drop what others sent."""
        self._capture.clear()
        self.forget_backward_passes()

    def forget_backward_passes(self) -> None:
        """Drop their statistics, and what was sent of them; the forward pass that goes on counts."""
        self._capture.forget_backward_passes()
        with self._timer.phase(Phase.FACTOR_COMM):
            self._factors.discard()

    def _pack_and_send(self) -> None:
        packed_all = False
        while not packed_all:
            with self._timer.phase(Phase.FACTOR_COMPUTE):
                packed_all = self._factors.pack(self._capture.statistics)
            with self._timer.phase(Phase.FACTOR_COMM):
                self._factors.send()

    def _average(self) -> None:
        with self._timer.phase(Phase.FACTOR_COMPUTE):
            self._factors.accumulate_local(self._capture.statistics)
        received_all = False
        while not received_all:
            with self._timer.phase(Phase.FACTOR_COMM):
                received_all = self._factors.receive()
            with self._timer.phase(Phase.FACTOR_COMPUTE):
                self._factors.accumulate_received(self._capture.statistics)
