"""Seconds, bytes and memory of one arm at one world size: exact work over the measured speed of a machine."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from analysis.cost_model.calibration import Calibration
from analysis.cost_model.laws import Growth
from analysis.cost_model.work import Exchange, Operation, Setup, Work, imbalance
from kfac_core.placement import FactorShape, Ranks
from kfac_core.placement.cost import CostModel
from kfac_core.placement.footprint import kept_columns
from kfac_core.timing.phases import COMM_PHASES, Phase

_SIGMAS = 2.0  # of the calibration's residuals: about 95 % where they are normal
_BACKWARD = 2 / 3  # of a forward and backward pass: two products, the forward pass has one
_HIDEABLE = {Phase.GRADIENT_COMM: Phase.BACKWARD, Phase.FACTOR_COMM: Phase.FACTOR_COMPUTE}
_COPIES = 3  # of the parameters: weights, gradients and momentum


@dataclass(frozen=True)
class Seconds:
    """A prediction with its interval."""

    low: float
    central: float
    high: float

    def __add__(self, other: Seconds) -> Seconds:
        """Sum of the bounds and of the central values."""
        return Seconds(self.low + other.low, self.central + other.central, self.high + other.high)

    def __truediv__(self, number: float) -> Seconds:
        """Divide bounds and central value."""
        return Seconds(self.low / number, self.central / number, self.high / number)


ZERO = Seconds(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Prediction:
    """One arm at one world size.

    Attributes:
        event_seconds: by phase, per occurrence; communication hidden by compute is left out.
        step_seconds: by phase, amortised over its interval: the average per step.
        memory_bytes: by kind, on the rank with most; `activations` is an estimate.
        sent_bytes: by phase, per occurrence, on the rank that sends most.
        inverse_imbalance, precondition_imbalance: the slowest rank's load over the mean.
        extrapolated: the world is larger than any that the calibration measured.
    """

    setup: Setup
    calibration: Calibration
    event_seconds: Mapping[Phase, Seconds]
    step_seconds: Mapping[Phase, Seconds]
    memory_bytes: Mapping[str, int]
    sent_bytes: Mapping[Phase, int]
    inverse_imbalance: float
    precondition_imbalance: float

    @property
    def total(self) -> Seconds:
        """Seconds of a step, amortised."""
        total = ZERO
        for seconds in self.step_seconds.values():
            total = total + seconds
        return total

    @property
    def peak_bytes(self) -> int:
        """Memory of the rank with most."""
        return sum(self.memory_bytes.values())

    @property
    def extrapolated(self) -> bool:
        """Whether the world is larger than any measured one."""
        return self.setup.world_size > self.calibration.largest_world_size

    @property
    def largest_phase(self) -> Phase:
        """The phase with the largest share of a step."""
        return max(self.step_seconds, key=lambda phase: self.step_seconds[phase].central)


def predict(setup: Setup, calibration: Calibration, cost: CostModel | None = None) -> Prediction:
    """Predict one arm; without `cost` the placement is the one that the trainer uses.

    Raises:
        CostModelError: the calibration lacks the solver or an operation.
    """
    return priced(Work(setup, cost), calibration)


def priced(work: Work, calibration: Calibration) -> Prediction:
    """Predict one arm from its work, which is the same for every machine.

    Raises:
        CostModelError: the calibration lacks the solver or an operation.
    """
    setup = work.setup
    event = {**_compute(work, calibration), **_communication(work, calibration)}
    if setup.overlap:
        for comm, beside in _HIDEABLE.items():
            if comm in event and beside in event:
                event[comm] = _exposed(event[comm], event[beside])
    steps = {
        Phase.FACTOR_COMPUTE: setup.factor_update_steps, Phase.FACTOR_COMM: setup.factor_update_steps,
        Phase.INVERSE_COMPUTE: setup.inverse_update_steps, Phase.INVERSE_COMM: setup.inverse_update_steps,
    }  # fmt: skip
    ordered = {phase: event[phase] for phase in Phase if phase in event}
    return Prediction(
        setup,
        calibration,
        ordered,
        {phase: seconds / steps.get(phase, 1) for phase, seconds in ordered.items()},
        _memory(work),
        _sent(work),
        imbalance([sum(count * s.blocks * s.dim**3 for s, count in own.items()) for own in work.inverses]),
        imbalance(work.precondition_flops),
    )


def _compute(work: Work, calibration: Calibration) -> dict[Phase, Seconds]:
    setup, model = work.setup, work.setup.model
    facts = calibration.models.get(model.name, {})
    share = setup.local_batch_size / facts["local_batch_size"] if facts else 1.0
    if "forward_backward_seconds" in facts:
        training = _within(share * facts["forward_backward_seconds"], 0.0)
    else:
        parts = setup.micro_batches
        flops = 3 * setup.local_batch_size * model.forward_flops / parts
        training = _within(parts * calibration.training.at(flops), calibration.training.relative_error)
    rate = calibration.bytes_per_second
    update = _within(5 * setup.item_bytes * model.parameters / rate, 0.0)  # momentum SGD: 3 reads, 2 writes
    found = {
        Phase.FORWARD: training / (1 / (1 - _BACKWARD)),
        Phase.BACKWARD: training / (1 / _BACKWARD),
        Phase.UPDATE: update,
    }
    if setup.config is None or work.placement is None:
        return found
    gradients = setup.item_bytes * sum(shape.gradient_elements for shape in model.shapes)
    curve = calibration.decomposition(setup.config.solver)
    solve = max(
        math.fsum(count * _decompositions(shape) * curve.at(shape.dim) for shape, count in own.items())
        for own in work.inverses
    )
    return {
        **found,
        Phase.FACTOR_COMPUTE: _factors(work, calibration, share),
        Phase.INVERSE_COMPUTE: _within(solve, curve.relative_error),
        Phase.PRECONDITION: _products(work, calibration) + _within(2 * gradients / rate, 0.0),
        Phase.SCALE: _within(7 * gradients / rate, 0.0),  # a dot, a scaling, writing back
    }


def _factors(work: Work, calibration: Calibration, share: float) -> Seconds:
    """On the slowest rank: grams of each micro-batch that makes factors, and updates of running means."""
    setup, curve = work.setup, calibration.factor
    parts = setup.micro_batches
    captured = parts if setup.factor_micro_batches is None else setup.factor_micro_batches
    rows = [layer.positions * setup.local_batch_size / parts for layer in work.layers]
    by_job = [
        (job.factor_workers, captured * curve.at(2 * rows[job.layer] * job.shape.elements))
        for job in work.jobs
    ]
    slowest = max(work.spread(by_job))
    known = calibration.models.get(setup.model.name, {}).get("factor_seconds")
    if known is not None:  # measured with all layers on one rank; this is the rank's share
        everything = math.fsum(seconds for _, seconds in by_job)
        return _within(captured / parts * share * known * slowest / everything, 0.0)
    running = 6 * max(work.state_bytes["factors"]) / calibration.bytes_per_second
    return _within(slowest, curve.relative_error) + _within(running, 0.0)


def _products(work: Work, calibration: Calibration) -> Seconds:
    setup, placement, curve = work.setup, work.placement, calibration.gemm
    assert setup.config is not None  # noqa: S101  only called with K-FAC
    assert placement is not None  # noqa: S101  likewise
    config = setup.config
    times = 2 if config.solver == "eigen" else 1
    slowest = max(
        work.spread(
            (
                placement.layers[shape.name].gradient_workers,
                times
                * sum(
                    curve.at(2 * shape.gradient_elements * kept_columns(config, factor))
                    for factor in (shape.a, shape.g)
                ),
            )
            for shape in setup.shapes
        )
    )
    return _within(slowest, curve.relative_error)


def _communication(work: Work, calibration: Calibration) -> dict[Phase, Seconds]:
    """Exchanges of one phase are sequential, but those of different columns run concurrently."""
    by_operation: dict[tuple[Phase, Operation], dict[Ranks, Seconds]] = defaultdict(dict)
    for exchange in work.exchanges:
        by_group = by_operation[exchange.phase, exchange.operation]
        before = by_group.get(exchange.group, ZERO)
        by_group[exchange.group] = before + _exchange(exchange, calibration)
    found: dict[Phase, Seconds] = {}
    for (phase, _), by_group in by_operation.items():
        slowest = max(by_group.values(), key=lambda seconds: seconds.central)
        found[phase] = found.get(phase, ZERO) + slowest
    return found


def _exchange(exchange: Exchange, calibration: Calibration) -> Seconds:
    link = calibration.link(exchange)
    growths: tuple[Growth, ...] = ("low", "central", "high")
    each = [link.seconds(exchange, calibration.algorithm, growth) for growth in growths]
    spread = math.exp(_SIGMAS * link.relative_error)
    return Seconds(min(each) / spread, each[1], max(each) * spread)


def _exposed(comm: Seconds, compute: Seconds) -> Seconds:
    """The exposed part of communication that overlaps with `compute`."""
    return Seconds(
        max(0.0, comm.low - compute.high),
        max(0.0, comm.central - compute.central),
        max(0.0, comm.high - compute.low),
    )


def _within(seconds: float, relative_error: float) -> Seconds:
    spread = math.exp(_SIGMAS * relative_error)
    return Seconds(seconds / spread, seconds, seconds * spread)


def _memory(work: Work) -> dict[str, int]:
    setup, item = work.setup, work.setup.item_bytes
    memory = {
        "model": _COPIES * item * setup.model.parameters,
        # Every layer's output and what the following function saves; close to measured networks.
        "activations": 2 * item * setup.local_batch_size * setup.model.activations // setup.micro_batches,
    }
    if setup.config is None:
        return memory
    by_rank = [sum(kinds) for kinds in zip(*work.state_bytes.values(), strict=True)]
    largest = max(range(work.world_size), key=by_rank.__getitem__)
    memory |= {f"kfac_{kind}": counts[largest] for kind, counts in work.state_bytes.items()}
    memory["kfac_exchange"] = sum(e.total_bytes for e in work.exchanges if e.phase == Phase.FACTOR_COMM)
    return memory


def _sent(work: Work) -> dict[Phase, int]:
    """Bytes of the busiest rank; the owner of a part sends it."""
    sent: dict[Phase, Counter[Ranks]] = defaultdict(Counter)
    for exchange in work.exchanges:
        own = max(exchange.sizes) if exchange.operation == "gather_parts" else exchange.total_bytes
        sent[exchange.phase][exchange.group] += own
    return {phase: max(sent[phase].values()) for phase in COMM_PHASES if phase in sent}


def _decompositions(shape: FactorShape) -> int:
    """Decompositions of a factor; the blocks of a diagonal are inverted together."""
    return shape.blocks if shape.dim > 1 else 1
