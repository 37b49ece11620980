"""How much of a model K-FAC takes: each layer with its factors and owners, and what stays plain and why."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils import parametrize

from kfac_core.config import ITEM_BYTES, KFACConfig
from kfac_core.layers import (
    LAYERS,
    KroneckerLayer,
    ProjectionLayer,
    TiedEmbeddingLayer,
    class_of,
    kind_of,
    layers_of,
)
from kfac_core.layers.layer import unwrapped_name
from kfac_core.placement import FactorShape, Placement
from kfac_core.placement.placement import Ranks, data_elements

WARN_BELOW_SHARE = 0.8
"""Share of the trained parameters below which K-FAC warns: what is left has next to no effect."""

_OWNERS_SHOWN = 4
_LOG = logging.getLogger("kfac_core.preconditioner")  # one logger for all of K-FAC


@dataclass(frozen=True)
class TakenLayer:
    """A layer that K-FAC preconditions.

    Attributes:
        kind: type of the module, and after a `+` the types of those that share its weight.
        a, g: sizes of the factors: `n`, `blocks x n`, or `n, diagonal`.
        state_bytes: one copy of its running factors and second-order data.
        owners: the ranks that solve A, and those that solve G.
    """

    name: str
    kind: str
    a: str
    g: str
    parameters: int
    state_bytes: int
    owners: tuple[Ranks, Ranks]


@dataclass(frozen=True)
class PlainModule:
    """A module whose trained parameters keep their plain gradient, and why."""

    name: str
    kind: str
    parameters: int
    reason: str


@dataclass(frozen=True)
class Summary:
    """What K-FAC takes of a model, and what it leaves plain; `print` shows two tables.

    Attributes:
        taken_parameters, trained_parameters: elements of parameters; one that is shared counts once.
    """

    layers: tuple[TakenLayer, ...]
    plain: tuple[PlainModule, ...]
    taken_parameters: int
    trained_parameters: int

    @property
    def share(self) -> float:
        """Share of the trained parameters that K-FAC preconditions, from 0 to 1."""
        return self.taken_parameters / max(self.trained_parameters, 1)

    @property
    def headline(self) -> str:
        """The share in words."""
        return (
            f"K-FAC preconditions {self.taken_parameters:,} of {self.trained_parameters:,} trained "
            f"parameters ({self.share:.1%}) in {len(self.layers)} layers"
        )

    @property
    def plain_table(self) -> str:
        """What stays plain, one line a module, the largest first."""
        largest = sorted(self.plain, key=lambda module: -module.parameters)
        rows = [(each.name, each.kind, f"{each.parameters:,}", each.reason) for each in largest]
        return _table(("plain", "kind", "parameters", "why"), rows)

    def __str__(self) -> str:
        """The headline, the layers in the model's order, and what stays plain."""
        rows = [
            (each.name, each.kind, each.a, each.g, f"{each.parameters:,}", f"{each.state_bytes:,}",
             " / ".join(dict.fromkeys(map(_ranks, each.owners))))
            for each in self.layers
        ]  # fmt: skip
        table = _table(("layer", "kind", "A", "G", "parameters", "bytes", "owner of A / of G"), rows)
        return "\n\n".join([self.headline, table] + ([self.plain_table] if self.plain else []))


def summarised(
    model: nn.Module,
    layers: Sequence[KroneckerLayer],
    placement: Placement,
    config: KFACConfig,
    item_bytes: int,
) -> Summary:
    """The summary of a model whose `layers` are placed; `item_bytes` is of the working precision."""
    owners = {
        name: (placed.a_inverse_workers, placed.g_inverse_workers)
        for name, placed in placement.layers.items()
    }
    taken = tuple(_taken(layer, owners[layer.name], config, item_bytes) for layer in layers)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Summary(
        taken,
        tuple(plain_modules(model, layers, config)),
        sum(each.parameters for each, layer in zip(taken, layers, strict=True) if layer.is_trained),
        trained,
    )


def log_coverage(summary: Summary, rank: int) -> None:
    """One log message of what stays plain; on the first rank a warning where that is much."""
    if summary.share < WARN_BELOW_SHARE and rank == 0:
        _LOG.warning(
            "%s; plain gradients, which print(kfac) shows too:\n%s", summary.headline, summary.plain_table
        )
    elif summary.plain:
        _LOG.info("plain gradients: %s", ", ".join(f"{each.name} ({each.kind})" for each in summary.plain))


