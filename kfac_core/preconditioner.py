"""K-FAC in front of any optimizer: the phases of a step, in order, on one page."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from kfac_core.capture import Capture, full_precision, is_heard
from kfac_core.collectives import Communicator, connect
from kfac_core.config import KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.factors import Factors
from kfac_core.gradients import Gradients, all_finite
from kfac_core.layers import find_layers, plain_modules
from kfac_core.placement import Placement
from kfac_core.placement.cost import CostModel
from kfac_core.placement.footprint import state_bytes
from kfac_core.placement.strategies import place
from kfac_core.schedule import interval_at, value_at
from kfac_core.second_order import Failure, SecondOrder
from kfac_core.state import gather_state, restore_shard, restore_state, state_shard
from kfac_core.timing.phases import Phase
from kfac_core.timing.timer import PhaseTimer
from kfac_core.wrappers import LearningRate, forget_compiled, read_lr, unwrap


class KFAC:
    """Replaces the gradients of supported layers by F^-1 times the gradient, F Kronecker-factored.

    Call `step()` after the gradients are averaged over ranks (and unscaled, under a GradScaler) and before
    the optimizer's own step. Layers of other kinds keep their averaged gradient. All ranks make theirs at the
    same time.

    Args:
        model: the model, also wrapped in DistributedDataParallel or compiled by torch.compile.
        config: hyperparameters and distribution strategy.
        lr: the learning rate that kl-clip bounds the step with: a number, a callable without arguments, or
            the optimizer whose first parameter group has it.
        steps_per_epoch: needed by schedules that count in epochs.
        grad_scaler: the GradScaler that scales the loss; a step that overflowed is skipped whole.
        cost: what placing knows of the machine; None is `config.costs`, and without them n^3.
        timer: books the time and traffic of each phase; a fresh one by default.
        process_group: the ranks that share their gradients and the work; by default those of the model's
            DistributedDataParallel wrapper, else torch.distributed's world, else this process alone.
        communicator: carries the traffic in the place of torch.distributed.

    Attributes:
        placement: who computes what; `print(kfac.placement)` draws the grid of the KAISA paper.
        steps: steps taken so far, skipped ones not counted.
        skipped_steps: steps that overflowed under the GradScaler.
        plain_modules: modules with trained parameters that K-FAC leaves alone; logged once.

    Raises:
        ConfigError: the model has no layer that K-FAC supports, or all of them are skipped; a schedule in
            epochs lacks `steps_per_epoch`; this rank is no member of the process group.
        PlacementError: the strategy cannot divide this world.

    Source: Pauloski et al., "Convolutional neural network training with distributed K-FAC", SC20;
    Pauloski et al., "KAISA", SC21; Zhang et al., "Scalable K-FAC training with distributed preconditioning".
    """

    def __init__(
        self,
        model: nn.Module,
        config: KFACConfig | None = None,
        *,
        lr: LearningRate,
        steps_per_epoch: int | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        cost: CostModel | None = None,
        timer: PhaseTimer | None = None,
        process_group: dist.ProcessGroup | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self.config = config if config is not None else KFACConfig()
        self.steps = self.skipped_steps = 0
        self._lr = read_lr(lr)
        self._steps_per_epoch = steps_per_epoch
        self._check_schedules()
        self._scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self._timer = timer if timer is not None else PhaseTimer()
        bare, self._wrapper = unwrap(model)
        forget_compiled()
        ddp_group = self._wrapper.process_group if self._wrapper is not None else None
        self._communicator = communicator if communicator is not None else connect(process_group or ddp_group)
        self._timer.count(self._communicator.traffic)
        self._model = bare
        self._layers = find_layers(bare, self.config)
        if not self._layers:
            raise ConfigError(f"{type(bare).__name__} has no trained layer that K-FAC supports and may take")
        self.plain_modules = plain_modules(bare, self._layers)
        if self.plain_modules:
            logging.getLogger(__name__).info("plain gradients: %s", ", ".join(self.plain_modules))
        self.shapes = [layer.shape for layer in self._layers]
        self.placement: Placement = place(self.config, self.shapes, self._communicator.world_size, cost)
        dtype = reduce(torch.promote_types, (layer.weight.dtype for layer in self._layers), torch.float32)
        like = self._layers[0].weight.new_empty(0, dtype=dtype)
        self._communicator.prepare(self.placement.groups, like)
        arguments = self.shapes, self.placement, self._communicator, self.config, like
        self._factors = Factors(*arguments)
        self._second_order = SecondOrder(*arguments)
        self._gradients = Gradients(self._layers, self.placement, self._communicator, like)
        self._warn_of_others()  # raised as an error, it leaves no rank waiting and no hook
        self._capture = self._listen(like.dtype)
        self._must_solve = self._paused = False
        self._unheard = {(job.layer, job.kind) for job in self._second_order.own}
        self._unsaid: list[str] = []

    @torch.no_grad()
    def step(self) -> None:
        """Precondition the gradients in place; on update steps renew factors and second-order data first."""
        with self._timer.phase(Phase.PRECONDITION):
            self._gradients.read()
        if self._scaler is not None and not all_finite(self._model.parameters()):
            self.discard()
            self.skipped_steps += 1
            return
        with full_precision(self._gradients.raw[0]):  # also for who calls this inside autocast
            if self._due("factor_update_steps"):
                self._update_factors()
            if self._due("inverse_update_steps") or self._must_solve:
                self._update_second_order()
            self._precondition()
        self.steps += 1
        self._warn()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied: a model's copy would share the hooks of the original."""
        raise TypeError("KFAC listens to one model: make another for a copy, and load_state_dict() into it")

    def discard(self) -> None:
        """Drop the batch whose backward pass is over, as when its gradients are thrown away.

        Under `overlap_factors`, which may have sent some of it already, every rank has to call this.
        """
        try:
            if self.config.overlap_factors:
                self._send_factors()
        finally:
            self._forget_factors()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes in here leave no statistics: a gradient penalty's, a probe's, `torch.func`'s."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def failures(self) -> list[Failure]:
        """Factors that could not be used on this rank, each with layer, step and reason; oldest first."""
        return self._second_order.failures

    @property
    def damping(self) -> float:
        """The damping in force at the next step."""
        return value_at(self.config.damping, self.steps, self._steps_per_epoch)

    def memory(self, rank: int | None = None) -> dict[str, int]:
        """Bytes of K-FAC state by kind, on this rank or any other: it follows from the placement.

        Returns:
            `factors`: running means; `second_order`: eigen data or inverses; `gradients`: the two flat
            gradient buffers; `statistics`: sums that live from a backward pass to the end of a factor step.
            Not in it: what a process keeps once, scratch memory of its largest factor (of 65,536 elements
            if that is smaller and ranks share a host) and 6 n^2 bytes of index tables for each size
            n <= 320 that travels.
        """
        own = self._communicator.rank if rank is None else rank
        return state_bytes(
            self.placement, self.shapes, self.config, own, self._gradients.raw[0].element_size()
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bitwise, the same on every rank, on the CPU; every rank must call it."""
        return gather_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, also on another world size, strategy or solver.

        Factors move to their new owners. With another solver the second-order data is solved anew. Under
        `overlap_factors` every rank has to call this, for what is on its way (`discard`).

        Raises:
            ConfigError: the state is of other layers.
        """
        restore_state(self, state)

    def state_shard(self) -> dict[str, Any]:
        """This rank's part of the state, on the CPU; nothing travels, and the parts hold nothing twice.

        Only factors that several ranks keep (d_kfac, spd_kfac's small ones) are in each keeper's part.
        """
        return state_shard(self)

    def load_state_shard(self, shard: Mapping[str, Any]) -> None:
        """Go on bitwise in the world, strategy and solver of `shard`; every rank must call it.

        Elsewhere: `load_state_dict(kfac_core.state.merge_shards(shards))`.

        Raises:
            ConfigError: the shard is not this rank's.
        """
        restore_shard(self, shard)

    def remove(self) -> None:
        """Take K-FAC's hooks off the model."""
        self._capture.remove()

    def _due(self, interval: str) -> bool:
        steps = interval_at(getattr(self.config, interval), self.steps, self._steps_per_epoch)
        return self.steps % steps == 0

    def _listen(self, dtype: torch.dtype) -> Capture:
        placed, rank = self.placement.layers.values(), self._communicator.rank
        return Capture(
            self._layers,
            [index for index, layer in enumerate(placed) if rank in layer.factor_workers],
            {(job.layer, job.kind) for job in self._factors.jobs if rank not in job.whole_on},
            dtype,
            listening=lambda: not self._paused and self._due("factor_update_steps"),
            measured=self._computes_factors,
            loss_scale=lambda: self._scaler.get_scale() if self._scaler is not None else 1.0,
            is_last=lambda: bool(getattr(self._wrapper, "require_backward_grad_sync", True)),
            told=self._hear if self.config.overlap_factors else None,
        )

    @contextmanager
    def _computes_factors(self, layer: int) -> Iterator[None]:
        with self._timer.phase(Phase.FACTOR_COMPUTE), self._timer.layer(self.shapes[layer].name):
            yield

    def _hear(self, layer: int, complete: bool) -> None:
        with self._timer.phase(Phase.FACTOR_COMPUTE):
            ready = self._factors.hear(layer, self._capture.statistics, complete=complete)
        if ready:
            with self._timer.phase(Phase.FACTOR_COMM):
                self._factors.send()

    def _warn_of_others(self) -> None:
        """Says which layers another KFAC listens to; who made it may have lost it, so it is no error."""
        shared = [layer.shape.name for layer in self._layers if is_heard(layer.module)]
        if shared:
            warnings.warn(
                f"K-FAC: another KFAC still listens to {_few(shared)}: it takes time and memory in every "
                "step, and a gradient preconditioned by both is wrong; call its remove() when it is done",
                RuntimeWarning,
                stacklevel=3,  # where KFAC() was called
            )

    def _check_schedules(self) -> None:
        """A schedule that cannot be read is refused now, not by a hook in the first forward pass."""
        value_at(self.config.damping, self.steps, self._steps_per_epoch)
        for interval in ("factor_update_steps", "inverse_update_steps"):
            self._due(interval)

    def _update_factors(self) -> None:
        try:
            self._send_factors()
            self._absorb_factors()
        finally:
            self._forget_factors()

    def _forget_factors(self) -> None:
        """Leave nothing to the next step; after an error, that others have sent something too."""
        self._capture.clear()
        with self._timer.phase(Phase.FACTOR_COMM):
            self._factors.forget()

    def _send_factors(self) -> None:
        """Begin all that travels; after an error the others get theirs too, without this rank's rest."""
        try:
            self._pack_and_send()
        except BaseException:
            self._capture.clear()
            self._pack_and_send()
            raise

    def _pack_and_send(self) -> None:
        packed_all = False
        while not packed_all:
            with self._timer.phase(Phase.FACTOR_COMPUTE):
                packed_all = self._factors.pack(self._capture.statistics)
            with self._timer.phase(Phase.FACTOR_COMM):
                self._factors.send()

    def _absorb_factors(self) -> None:
        with self._timer.phase(Phase.FACTOR_COMPUTE):
            self._factors.absorb_alone(self._capture.statistics)
        received_all = False
        while not received_all:
            with self._timer.phase(Phase.FACTOR_COMM):
                received_all = self._factors.receive()
            with self._timer.phase(Phase.FACTOR_COMPUTE):
                self._factors.absorb_received(self._capture.statistics)

    def _update_second_order(self) -> None:
        factors, second_order = self._factors.running, self._second_order
        known = len(self.failures)
        with self._timer.phase(Phase.INVERSE_COMM):
            second_order.exchange_means(factors)
        with self._timer.phase(Phase.INVERSE_COMPUTE):
            second_order.solve(factors, self.damping, self.steps, self._timer.layer)
            for (layer, kind), refused in self._factors.refused.items():
                if refused:  # the solver has waited for the device already
                    second_order.report(layer, kind, self.steps, f"{int(refused)} updates were not finite")
                    refused.zero_()
        with self._timer.phase(Phase.INVERSE_COMM):
            second_order.exchange()
        self._must_solve = False
        self._unsaid += [str(failure) for failure in self.failures[known:]] + self._unheard_layers()

    def _warn(self) -> None:
        """Last of all in a step: as an error it would leave other ranks in an exchange."""
        messages, self._unsaid = self._unsaid, []
        for message in messages:
            warnings.warn(message, RuntimeWarning, stacklevel=4)  # where step() was called

    def _unheard_layers(self) -> list[str]:
        """Says once which layers no rank has had statistics of: they train as if without K-FAC."""
        updates = self._factors.updates
        unheard = {key for key in self._unheard if int(updates[key]) == 0}
        self._unheard = set()
        if not unheard or self.failures:
            return []
        names = sorted({self.shapes[layer].name for layer, _ in unheard})
        return [
            f"K-FAC: no statistics of {_few(names)} by step {self.steps}: a layer "
            "without part in training passes, or whose weight is used without a call of it, keeps its plain "
            "gradient's direction"
        ]

    def _precondition(self) -> None:
        gradients = self._gradients
        with self._timer.phase(Phase.PRECONDITION):
            self._second_order.precondition(
                gradients.own, gradients.raw, self.damping, gradients.preconditioned, self._timer.layer
            )
        with self._timer.phase(Phase.PRECONDITION_COMM):
            gradients.exchange()
        with self._timer.phase(Phase.SCALE):
            if self.config.kl_clip is not None:
                gradients.clip(self._lr(), self.config.kl_clip)
            gradients.write()


def _few(names: list[str]) -> str:
    """At most four layers, for people; one that is the whole model has no name."""
    return f"{', '.join(name or 'the model' for name in names[:4])}{' and others' if names[4:] else ''}"
