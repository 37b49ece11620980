"""The laws of one arm, fitted to its measured worlds; its phases at any other world size.

Work that a placement does not change is as on the largest measured world, or grows with the local batch.
Work that it does change follows the load of the busiest rank. Exchanges follow the links, corrected by what
this arm's own took longer or shorter: a training loop's ranks are later at an exchange than a benchmark's,
which costs time per message and not per byte, and a backward pass hides a constant part. Ranks wait for the
latest of them: the expected delay of the latest of P equal ranks, in standard deviations, is Blom's
approximation of the expected maximum of P normal values (Blom 1958, Statistical Estimates, section 6.9).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import NormalDist

from analysis.prediction.arms import Arm, World
from analysis.prediction.laws import Law, Row, Seconds, Terms, fit_law
from analysis.prediction.links import Links, is_overlapped
from analysis.prediction.loads import PER_RANK, RankLoads
from analysis.prediction.work import Operation, Work
from kfac_core.config import KFACConfig
from kfac_core.phases import COMM_PHASES, Phase

WAITING = "waiting"
"""The pseudo-phase of time in which ranks wait for the latest of them."""

_BATCHES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)


@dataclass(frozen=True)
class _Correction:
    """What an arm's exchanges took beside their link's law: see the module's docstring.

    Attributes:
        late: seconds a message.
        hidden: seconds a step that the backward pass hides.
        scale: factor of a phase that is faster than the law.
    """

    late: float = 0.0
    hidden: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class FittedArm:
    """The laws of an arm.

    Attributes:
        worlds: those that the laws are fitted to.
        laws: of phases that grow with the batch or with a rank's load.
        constants: seconds a step of the other phases that compute.
        other_bytes: peak memory of a rank beside K-FAC's state, on the worlds where it is known.
        corrections: of the links' laws.
        waiting: seconds a step on the largest world of `worlds`.
    """

    arm: Arm
    links: Links
    worlds: tuple[int, ...]
    laws: Mapping[Phase, Law]
    constants: Mapping[str, float]
    other_bytes: Mapping[int, float]
    corrections: Mapping[tuple[Phase, Operation], _Correction]
    waiting: float = 0.0

    def phases(self, world_size: int, config: KFACConfig | None = None) -> dict[str, Seconds]:
        """Seconds a step by phase, with the bounds that the laws leave open.

        Raises:
            PredictionError: the exchanges of such a world are unknown.
            PlacementError: the strategy does not support this world size.
        """
        loads = RankLoads(self.arm.setup(world_size, config), self.links.algorithm, self.links.known)
        found = {str(phase): Seconds(value, value, value) for phase, value in self.constants.items()}
        for phase, law in self.laws.items():
            found[phase] = _slowest(law, loads.of(phase))
        for one in loads.exchanged:
            law = self.links.law(one.operation)
            fix = self.corrections.get((one.phase, one.operation), _Correction())
            low, central, high = (
                max(0.0, fix.scale * (seconds + fix.late * messages) - fix.hidden)
                for seconds, messages in (
                    (law.bounds(one.terms("low"))[0], one.messages["low"]),
                    (law.at(one.terms()), one.messages["central"]),
                    (law.bounds(one.terms("high"))[1], one.messages["high"]),
                )
            )
            before = found.get(one.phase, Seconds(0.0, 0.0, 0.0))
            found[one.phase] = Seconds.sum((before, Seconds(low, central, high)))
        found[WAITING] = self._waiting(world_size)
        return found

    def peak_bytes(self, world_size: int, config: KFACConfig | None = None) -> float:
        """Peak memory of the rank that needs most; NaN if it is known of no world.

        That of the nearest world, with the K-FAC state that the placement gives the fullest rank. Everything
        else counts as on the nearest world, so with a fixed global batch it is too much for larger worlds,
        whose ranks hold fewer examples.
        """
        if not self.other_bytes:
            return math.nan
        nearest = min(self.other_bytes, key=lambda size: (abs(math.log2(size / world_size)), -size))
        return self.other_bytes[nearest] + Work(self.arm.setup(world_size, config)).largest_state

    def _waiting(self, world_size: int) -> Seconds:
        known = max(self.worlds)
        if self.waiting <= 0 or known == 1 or world_size == 1:
            value = 0.0 if world_size == 1 else min(self.waiting, 0.0)
            return Seconds(value, value, value)
        growth = latest(world_size) / latest(known)
        low, high = sorted((self.waiting, self.waiting * growth**2))
        return Seconds(low, self.waiting * growth, high)


def fit_arm(arm: Arm, links: Links, world_sizes: Collection[int]) -> FittedArm | None:
    """The laws of an arm from its worlds of these sizes; None if it has none."""
    worlds = tuple(sorted(size for size in arm.worlds if size in world_sizes))
    if not worlds:
        return None
    loads = {size: RankLoads(arm.setup(size), links.algorithm, links.known) for size in worlds}
    laws = _laws(arm, loads)
    largest = arm.worlds[worlds[-1]]
    constants = {phase: _mean(seconds) for phase, seconds in largest.ranks.items() if phase not in laws}
    peaks = {size: arm.worlds[size].peak_bytes - loads[size].work.largest_state for size in worlds}
    known = {size: peak for size, peak in peaks.items() if not math.isnan(peak)}
    corrections = _corrections(arm, links, loads)
    return FittedArm(arm, links, worlds, laws, constants, known, corrections, waited(largest))


def latest(ranks: int) -> float:
    """The expected maximum of so many standard normal values."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def _laws(arm: Arm, loads: Mapping[int, RankLoads]) -> dict[Phase, Law]:
    """Scaled so that they give back the largest world, whose ranks share their hosts most."""
    largest, found = max(loads), {}
    for phase in (*_BATCHES, *(PER_RANK if arm.config is not None else ())):
        rows: list[Row] = []
        for size, own in loads.items():
            seconds = arm.worlds[size].ranks.get(phase, ())
            if phase not in PER_RANK:
                seconds = (_mean(seconds),) if seconds else ()
            rows += [(*terms, t) for terms, t in zip(own.of(phase), seconds, strict=False)]
        law = fit_law(rows)
        if law is not None:
            fitted = _slowest(law, loads[largest].of(phase)).central
            seconds_there = _busiest(arm.worlds[largest], phase)
            found[phase] = law * (seconds_there / fitted if fitted > 0 and seconds_there > 0 else 1.0)
    return found


