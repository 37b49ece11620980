"""Networks as their preconditioned layers and sizes; no torch.

`networks.json` has those of the papers. `python -m jobs.experiments.network_tables` writes it from the models
that the workloads train, on torch's meta device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from analysis.prediction.errors import PredictionError
from kfac_core.config import nearest
from kfac_core.placement import FactorShape, LayerShape


@dataclass(frozen=True)
class Network:
    """What K-FAC's costs depend on.

    Attributes:
        shapes: of the layers that K-FAC preconditions, in the model's order.
        other_parameters: trained parameters outside of them: normalisation, embeddings.
        positions: by layer, rows of its input for each example: pixels or tokens. Empty if unknown; each
            layer then counts as having one.
        forward_flops: of one example's forward pass, as torch counts them; 0 if unknown.
        activations: elements of the layers' outputs for one example; 0 if unknown.
    """

    name: str
    shapes: tuple[LayerShape, ...]
    other_parameters: int
    positions: tuple[int, ...] = ()
    forward_flops: int = 0
    activations: int = 0

    @property
    def parameters(self) -> int:
        """All trained parameters, whose gradients data parallelism averages."""
        return self.other_parameters + sum(shape.gradient_elements for shape in self.shapes)


@cache
def networks() -> Mapping[str, Network]:
    """The networks of the papers, by name."""
    tables = json.loads(Path(__file__).with_name("networks.json").read_text(encoding="utf-8"))
    return MappingProxyType({name: _network(name, **table) for name, table in tables.items()})


def network_named(name: str) -> Network:
    """A network of the papers.

    Raises:
        PredictionError: none has this name.
    """
    known = networks()
    if name not in known:
        allowed = tuple(sorted(known))
        raise PredictionError(f"{name!r} is not one of {', '.join(allowed)}{nearest(name, allowed)}")
    return known[name]


def _network(
    name: str,
    layers: list[tuple[str, int, int, int]],
    other_parameters: int,
    forward_flops: int,
    activations: int,
) -> Network:
    shapes = tuple(LayerShape(layer, FactorShape(a), FactorShape(g)) for layer, a, g, _ in layers)
    positions = tuple(rows for _, _, _, rows in layers)
    return Network(name, shapes, other_parameters, positions, forward_flops, activations)
