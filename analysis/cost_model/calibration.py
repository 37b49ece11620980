"""Measured speeds of a machine, as `kronscale calibrate` writes them and `calibration_file` reads them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from analysis.cost_model.errors import CostModelError
from analysis.cost_model.laws import Growth, rounds, wire_bytes
from analysis.cost_model.models import Model
from analysis.cost_model.work import Exchange, Operation

SCHEMA = 1
FOLDER = Path("results/calibrations")


@dataclass(frozen=True)
class Curve:
    """Seconds by size: measured points, or a formula with two constants.

    Attributes:
        points: (size, seconds), ascending; linear between them in logarithms, extrapolated along the last
            segment; below the first point the time is constant.
        formula: `power` is constant + coefficient * size ** power; `exponential` is constant *
            exp(coefficient * size).
        relative_error: root mean square of the fit's relative residuals.
    """

    points: tuple[tuple[float, float], ...] = ()
    formula: str = "points"
    constant: float = 0.0
    coefficient: float = 0.0
    power: float = 1.0
    relative_error: float = 0.0

    def at(self, size: float) -> float:
        """Seconds at `size`.

        Raises:
            CostModelError: the curve, continued so far, gives no finite number.
        """
        try:
            seconds = self._at(float(size))
        except OverflowError:
            seconds = math.inf
        if not math.isfinite(seconds):
            raise CostModelError(
                f"the calibration's curve gives {seconds} seconds at size {size:g}; measure nearer to it"
            )
        return seconds

    def _at(self, size: float) -> float:
        if size <= 0:
            return 0.0
        if self.formula == "power":
            return self.constant + self.coefficient * float(size**self.power)
        if self.formula == "exponential":
            return self.constant * math.exp(self.coefficient * size)
        if size <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        position, logs = math.log(size), self._logs
        upper = min(max(bisect_left(logs, (position,)), 1), len(logs) - 1)
        (x0, y0), (x1, y1) = logs[upper - 1], logs[upper]
        return float(math.exp(y0 + (y1 - y0) * (position - x0) / (x1 - x0)))

    @cached_property
    def _logs(self) -> list[tuple[float, float]]:
        return [(math.log(size), math.log(seconds)) for size, seconds in self.points]


@dataclass(frozen=True)
class Link:
    """One operation over one kind of wire, as measured in worlds of up to `world_size` ranks.

    Attributes:
        latency_seconds: of one part, at `world_size`.
        seconds_per_byte: of the buffer, at `world_size`; the cost of a byte on the wire follows from it.
        relative_error: root mean square of the fit's relative residuals.
    """

    operation: Operation
    world_size: int
    latency_seconds: float
    seconds_per_byte: float
    relative_error: float = 0.0

    def seconds(self, exchange: Exchange, algorithm: str, growth: Growth = "central") -> float:
        """Seconds of the exchange."""
        if exchange.parts == 0 or len(exchange.group) == 1:
            return 0.0
        here, there = (
            rounds(algorithm, self.operation, ranks, growth)
            for ranks in (len(exchange.group), self.world_size)
        )
        even = Exchange(
            exchange.phase, self.operation, tuple(range(self.world_size)), (1,) * self.world_size, 1
        )
        if self.operation == "all_reduce":
            even = Exchange(exchange.phase, self.operation, even.group, (1,), 1)
        per_wire_byte = self.seconds_per_byte * even.total_bytes / wire_bytes(algorithm, even)
        sent = wire_bytes(algorithm, exchange)
        return exchange.parts * self.latency_seconds * here / there + sent * per_wire_byte


@dataclass(frozen=True)
class Calibration:
    """The speeds of a machine.

    Attributes:
        source: how it was measured.
        largest_world_size: predictions for larger worlds are marked as extrapolated.
        algorithm: the communication library, one of `ALGORITHMS`.
        links: by `between` (nodes) or `inside` (a node), then by operation.
        ranks_per_node: ranks that share the inside links; None if all links are alike.
        gemm, factor: seconds by FLOPs of one product, of one gram.
        training: seconds by FLOPs of one forward and backward pass.
        inverse: by solver, seconds by dimension of a factor.
        bytes_per_second: memory bandwidth of elementwise operations.
        models: measured facts of single models: `local_batch_size`, `forward_backward_seconds`,
            `factor_seconds`; they replace the curves.
        tables: layers of the models that the calibration itself measured, by name.
        memory_bytes: of a rank's device.
    """

    name: str
    source: str
    largest_world_size: int
    algorithm: str
    links: Mapping[str, Mapping[str, Link]]
    gemm: Curve
    factor: Curve
    training: Curve
    inverse: Mapping[str, Curve]
    bytes_per_second: float
    memory_bytes: int | None = None
    ranks_per_node: int | None = None
    models: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: MappingProxyType({}))
    tables: Mapping[str, Model] = field(default_factory=lambda: MappingProxyType({}))
    environment: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def link(self, exchange: Exchange) -> Link:
        """The link that an exchange uses: `inside` if all its ranks are on one node."""
        group, node = exchange.group, self.ranks_per_node
        near = node is not None and "inside" in self.links and group[0] // node == group[-1] // node
        links = self.links["inside" if near else "between"]
        operation = exchange.operation
        if operation not in links:
            raise CostModelError(
                f"calibration {self.name} has no {operation}; it has {', '.join(sorted(links))}"
            )
        return links[operation]

    def at_speed(self, speed: float) -> Calibration:
        """The same machine with all links `speed` times as fast by the byte; the time of a message stays."""
        links = {
            wire: {
                operation: replace(link, seconds_per_byte=link.seconds_per_byte / speed)
                for operation, link in by_operation.items()
            }
            for wire, by_operation in self.links.items()
        }
        return replace(self, links=links)

    def decomposition(self, solver: str) -> Curve:
        """Seconds by dimension to turn a factor into second-order data.

        Raises:
            CostModelError: it was not measured.
        """
        kind = "eigen" if solver == "eigen" else "inverse"  # pi changes the damping, not the work
        if kind not in self.inverse:
            has = ", ".join(sorted(self.inverse))
            raise CostModelError(
                f"calibration {self.name} has no {kind} times, only {has}; use solver={has} or another one"
            )
        return self.inverse[kind]
