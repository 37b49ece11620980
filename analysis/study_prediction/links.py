"""Laws of a study's exchanges: from a calibration, or fitted to what the study measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from analysis.cost_model.calibration import Calibration, Link
from analysis.cost_model.errors import CostModelError
from analysis.cost_model.laws import rounds, wire_bytes
from analysis.cost_model.work import Exchange, Operation
from analysis.study_prediction.laws import Law, Row, fit_law
from analysis.study_prediction.loads import Exchanged, RankLoads
from analysis.study_prediction.measured import Arm
from kfac_core.timing.phases import Phase

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
            CostModelError: no exchange was measured.
        """
        if operation not in self.laws:
            raise CostModelError(f"no exchange was measured on two ranks or more ({operation})")
        return self.laws[operation]

    def at_speed(self, speed: float) -> Links:
        """Links of another bandwidth, over that of these; the time of a message stays."""
        laws = {operation: _faster(law, speed) for operation, law in self.laws.items()}
        return replace(self, laws=laws)


def _faster(law: Law, speed: float) -> Law:
    (message, per_byte), *others = law.coefficients, *law.alternatives
    return Law((message, per_byte / speed), tuple((a, b / speed) for a, b in others))


def from_calibration(machine: Calibration) -> Links:
    """The links between nodes, as `kronscale calibrate` measured them."""
    links = machine.links["between"]
    laws = {link.operation: _law(link, machine.algorithm) for link in links.values()}
    known = max(link.world_size for link in links.values())
    return Links(laws, machine.algorithm, known, f"calibration {machine.name}")


def _law(link: Link, algorithm: str) -> Law:
    ranks = link.world_size
    parts = 1 if link.operation == "all_reduce" else ranks
    exchange = Exchange(Phase.GRADIENT_COMM, link.operation, tuple(range(ranks)), (1,) * parts, 1)
    latency = link.latency_seconds / rounds(algorithm, link.operation, ranks)
    return Law((latency, link.seconds_per_byte * exchange.total_bytes / wire_bytes(algorithm, exchange)))


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