def _corrections(
    arm: Arm, links: Links, loads: Mapping[int, RankLoads]
) -> dict[tuple[Phase, Operation], _Correction]:
    rows: dict[tuple[Phase, Operation], list[tuple[float, float, float]]] = {}
    for size, own in loads.items():
        transfers, exchanged = arm.worlds[size].transfers, own.exchanged
        for one in exchanged:
            together = sum(links.law(o.operation).at(o.terms()) for o in exchanged if o.phase == one.phase)
            seconds = links.law(one.operation).at(one.terms())
            if one.phase in transfers and together > 0:
                measured = transfers[one.phase] * seconds / together
                rows.setdefault((one.phase, one.operation), []).append(
                    (one.messages["central"], seconds, measured)
                )
    return {key: _correction(key[0], is_overlapped(arm), own) for key, own in rows.items()}


def _correction(phase: Phase, overlapped: bool, rows: list[tuple[float, float, float]]) -> _Correction:
    excess = sum(messages * (measured - seconds) for messages, seconds, measured in rows)
    if excess >= 0:
        return _Correction(late=excess / sum(messages**2 for messages, _, _ in rows))
    if phase == Phase.GRADIENT_COMM and overlapped:
        return _Correction(hidden=_mean([seconds - measured for _, seconds, measured in rows]))
    return _Correction(
        scale=sum(seconds * measured for _, seconds, measured in rows)
        / sum(seconds**2 for _, seconds, _ in rows)
    )


def waited(world: World) -> float:
    """What remains of a step beside the busiest rank's work and the transfers."""
    work = sum(_busiest(world, phase) for phase in world.ranks)
    moved = sum(world.transfers.get(phase, 0.0) for phase in COMM_PHASES)
    return world.seconds - work - moved


def _busiest(world: World, phase: str) -> float:
    """Seconds of a phase: of the slowest rank where the placement decides, else of the mean rank."""
    seconds = world.ranks.get(phase, ())
    if not seconds:
        return 0.0
    return max(seconds) if phase in PER_RANK else _mean(seconds)


def _slowest(law: Law, terms: list[Terms]) -> Seconds:
    """Of ranks with these terms."""
    distinct = set(terms)
    bounds = [law.bounds(one) for one in distinct]
    return Seconds(max(low for low, _ in bounds), max(map(law.at, distinct)), max(high for _, high in bounds))


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)