def plain_modules(
    model: nn.Module, layers: Sequence[KroneckerLayer], config: KFACConfig
) -> Iterator[PlainModule]:
    """Modules with trained parameters of their own that K-FAC does not precondition."""
    taken = {id(parameter) for layer in layers for parameter in layer.parameters()}
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    shown: set[int] = set()
    names = {layer.name for layer in layers}
    for name, module in model.named_modules():
        for part in layers_of(name, module, config):
            if isinstance(part, ProjectionLayer) and part.name not in names and part.is_trained:
                shown |= {id(parameter) for parameter in part.parameters()}
                reason = _reason_of_part(name, module, part, config)
                yield PlainModule(part.name, "projection", part.shape.gradient_elements, reason)
        left = [
            parameter
            for parameter in module.parameters(recurse=False)
            if parameter.requires_grad and id(parameter) not in taken | shown
        ]
        if left:
            shown |= {id(parameter) for parameter in left}
            elements = sum(parameter.numel() for parameter in left)
            kind = class_of(module).__name__
            shown_name = unwrapped_name(name)
            reason = _reason(shown_name, module, config, owners)
            yield PlainModule(shown_name or "(root)", kind, elements, reason)


def _reason_of_part(name: str, module: nn.Module, part: ProjectionLayer, config: KFACConfig) -> str:
    """Why a projection of attention, or an expert, stays plain though its weight is trained."""
    skipped = any(re.match(each, part.name) or each == class_of(module).__name__ for each in config.skip)
    if skipped:
        return "skip"
    return "added or unfrozen since KFAC was made, or shares a parameter with another module"


def _reason(name: str, module: nn.Module, config: KFACConfig, owners: Counter[int]) -> str:
    kind = kind_of(module) or next((LAYERS[base] for base in type(module).__mro__ if base in LAYERS), None)
    weight = getattr(module, "weight", None)
    computed = isinstance(module, parametrize.ParametrizationList) or parametrize.is_parametrized(module)
    computed |= kind is not None and not isinstance(weight, nn.Parameter)
    skipped = any(re.match(pattern, name) or pattern == class_of(module).__name__ for pattern in config.skip)
    shared = any(owners[id(parameter)] > 1 for parameter in module.parameters(recurse=False))
    reasons = {
        "the weight is computed from these (weight norm or another parametrisation)": computed,
        "not of a kind of layer that K-FAC supports": kind is None,
        "skip": skipped,
        "a subclass of a supported layer, which may compute something else": kind_of(module) is None,
        "the weight is frozen": isinstance(weight, nn.Parameter) and not weight.requires_grad,
        "the weight is not of real numbers": isinstance(weight, Tensor) and not weight.is_floating_point(),
        "shares a parameter with another module": shared,
    }
    return next(
        (reason for reason, holds in reasons.items() if holds), "an option that K-FAC does not support"
    )


def _taken(
    layer: KroneckerLayer, owners: tuple[Ranks, Ranks], config: KFACConfig, item_bytes: int
) -> TakenLayer:
    shape = layer.shape
    factor = ITEM_BYTES.get(config.factor_dtype or "", item_bytes)
    inverse = ITEM_BYTES.get(config.inverse_dtype or "", item_bytes)
    held = sum(factor * each.elements + inverse * data_elements(config, each) for each in (shape.a, shape.g))
    sharing = (layer.module, *(layer.heads if isinstance(layer, TiedEmbeddingLayer) else ()))
    kind = " + ".join(class_of(module).__name__ for module in sharing)
    return TakenLayer(
        layer.name or "(root)", kind, _size(shape.a), _size(shape.g), shape.gradient_elements, held, owners
    )


def _size(factor: FactorShape) -> str:
    if factor.dim == 1 and factor.blocks > 1:
        return f"{factor.blocks}, diagonal"
    return str(factor.dim) if factor.blocks == 1 else f"{factor.blocks} x {factor.dim}"


def _ranks(ranks: Ranks) -> str:
    shown = ", ".join(map(str, ranks[:_OWNERS_SHOWN]))
    return f"{shown}, ... ({len(ranks)})" if len(ranks) > _OWNERS_SHOWN else shown


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heads, *rows)
    ]
    return "\n".join(lines)
