"""Linear layers, also on inputs with sequence dimensions."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kfac_core.errors import ConfigError
from kfac_core.kernels.grams import Gram, gram, squares
from kfac_core.layers.layer import KroneckerLayer
from kfac_core.placement import FactorShape, LayerShape


class LinearLayer(KroneckerLayer):
    """`nn.Linear` on `[batch, ..., features]`.

    With `sequence="expand"` the dimensions in between are positions. `sequence="reduce"` reduces them first:
    mean of the inputs, sum of the gradients (Eschenhagen et al. 2023, arXiv:2311.00636).
    """

    module: nn.Linear

    @property
    def shape(self) -> LayerShape:
        """A over inputs (and bias), G over outputs."""
        inputs, outputs = self.features
        return self.bounded(LayerShape(self.name, FactorShape(inputs + self.has_bias), FactorShape(outputs)))

    @property
    def features(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.module.in_features, self.module.out_features

    def count(self, inputs: Tensor, outputs: Tensor) -> tuple[int, int]:
        """All positions are rows, or, reduced, the examples; a single vector is one example."""
        examples = outputs.shape[self.batch_dim(outputs)] if outputs.ndim > 1 else 1
        rows = examples if self._reduces(outputs) else outputs.numel() // self.features[1]
        return examples, rows

    def batch_dim(self, outputs: Tensor) -> int:
        """As stated, where there are sequences; `arranged` puts it first."""
        return self.batch_axis if outputs.ndim > 2 and self.config.sequence == "expand" else 0

    @property
    def batch_axis(self) -> int:
        """The dimension of the examples in inputs with positions."""
        return self.config.batch_dim or 0

    def arranged(self, tensor: Tensor, batch: int | None) -> Tensor:
        """To be reduced: `[batch, ..., features]`, from any layout of as many examples.

        Raises:
            ConfigError: the rows cannot be divided among the examples.
        """
        if self.config.sequence == "expand" or tensor.ndim < 2:
            return tensor
        stated = self.batch_axis
        dims = (stated, 1 - stated) if tensor.ndim > 2 else (0,)
        found = next((dim for dim in dims if tensor.shape[dim] == (batch or tensor.shape[stated])), None)
        if found is not None:
            return tensor.movedim(found, 0)
        assert batch is not None  # noqa: S101  else the stated dimension is found
        rows = tensor.flatten(0, -2)
        if len(rows) % batch:
            raise ConfigError(
                f"sequence=reduce: {len(rows)} rows of layer {self.name} cannot be divided among a batch of "
                f"{batch}; use sequence=expand, state batch_dim, or add the layer to skip"
            )
        if stated == 1:  # [T * B, features]
            return rows.view(-1, batch, rows.shape[1]).movedim(1, 0)
        return rows.view(batch, -1, rows.shape[1])

    def input_gram(self, inputs: Tensor) -> Gram:
        """Sum over all positions of all examples, or over each example's mean."""
        if self._reduces(inputs):
            inputs = inputs.flatten(1, -2).mean(1, dtype=self._sums(inputs))
        if self.is_diagonal("a"):
            return squares(inputs.reshape(-1, inputs.shape[-1]), self._sums(inputs), with_ones=self.has_bias)
        if self.grams is not None:
            return self.grams.of_rows(inputs.reshape(-1, self.features[0]), with_ones=self.has_bias)
        return gram(inputs.reshape(1, -1, self.features[0]), with_ones=self.has_bias)

    def output_gram(self, gradients: Tensor) -> Gram:
        """Sum over all positions of all examples, or over each example's sum."""
        if self._reduces(gradients):
            gradients = gradients.flatten(1, -2).sum(1, dtype=self._sums(gradients))
        if self.is_diagonal("g"):
            return squares(gradients.reshape(-1, gradients.shape[-1]), self._sums(gradients))
        if self.grams is not None:
            return self.grams.of_rows(gradients.reshape(-1, self.features[1]))
        return gram(gradients.reshape(1, -1, self.features[1]))

    def _sums(self, tensor: Tensor) -> torch.dtype:
        """The dtype of the sums."""
        return self.grams.dtype if self.grams else tensor.dtype

    def _reduces(self, tensor: Tensor) -> bool:
        return self.config.sequence == "reduce" and tensor.ndim > 2


class TransposedLinearLayer(LinearLayer):
    """`Conv1D` of transformers, the Linear layer of GPT-2: its weight is `[in, out]`."""

    in_order = False

    @property
    def features(self) -> tuple[int, int]:
        """Inputs and outputs."""
        inputs, outputs = self.weight.shape
        return inputs, outputs

    def aligned(self, matrix: Tensor) -> Iterator[Tensor]:
        """The weight's part transposed."""
        weight, *bias = self._views(matrix)
        yield weight.mT
        yield from bias
