"""Embeddings: linear layers whose inputs are one-hot, so that A is a diagonal of token frequencies."""

import torch
from torch import Tensor, nn

from kfac_core.kernels.grams import Gram, gram
from kfac_core.layers.layer import KroneckerLayer
from kfac_core.placement import FactorShape, LayerShape


class EmbeddingLayer(KroneckerLayer):
    """`nn.Embedding`: A has one 1 by 1 block per token, G is dense over the embedding's features.

    The padding token has no gradient and no frequency.
    """

    module: nn.Embedding

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """No options that make the layer more than a linear map of one-hot inputs."""
        return (
            isinstance(module, nn.Embedding)
            and not module.sparse
            and not module.scale_grad_by_freq
            and module.max_norm is None
        )

    @property
    def shape(self) -> LayerShape:
        """The vocabulary as blocks of A, the features in G."""
        vocabulary, features = self.module.weight.shape
        return LayerShape(self.name, FactorShape(1, vocabulary), FactorShape(features))

    def count(self, inputs: Tensor, outputs: Tensor) -> tuple[int, int]:
        """Tokens are rows; a single one is one example."""
        return (inputs.shape[self.batch_dim(outputs)] if inputs.ndim else 1), inputs.numel()

    def batch_dim(self, outputs: Tensor) -> int:
        """As stated, where there are sequences."""
        return (self.config.batch_dim or 0) if outputs.ndim > 2 else 0

    def input_gram(self, inputs: Tensor) -> Gram:
        """The number of occurrences of each token."""
        if self.grams is not None:
            return self._counted_on_device(inputs.flatten(), self.grams.dtype)
        counts = torch.bincount(inputs.flatten(), minlength=self.module.num_embeddings)
        if self.module.padding_idx is not None:
            counts[self.module.padding_idx] = 0
        return counts.to(torch.promote_types(self.weight.dtype, torch.float32)).view(-1, 1, 1)

    def output_gram(self, gradients: Tensor) -> Gram:
        """Sum over all tokens of all examples."""
        if self.grams is not None:
            return self.grams.of_rows(gradients.reshape(-1, self.module.embedding_dim))
        return gram(gradients.reshape(1, -1, self.module.embedding_dim))

    def _counted_on_device(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """The same without `bincount` and an index, which wait for the device."""
        ones = torch.ones((), dtype=dtype, device=tokens.device).expand(len(tokens))
        counts = ones.new_zeros(self.module.num_embeddings).index_add_(0, tokens, ones)
        if self.module.padding_idx is not None:
            counts.narrow(0, self.module.padding_idx, 1).zero_()
        return counts.view(-1, 1, 1)
