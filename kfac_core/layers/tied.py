"""An embedding whose weight is also that of the output layer: one block from both uses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from kfac_core.config import KFACConfig
from kfac_core.layers.embedding import EmbeddingLayer
from kfac_core.layers.linear import LinearLayer
from kfac_core.placement import FactorShape, LayerShape


class TiedEmbeddingLayer(EmbeddingLayer):
    """`nn.Embedding` and the `nn.Linear` modules that share its weight `[words, features]`.

    A is over the words and diagonal, G over the features. The words are inputs of the embedding, and outputs
    of a head; `capture.ties` joins the factors of both uses. A head's bias keeps its plain gradient.

    Attributes:
        heads: the Linear modules.
        head: what each of them contributes: its A is over the features, its G is the diagonal over the words.
    """

    def __init__(
        self, name: str, module: nn.Embedding, config: KFACConfig, heads: Sequence[nn.Linear]
    ) -> None:
        super().__init__(name, module, config)
        self.heads = tuple(heads)
        self.head = _HeadUse(name, heads[0], config)


class _HeadUse(LinearLayer):
    def __init__(self, name: str, module: nn.Linear, config: KFACConfig) -> None:
        super().__init__(name, module, config)
        self.has_bias = False

    @property
    def shape(self) -> LayerShape:
        words, features = self.weight.shape
        return LayerShape(self.name, FactorShape(features), FactorShape(1, words), "g")
