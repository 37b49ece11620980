"""Fits links to measurements, and the baselines that a prediction must beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from analysis.cost_model.calibration import Link
from analysis.cost_model.errors import CostModelError
from analysis.cost_model.laws import rounds, wire_bytes
from analysis.cost_model.work import Exchange, Operation
from kfac_core.timing.phases import Phase


@dataclass(frozen=True)
class Sample:
    """One measured operation of a communicator, its buffer divided evenly between the ranks.

    Attributes:
        total_bytes: of the buffer.
        seconds: of the slowest rank, the median over repeats.
    """

    operation: Operation
    world_size: int
    total_bytes: int
    seconds: float

    @property
    def exchange(self) -> Exchange:
        """The operation as an `Exchange` of the cost model."""
        ranks = self.world_size
        parts = 1 if self.operation == "all_reduce" else ranks
        sizes = tuple(self.total_bytes // parts for _ in range(parts))
        return Exchange(Phase.GRADIENT_COMM, self.operation, tuple(range(ranks)), sizes, 1)


def fit_link(samples: Sequence[Sample], algorithm: str) -> Link:
    """Latency and seconds per byte of one operation, least squares of the relative error, neither negative.

    Raises:
        CostModelError: all samples have the same size and world size.
    """
    if len({(sample.total_bytes, sample.world_size) for sample in samples}) < 2:
        raise CostModelError(f"{len(samples)} samples do not fix latency and bandwidth; measure two sizes")
    largest, operation = max(sample.world_size for sample in samples), samples[0].operation
    reference = Sample(operation, largest, 2**20, 1.0).exchange
    per_byte = wire_bytes(algorithm, reference) / reference.total_bytes
    rows = []
    for sample in samples:
        exchange = sample.exchange
        here, there = (rounds(algorithm, operation, ranks) for ranks in (sample.world_size, largest))
        sent = wire_bytes(algorithm, exchange) / per_byte
        rows.append((exchange.parts * here / there / sample.seconds, sent / sample.seconds))
    latency, slope = _non_negative(rows)
    residuals = [latency * x + slope * y - 1 for x, y in rows]
    error = math.sqrt(sum(r * r for r in residuals) / len(residuals))
    return Link(operation, largest, latency, slope, error)


def _non_negative(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Coefficients (a, b) >= 0 for which a x + b y is nearest to 1 on all rows."""
    xx, xy, yy = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        a, b = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    # One of them is zero: choose the smaller residual
    alone = [(x / xx, 0.0), (0.0, y / yy)]
    return min(alone, key=lambda c: sum((c[0] * r[0] + c[1] * r[1] - 1) ** 2 for r in rows))


def baselines(seconds: Mapping[int, float], world_size: int) -> dict[str, float]:
    """Predictions of simpler models for `world_size`, fitted to the same small worlds.

    `constant` repeats the largest known world; `amdahl` is s + p / P; `extra_p` is c + a P^i log2(P)^j, the
    normal form of Calotoiu et al. 2013. Two worlds fit any exponents, so it is used twice, with the slowest
    growth (i, j) = (0, 1) and, as `extra_p_linear`, with (1, 0): the choice does not favour our model.
    """
    known = sorted(seconds)
    forms: dict[str, Callable[[int], float]] = {
        "amdahl": lambda p: 1 / p,
        "extra_p": math.log2,
        "extra_p_linear": float,
    }
    found = {"constant": seconds[known[-1]]}
    for name, form in forms.items():
        a, c = _line([(form(p), seconds[p]) for p in known])
        found[name] = c + a * form(world_size)
    return found


def _line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept by least squares."""
    listed = list(points)
    mean_x, mean_y = (sum(point[i] for point in listed) / len(listed) for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in listed)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in listed) / spread
    return slope, mean_y - slope * mean_x
