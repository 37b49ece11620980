"""Layers without statistics on this rank, whose outputs tell what the loss is made of all the same.

A head may be frozen, skipped or of a kind that K-FAC does not take, and with `dp_kfac` most layers are other
ranks'. Normalisation layers and other modules without a matrix are no heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from kfac_core.capture.forward_pass import LayerCall
from kfac_core.layers import LAYERS, KroneckerLayer, ProjectionLayer, TiedEmbeddingLayer

_CONVOLUTIONS = nn.modules.conv._ConvNd
_HEADS = (*LAYERS, nn.RNNBase)
"""Kinds whose output is known to have features last, or channels first; subclasses too."""


def other_layers(model: nn.Module, captured: Sequence[KroneckerLayer]) -> list[tuple[nn.Module, bool]]:
    """Modules with a matrix of their own that have no hook of `captured`; with whether one is the last.

    The last in the model's order, where no captured layer follows: only that one is most likely a head.
    """
    known: set[int] = set()
    for layer in captured:
        known.add(id(layer.host if isinstance(layer, ProjectionLayer) else layer.module))
        known.add(id(layer.module))
        known.update(map(id, layer.heads if isinstance(layer, TiedEmbeddingLayer) else ()))
    found = [module for module in model.modules() if id(module) in known or _has_matrix(module)]
    last = found[-1] if found else None
    return [(module, module is last) for module in found if id(module) not in known and module is not model]


def output_of(module: nn.Module, output: Any) -> Tensor | None:
    """The scores or features that a layer returns; None if their last dimension is not known to be such."""
    found = output[0] if isinstance(output, tuple) and output else output
    if not (isinstance(found, Tensor) and found.requires_grad and found.ndim and found.numel()):
        return None
    if isinstance(module, _HEADS):
        return found
    matrices = [own for own in module.parameters(recurse=False) if own.ndim == 2]
    return found if any(found.shape[-1] in own.shape for own in matrices) else None


def call_of(module: nn.Module, output: Tensor, *, recomputed: bool) -> LayerCall:
    """The call of a layer by its output."""
    sizes = output.shape
    if isinstance(module, _CONVOLUTIONS):
        examples = sizes[0] if output.ndim == len(module.kernel_size) + 2 else 1
        return LayerCall(True, examples, module.out_channels, sizes, recomputed)
    return LayerCall(False, sizes[0], sizes[-1], sizes, recomputed)


def _has_matrix(module: nn.Module) -> bool:
    if isinstance(module, parametrize.ParametrizationList):  # its output is a weight
        return False
    return isinstance(module, _HEADS) or any(own.ndim >= 2 for own in module.parameters(recurse=False))
