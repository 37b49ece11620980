"""What ranks have to do at a world size, and what they exchange: the terms of the laws."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from analysis.prediction.laws import Growth, Terms, rounds, wire_bytes
from analysis.prediction.work import Exchange, Operation, Setup, Work
from kfac_core.phases import Phase
from kfac_core.placement import FactorShape, Ranks

PER_RANK = (Phase.FACTOR_COMPUTE, Phase.INVERSE_COMPUTE, Phase.PRECONDITION)
"""Phases whose load depends on the rank."""


@dataclass(frozen=True)
class Exchanged:
    """One operation of a phase: what its busiest group of ranks sends, a step.

    Attributes:
        messages: consecutive messages, by how they grow with the ranks beyond the largest measured world.
        wire_bytes: of the busiest rank.
    """

    phase: Phase
    operation: Operation
    messages: dict[Growth, float]
    wire_bytes: float

    def terms(self, growth: Growth = "central") -> Terms:
        """The terms of a link's law."""
        return self.messages[growth], self.wire_bytes


class RankLoads:
    """The loads of an arm at a world size, amortised over its intervals.

    Args:
        known: the largest world whose exchanges were measured; growth is uncertain beyond it.
    """

    def __init__(self, setup: Setup, algorithm: str, known: int = 1) -> None:
        self.work = Work(setup)
        self._setup, self._algorithm, self._known = setup, algorithm, known

    def of(self, phase: Phase) -> list[Terms]:
        """By rank, the terms of a phase of `PER_RANK`; of any other a constant and the local batch."""
        if phase == Phase.FACTOR_COMPUTE:
            return self._factors
        if phase == Phase.INVERSE_COMPUTE:
            return self._inverses
        if phase == Phase.PRECONDITION:
            return self._products
        return [(1.0, float(self._setup.local_batch_size))]

    @cached_property
    def _factors(self) -> list[Terms]:
        """A constant, and examples times rows of an example, where known, times elements of factors."""
        steps, batch = self._setup.factor_update_steps, self._setup.local_batch_size
        rows = self._setup.network.positions or (1,) * len(self._setup.shapes)
        elements = self.work.spread(
            (job.factor_workers, rows[job.layer] * job.shape.elements) for job in self.work.jobs
        )
        return [(float(own > 0) / steps, batch * own / steps) for own in elements]

    @cached_property
    def _inverses(self) -> list[Terms]:
        """Decompositions, and the sum of n^3."""
        steps = self._setup.inverse_update_steps
        return [
            (
                sum(count * _decompositions(shape) for shape, count in own.items()) / steps,
                sum(count * shape.blocks * shape.dim**3 for shape, count in own.items()) / steps,
            )
            for own in self.work.inverses
        ]

    @cached_property
    def _products(self) -> list[Terms]:
        """Layers, and FLOPs."""
        placement = self.work.placement
        if placement is None:
            return [(0.0, 0.0)] * self.work.world_size
        shapes = self._setup.shapes
        layers = self.work.spread((placement.layers[s.name].gradient_workers, 1) for s in shapes)
        return [(float(n), float(f)) for n, f in zip(layers, self.work.precondition_flops, strict=True)]

    @cached_property
    def exchanged(self) -> list[Exchanged]:
        """Operations of all phases; groups of a phase exchange at the same time, so the busiest counts."""
        groups: dict[tuple[Phase, Operation], dict[Ranks, list[Exchange]]] = defaultdict(dict)
        for exchange in self.work.exchanges:
            groups[exchange.phase, exchange.operation].setdefault(exchange.group, []).append(exchange)
        found = []
        for (phase, operation), by_group in groups.items():
            each = [self._sum(phase, operation, exchanges) for exchanges in by_group.values()]
            found.append(max(each, key=lambda one: (one.wire_bytes, one.messages["central"])))
        return found

    def _sum(self, phase: Phase, operation: Operation, exchanges: list[Exchange]) -> Exchanged:
        growths: tuple[Growth, ...] = ("low", "central", "high")
        messages = dict.fromkeys(growths, 0.0)
        for exchange in exchanges:
            for growth in growths:
                ranks = len(exchange.group)
                messages[growth] += exchange.parts * self._rounds(operation, ranks, growth) / exchange.steps
        messages["low"], messages["high"] = min(messages.values()), max(messages.values())
        sent = sum(wire_bytes(self._algorithm, exchange) / exchange.steps for exchange in exchanges)
        return Exchanged(phase, operation, messages, sent)

    def _rounds(self, operation: Operation, ranks: int, growth: Growth) -> float:
        """Rounds; up to the largest measured world they are as measured, whatever their growth beyond it."""
        known = min(ranks, max(self._known, 2))
        ratio = rounds(self._algorithm, operation, ranks, growth) / rounds(
            self._algorithm, operation, known, growth
        )
        return rounds(self._algorithm, operation, known) * ratio


def _decompositions(shape: FactorShape) -> int:
    """Decompositions of a factor; the blocks of a diagonal are inverted together."""
    return shape.blocks if shape.dim > 1 else 1
