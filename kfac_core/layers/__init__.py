"""The drawer of layers: what a module contributes to K-FAC.

To add one: subclass `KroneckerLayer` in `kfac_core/layers/<name>.py` and add its module type here.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import nn

from kfac_core.layers.conv2d import Conv2dLayer
from kfac_core.layers.layer import KroneckerLayer
from kfac_core.layers.linear import LinearLayer

__all__ = ["LAYERS", "KroneckerLayer", "find_layers"]

LAYERS: Mapping[type[nn.Module], type[KroneckerLayer]] = MappingProxyType(
    {nn.Linear: LinearLayer, nn.Conv2d: Conv2dLayer}
)


def find_layers(model: nn.Module, skip: Sequence[str]) -> list[KroneckerLayer]:
    """The supported, trainable layers of `model`, in the order of its modules.

    Args:
        model: any module; a wrapper such as DistributedDataParallel should be taken off first.
        skip: regular expressions, matched from the start of a module's qualified name.
    """
    patterns = [re.compile(pattern) for pattern in skip]
    found = []
    for name, module in model.named_modules():
        layer = LAYERS.get(type(module))  # exact type: a subclass may compute something else
        if layer is None or any(pattern.match(name) for pattern in patterns):
            continue
        if all(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            found.append(layer(name, module))
    return found
