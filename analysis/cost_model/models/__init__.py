"""The registry of models: the papers' networks as tables of layers, built by rule and without torch.

To add one: a function that returns a `Model`, and a line in `MODELS`. `tests/analysis/test_models.py`
covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType

from analysis.cost_model.errors import CostModelError
from analysis.cost_model.models.bert import bert
from analysis.cost_model.models.densenet import densenet201
from analysis.cost_model.models.inception import inception_v4
from analysis.cost_model.models.layers import Layer, Model
from analysis.cost_model.models.perceptron import perceptron
from analysis.cost_model.models.resnet import cifar_resnet, imagenet_resnet
from kfac_core.config import nearest

__all__ = ["MODELS", "Layer", "Model", "read_model"]

MODELS: Mapping[str, Callable[[], Model]] = MappingProxyType(
    {
        **{f"resnet{depth}": partial(cifar_resnet, depth) for depth in (20, 32, 56, 110)},
        **{f"resnet{depth}": partial(imagenet_resnet, depth) for depth in (50, 101, 152)},
        "densenet201": densenet201,
        "inception_v4": inception_v4,
        "bert_base": partial(bert, "bert_base", 12, 768, 384),
        "bert_large": partial(bert, "bert_large", 24, 1024, 512),
        "perceptron": partial(perceptron, (64, 512, 512, 512, 10)),
    }
)


@cache
def read_model(name: str) -> Model:
    """The table of a model.

    Raises:
        CostModelError: no model has this name.
    """
    if name not in MODELS:
        allowed = tuple(sorted(MODELS))
        raise CostModelError(f"model={name!r} is not one of {', '.join(allowed)}{nearest(name, allowed)}")
    return MODELS[name]()
