"""A model that was measured or stored: the shapes of its factors, without kernels and sizes of images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from analysis.cost_model.models.layers import Layer, Model
from kfac_core.placement import LayerShape


@dataclass(frozen=True)
class StoredModel(Model):
    """A model by the shapes that K-FAC found in it."""

    stored: tuple[LayerShape, ...] = ()

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """The factor shapes of all layers."""
        return list(self.stored)


def stored_layer(shape: LayerShape, positions: int = 1) -> Layer:
    """A linear layer with this shape's factors, over so many positions of an example."""
    return Layer(shape.name, shape.a.dim, shape.g.dim, size=(1, positions), kind="linear")
