"""What K-FAC reports to its user: failed factors, layers without statistics, a second KFAC on a layer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kfac_core.batched_means import Key
from kfac_core.capture.hooks import is_captured
from kfac_core.layers import KroneckerLayer
from kfac_core.layers.names import layer_text, listed_layers
from kfac_core.placement import LayerShape


@dataclass(frozen=True)
class Failure:
    """A factor that could not be used; the layer keeps its last good second-order data.

    Attributes:
        step: `KFAC.steps` at the failure.
        reason: the solver's error, or that statistics were not finite.
    """

    layer: str
    kind: str
    step: int
    rank: int
    reason: str

    def __str__(self) -> str:
        """The warning's text."""
        return (
            f"K-FAC: {self.kind.upper()} factor of {layer_text(self.layer)} at step {self.step} on rank "
            f"{self.rank}: {self.reason}; the last good second-order data stays in use"
        )


def missing_statistics(
    updates: Mapping[Key, int], shapes: Sequence[LayerShape], failures: Sequence[Failure], step: int
) -> list[str]:
    """A warning of layers that have had no statistics on any rank, by their factors' updates."""
    missing = sorted({shapes[layer].name for (layer, _), taken in updates.items() if not taken})
    if not missing or failures:
        return []
    return [
        f"K-FAC: no statistics of {listed_layers(missing)} by step {step}: a layer that takes no part in "
        "training passes, or whose weight is used without calling the layer, keeps the direction of its "
        "plain gradient"
    ]


def warn_of_other_kfac(layers: Sequence[KroneckerLayer]) -> None:
    """Warn of layers with hooks of another KFAC; not an error, as its owner may have lost it."""
    shared = [layer.name for layer in layers if is_captured(layer.module)]
    if shared:
        warnings.warn(
            f"K-FAC: another KFAC still has hooks on {listed_layers(shared)}: it takes time and memory in "
            "every step, and a gradient preconditioned by both is wrong; call its remove() when it is done",
            RuntimeWarning,
            stacklevel=4,  # where KFAC() was called
        )
