"""Registry of layer types: what a module contributes to K-FAC.

To add one, subclass `KroneckerLayer` in a file of `kfac_core/layers/` and add its module type here.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import nn

from kfac_core.config import KFACConfig, nearest
from kfac_core.errors import ConfigError
from kfac_core.layers.conv import ConvLayer, TransposedConvLayer
from kfac_core.layers.layer import KroneckerLayer, unwrapped_name
from kfac_core.layers.linear import (
    EmbeddingLayer,
    LinearLayer,
    ProjectionLayer,
    TiedEmbeddingLayer,
    TransposedLinearLayer,
    attention_layers,
    expert_layers,
    is_fused_experts,
)

__all__ = [
    "LAYERS",
    "KroneckerLayer",
    "ProjectionLayer",
    "TiedEmbeddingLayer",
    "class_of",
    "find_layers",
    "is_fully_sharded",
    "kind_of",
    "layers_of",
]

LAYERS: Mapping[type[nn.Module], type[KroneckerLayer]] = MappingProxyType({
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvLayer,
    nn.Conv2d: ConvLayer,
    nn.Conv3d: ConvLayer,
    nn.ConvTranspose1d: TransposedConvLayer,
    nn.ConvTranspose2d: TransposedConvLayer,
    nn.ConvTranspose3d: TransposedConvLayer,
    nn.Embedding: EmbeddingLayer,
})  # fmt: skip

_BY_NAME = {"transformers.pytorch_utils.Conv1D": TransposedLinearLayer}
"""Modules of packages that are not imported here."""

_FSDP = "FSDPModule"  # torch.distributed.fsdp is not imported for a name


def find_layers(model: nn.Module, config: KFACConfig) -> list[KroneckerLayer]:
    """The supported layers of `model` that are trained and not skipped, in the model's order.

    A layer whose weight is frozen now, or complex, is left out; a frozen bias alone is not preconditioned.
    An embedding and the Linear modules that share its weight are one layer, in the embedding's place. Other
    modules that share a parameter are left out. A module that is called several times is one layer.

    Raises:
        ConfigError: a pattern of `skip` matches no layer of a supported type.
    """
    named = {
        layer.name: class_of(module).__name__
        for name, module in model.named_modules()
        for layer in layers_of(name, module, config)
    }
    names, classes = list(named), set(named.values())
    for pattern in config.skip:
        if pattern not in classes and not any(re.match(pattern, name) for name in names):
            some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ConfigError(
                f"skip pattern {pattern!r} matches no layer{nearest(pattern, tuple(names))}; layers: {some}"
            )
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    patterns = [re.compile(pattern) for pattern in config.skip]
    found = []
    for name, module in model.named_modules():
        if class_of(module).__name__ in config.skip:
            continue
        for layer in layers_of(name, module, config):
            if any(pattern.match(layer.name) for pattern in patterns):
                continue
            own: KroneckerLayer | None = layer
            if any(owners[id(parameter)] > 1 for parameter in layer.module.parameters(recurse=False)):
                own = _tied(layer, model, config)
            if own is not None and own.weight.is_floating_point() and own.weight.requires_grad:
                found.append(own)
    return found


def _tied(layer: KroneckerLayer, model: nn.Module, config: KFACConfig) -> KroneckerLayer | None:
    """An embedding whose weight Linear modules share, none of them skipped; None for any other tie."""
    if not isinstance(layer, EmbeddingLayer):
        return None
    heads = []
    for name, module in model.named_modules():
        shares = any(parameter is layer.weight for parameter in module.parameters(recurse=False))
        if module is layer.module or not shares:
            continue
        own, plain_name = class_of(module), unwrapped_name(name)
        skipped = own.__name__ in config.skip or any(re.match(each, plain_name) for each in config.skip)
        if own is not nn.Linear or skipped:
            return None
        heads.append(module)
    return TiedEmbeddingLayer(layer.name, layer.module, config, heads)


def layers_of(name: str, module: nn.Module, config: KFACConfig) -> Sequence[KroneckerLayer]:
    """The layers that a module's own weights are; none of a kind that is not supported."""
    if isinstance(module, nn.MultiheadAttention) and class_of(module) is nn.MultiheadAttention:
        return attention_layers(name, module, config)
    if is_fused_experts(module):
        return expert_layers(name, module, config)
    kind = kind_of(module)
    if kind is None or not kind.supports(module) or not isinstance(module.weight, nn.Parameter):
        return ()
    return (kind(name, module, config),)


def kind_of(module: nn.Module) -> type[KroneckerLayer] | None:
    """The layer kind of a module by its exact type: a subclass may compute something else."""
    own = class_of(module)
    return LAYERS.get(own) or _BY_NAME.get(f"{own.__module__}.{own.__qualname__}")


def class_of(module: nn.Module) -> type[nn.Module]:
    """The module's class; of one under fully_shard, which makes a subclass, the class that it had before."""
    names = [base.__name__ for base in type(module).__mro__]
    own: type[nn.Module] = type(module).__mro__[names.index(_FSDP) + 1 if _FSDP in names else 0]
    return own


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether this very module was passed to fully_shard (FSDP2)."""
    return class_of(module) is not type(module)
