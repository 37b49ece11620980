"""An iteration and the exchanges of our core and of two public K-FAC packages, with their phases timed.

The peers are plain checkouts, timed by wrapping their own methods; nothing of theirs is installed or copied.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.bench.peer_imports import imports_from
from harness.bench.replica import FACTOR_STEPS, INVERSE_STEPS, KINDS, Preconditioned, Training
from harness.calibrate import costs, decomposition_points
from kfac_core import KFACConfig
from kfac_core.config import Costs
from kfac_core.kernels.grams import Rows
from kfac_core.kernels.packing import packed
from kfac_core.timing.timer import PhaseTimer

DAMPING, LR, KL_CLIP = 0.003, 0.1, 0.001
OURS = {
    "factor_compute": "factor", "factor_comm": "factor_comm", "inverse_compute": "inverse",
    "inverse_comm": "inverse_comm", "precondition": "precondition",
    "precondition_comm": "precondition_comm", "scale": "scale",
}  # fmt: skip
Step = Callable[[str], dict[str, float]]
Exchanges = Callable[[], dict[str, Callable[[], None]]]
Factors = list[tuple[Tensor, Tensor]]


class Clock:
    """Exclusive seconds by phase of the methods that it wraps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    @contextmanager
    def _open(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - began
            self.seconds[phase] += whole - self._inner.pop()
            if self._inner:
                self._inner[-1] += whole

    def wrap(self, owner: type, phase: str, *names: str) -> None:
        """Count calls of these methods as `phase`, if `owner` itself defines them."""
        for name in names:
            if name in owner.__dict__ and name not in getattr(owner, "_wrapped", ()):
                setattr(owner, name, self.timed(phase, owner.__dict__[name]))

    def wrap_future(self, owner: type, phase: str, *names: str) -> None:
        """Count the time in which these properties wait as `phase`."""
        for name in names:
            found = owner.__dict__[name]
            setattr(owner, name, property(self.timed(phase, found.fget), found.fset))

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with its calls counted as `phase`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._open(phase):
                return function(*args, **kwargs)

        return timed


@dataclass(frozen=True)
class Arm:
    """One implementation: an iteration, and what can be run by itself.

    Attributes:
        exchanges: by name; called once after the iterations.
        factors: A and G of every layer, in the model's order.
        solving: given (A, G) of every layer, [n, n] each, what decomposes those that this rank inverts.
    """

    step: Step
    exchanges: Exchanges
    factors: Callable[[], Factors]
    solving: Callable[[Factors], Callable[[], None]]


def make_ours(training: Training, variant: str, _: Path) -> Arm:
    strategy, solver, *more = variant.split()
    config = KFACConfig(
        strategy=strategy, solver=solver, damping=DAMPING, kl_clip=KL_CLIP, overlap_factors="overlap" in more,
        costs=measured_costs(solver) if "measured" in more else None,
        assignment="balanced" if "balanced" in more else None,
    )  # fmt: skip
    subject = Preconditioned(training, config)

    def step(kind: str) -> dict[str, float]:
        seconds = subject.step(kind)
        return {"total": seconds["total"], **{OURS[p]: s for p, s in seconds.items() if p in OURS}}

    def exchanges() -> dict[str, Callable[[], None]]:
        kfac, capture = subject.kfac, subject.kfac._capture
        kfac.steps = 0
        leaving, capture._packed_early = capture._packed_early, ()
        training.loss().backward()
        by_kind = [dict(zip("ag", own.shares() or (), strict=False)) for own in capture.statistics]
        early = [by_kind[at][kind].gram for at, kind in leaving if kind in by_kind[at]]  # as hooks find them
        kfac.discard()
        capture._packed_early = leaving
        training.loss().backward()
        statistics = capture.statistics

        def packed_too() -> None:
            for gram in early:
                if not isinstance(gram, Rows):
                    packed(gram)
            while not kfac._factors.pack(statistics):
                kfac._factors.send()
            kfac._factors.exchange()

        return {
            "factor": packed_too,
            "second-order": kfac._second_order.exchange,
            "gradient": kfac._gradients.exchange,
        }

    def solving(factors: Factors) -> Callable[[], None]:
        running = {
            (layer, kind): factor.unsqueeze(0)
            for layer, both in enumerate(factors)
            for kind, factor in zip("ag", both, strict=True)
        }
        given = SimpleNamespace(running=running, updates={}, refused={})
        return partial(subject.kfac._second_order.solve, given, DAMPING, 0, PhaseTimer().layer)

    def factors() -> Factors:
        running, layers = subject.kfac._factors.running, range(len(subject.kfac.shapes))
        return [(running[layer, "a"][0], running[layer, "g"][0]) for layer in layers]

    return Arm(step, exchanges, factors, solving)


def measured_costs(solver: str) -> Costs:
    """Costs of this machine, measured by rank 0: all ranks must place by the same numbers."""
    found = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        found = [costs(decomposition_points(torch.device("cpu"), solver))]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    assert found[0] is not None  # noqa: S101  rank 0 has sent it
    return found[0]


def make_gpauloski(training: Training, variant: str, checkout: Path) -> Arm:
    with imports_from(checkout):
        import kfac  # noqa: PLC0415  the peer's
        import kfac.preconditioner  # noqa: PLC0415
    clock, (strategy, method) = Clock(), variant.split()
    base, eigen, inverse = (
        kfac.layers.base.KFACBaseLayer, kfac.layers.eigen.KFACEigenLayer, kfac.layers.inverse.KFACInverseLayer
    )  # fmt: skip
    clock.wrap(
        base, "factor", "save_layer_input", "save_layer_grad_output", "update_a_factor", "update_g_factor"
    )
    clock.wrap(base, "factor_comm", "reduce_a_factor", "reduce_g_factor")
    clock.wrap(kfac.distributed.TorchDistributedCommunicator, "factor_comm", "flush_allreduce_buckets")
    clock.wrap_future(base, "factor_comm", "a_factor", "g_factor")
    clock.wrap_future(base, "precondition_comm", "grad")
    clock.wrap(base, "precondition_comm", "broadcast_grad")
    clock.wrap(base, "scale", "update_grad")
    for kind, held in ((eigen, ("qa", "qg", "da", "dg", "dgda")), (inverse, ("a_inv", "g_inv"))):
        clock.wrap_future(kind, "inverse_comm", *held)
        clock.wrap(kind, "inverse", "compute_a_inv", "compute_g_inv")
        clock.wrap(kind, "inverse_comm", "broadcast_a_inv", "broadcast_g_inv")
        clock.wrap(kind, "precondition", "preconditioned_grad")
    clock.wrap(kfac.base_preconditioner.BaseKFACPreconditioner, "scale", "_compute_grad_scale")
    enums = kfac.enums
    theirs = kfac.preconditioner.KFACPreconditioner(
        training.model, factor_update_steps=FACTOR_STEPS, inv_update_steps=INVERSE_STEPS, damping=DAMPING,
        factor_decay=0.95, kl_clip=KL_CLIP, lr=LR,
        grad_worker_fraction={
            "comm": enums.DistributedStrategy.COMM_OPT, "mem": enums.DistributedStrategy.MEM_OPT
        }[strategy],
        compute_method={"eigen": enums.ComputeMethod.EIGEN, "inverse": enums.ComputeMethod.INVERSE}[method],
    )  # fmt: skip

    def prepare(kind: str) -> None:
        theirs._steps = KINDS[kind]

    def exchanges() -> dict[str, Callable[[], None]]:
        who, layers = theirs._assignment, [*reversed(list(theirs._layers.values()))]
        workers = [(name, layer) for name, layer in layers if who.is_grad_worker(name)]
        held = ("qa", "qg", "da", "dg", "dgda") if method == "eigen" else ("a_inv", "g_inv")

        def factors() -> None:
            for name, layer in layers:
                layer.reduce_a_factor(who.factor_group(name, "A"))
                layer.reduce_g_factor(who.factor_group(name, "G"))
            theirs._tdc.flush_allreduce_buckets()
            _read(layers, "a_factor", "g_factor")

        def second_order() -> None:
            for name, layer in workers if who.broadcast_inverses() else ():
                group = who.grad_worker_group(name)
                layer.broadcast_a_inv(src=who.inv_worker(name, "A"), group=group)
                layer.broadcast_g_inv(src=who.inv_worker(name, "G"), group=group)
            _read(workers, *held)

        def gradients() -> None:
            for name, layer in layers if who.broadcast_gradients() else ():
                layer.broadcast_grad(src=who.src_grad_worker(name), group=who.grad_receiver_group(name))
            _read(layers, "grad")

        for _, layer in layers:
            layer.grad = layer.module.get_grad().clone()
        return {"factor": factors, "second-order": second_order, "gradient": gradients}

    def solving(factors: Factors) -> Callable[[], None]:
        layers = [layer for _, layer in theirs._layers.values()]
        for layer, (a, g) in zip(layers, factors, strict=True):
            layer.a_factor, layer.g_factor = a, g

        def solve() -> None:
            for layer in layers:
                layer.compute_a_inv(DAMPING)
                layer.compute_g_inv(DAMPING)

        return solve

    def factors() -> Factors:
        return [(layer.a_factor, layer.g_factor) for _, layer in theirs._layers.values()]

    return Arm(stepper(training, theirs, prepare, clock), exchanges, factors, solving)


def _read(layers: Iterable[tuple[str, Any]], *names: str) -> None:
    """Wait for pending collectives."""
    for _, layer in layers:
        for name in names:
            getattr(layer, name)


def make_lzhangbv(training: Training, variant: str, checkout: Path) -> Arm:
    with imports_from(checkout):
        import kfac  # noqa: PLC0415  the peer's
        import kfac.backend  # noqa: PLC0415
        import kfac.kfac_preconditioner_inv as computing  # noqa: PLC0415
    kfac.backend.init("Torch")
    clock, kind = Clock(), kfac.get_kfac_module(variant)
    for owner in kind.__mro__:
        clock.wrap(owner, "factor", "_compute_factors", "_forward_hook_event", "_backward_hook_event")
        clock.wrap(owner, "factor_comm", "_communicate_factors")
        clock.wrap(owner, "inverse", "_compute_inverse")
        clock.wrap(owner, "inverse_comm", "_communicate_inverse")
        clock.wrap(owner, "precondition", "_compute_pred")
        clock.wrap(owner, "precondition_comm", "_communicate_pred")
        clock.wrap(owner, "scale", "_update_grad_in_place")
    for name in ("ComputeA", "ComputeG"):
        compute = getattr(computing, name)()
        setattr(computing, name, partial(_given, clock.timed("factor", compute)))
    theirs = kind(
        training.model, lr=LR, damping=DAMPING, fac_update_freq=FACTOR_STEPS, kfac_update_freq=INVERSE_STEPS,
        kl_clip=KL_CLIP, factor_decay=0.05,
    )  # fmt: skip
    first = [True]

    def prepare(kind: str) -> None:
        theirs.steps = 0 if first[0] else {**KINDS, "full": INVERSE_STEPS}[kind]  # step 0 makes their buffers
        first[0] = False

    def exchanges() -> dict[str, Callable[[], None]]:
        found = {
            "factor": theirs._communicate_factors, "second-order": theirs._communicate_inverse,
            "gradient": theirs._communicate_pred,
        }  # fmt: skip
        return {k: f for k, f in found.items() if variant.endswith("dp") == (k == "gradient")}

    def solving(factors: Factors) -> Callable[[], None]:
        for module, (a, g) in zip(theirs.modules, factors, strict=True):
            theirs.m_A[module], theirs.m_G[module] = a, g
        return theirs._compute_inverse

    def factors() -> Factors:
        return [(theirs.m_A[module], theirs.m_G[module]) for module in theirs.modules]

    return Arm(stepper(training, theirs, prepare, clock), exchanges, factors, solving)


def _given(value: Any) -> Any:
    return value


MAKERS = {"ours": make_ours, "gpauloski": make_gpauloski, "lzhangbv": make_lzhangbv}


def stepper(training: Training, theirs: Any, prepare: Callable[[str], None], clock: Clock) -> Step:
    """An iteration, timed as in `Preconditioned.step`."""

    def step(kind: str) -> dict[str, float]:
        prepare(kind)
        training.synchronize()
        clock.seconds.clear()
        began = time.perf_counter()
        training.loss().backward()
        theirs.step()
        return {"total": time.perf_counter() - began, **clock.seconds}

    return step
