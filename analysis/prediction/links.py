"""Laws of exchanges, fitted to what a study measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.prediction.arms import Arm
from analysis.prediction.errors import PredictionError
from analysis.prediction.laws import Law, Row, fit_law, rounds, wire_bytes
from analysis.prediction.loads import Exchanged, RankLoads
from analysis.prediction.work import Exchange, Operation
from kfac_core.phases import Phase

OPERATIONS: tuple[Operation, ...] = ("all_reduce", "reduce_parts", "gather_parts")


@dataclass(frozen=True)
class Links:
    """The law of every operation: seconds of consecutive messages, and of bytes on the busiest wire.

    Attributes:
        known: the largest world that was measured, from which messages grow.
    """

    laws: Mapping[Operation, Law]
    algorithm: str
    known: int
    source: str

    def law(self, operation: Operation) -> Law:
        """The law of an operation.

        Raises:
            PredictionError: no exchange was measured.
        """
        if operation not in self.laws:
            raise PredictionError(f"no exchange was measured on two ranks or more ({operation})")
        return self.laws[operation]


def link_law(
    algorithm: str, operation: Operation, ranks: int, seconds: float, seconds_per_byte: float
) -> Law:
    """The law of an operation from its published or fitted line at one world size.

    Args:
        algorithm: the communication library, `gloo` or `nccl`.
        operation: of which all parts are equally large.
        ranks: the world size.
        seconds: of a message.
        seconds_per_byte: of the whole buffer.
    """
    parts = 1 if operation == "all_reduce" else ranks
    exchange = Exchange(Phase.GRADIENT_COMM, operation, tuple(range(ranks)), (1,) * parts, 1)
    return Law(
        (
            seconds / rounds(algorithm, operation, ranks),
            seconds_per_byte * parts / wire_bytes(algorithm, exchange),
        )
    )


def fit_links(arms: Sequence[Arm], algorithm: str, world_sizes: Sequence[int]) -> Links:
    """Links from the exchanges of all arms in these worlds.

    Operations have a law each where their exchanges tell latency from bandwidth, else one together. Without
    that, all time is bandwidth's, and latency an alternative. What overlaps with the backward pass shows only
    the part that was not hidden, so it counts only if nothing else was exchanged.
    """
    whole: dict[Operation, list[Row]] = defaultdict(list)
    partial: list[Row] = []
    known = max(world_sizes, default=1)
    for arm in arms:
        for size in world_sizes:
            if size > 1 and size in arm.worlds:
                for one, seconds in measured_exchanges(arm, size, algorithm, known):
                    row = (*one.terms(), seconds)
                    is_partial = is_overlapped(arm) and one.phase == Phase.GRADIENT_COMM
                    (partial if is_partial else whole[one.operation]).append(row)
    together = fit_law([row for rows in whole.values() for row in rows] or partial)
    laws: dict[Operation, Law] = {}
    for operation in OPERATIONS if together is not None else ():
        own = fit_law(whole[operation])
        law = together if own is None or own.alternatives else own
        assert law is not None  # noqa: S101  the loop is empty without one
        laws[operation] = law
    return Links(laws, algorithm, known, "its measured exchanges")


def measured_exchanges(
    arm: Arm, world_size: int, algorithm: str, known: int
) -> list[tuple[Exchanged, float]]:
    """Exchanges of a measured world with their seconds a step.

    A phase of two operations is left out: its seconds belong to neither.
    """
    exchanged = RankLoads(arm.setup(world_size), algorithm, known).exchanged
    transfers = arm.worlds[world_size].transfers
    several = [one.phase for one in exchanged]
    return [
        (one, transfers[one.phase])
        for one in exchanged
        if several.count(one.phase) == 1 and transfers.get(one.phase, 0) > 0
    ]


def is_overlapped(arm: Arm) -> bool:
    """Whether gradients are exchanged during the backward pass, so that their phase is only the rest."""
    return arm.training.gradient_averaging == "overlapped"
