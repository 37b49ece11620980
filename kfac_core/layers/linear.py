"""Linear layers, also on inputs with sequence dimensions."""

from torch import Tensor, nn

from kfac_core.kernels.grams import Gram, gram
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
        return LayerShape(
            self.name,
            FactorShape(self.module.in_features + self.has_bias),
            FactorShape(self.module.out_features),
        )

    def positions(self, inputs: Tensor, outputs: Tensor) -> tuple[int, int]:
        """The first dimension is the batch; a single vector is one example."""
        examples = outputs.shape[0] if outputs.ndim > 1 else 1
        if self._reduces(outputs):
            return examples, 1
        return examples, outputs.numel() // (self.module.out_features * max(examples, 1))

    def input_gram(self, inputs: Tensor) -> Gram:
        """Sum over all positions of all examples, or over each example's mean."""
        if self._reduces(inputs):
            inputs = inputs.flatten(1, -2).mean(1, dtype=self.grams.dtype if self.grams else None)
        if self.grams is not None:
            return self.grams.of_rows(inputs.reshape(-1, self.module.in_features), with_ones=self.has_bias)
        return gram(inputs.reshape(1, -1, self.module.in_features), with_ones=self.has_bias)

    def output_gram(self, gradients: Tensor) -> Gram:
        """Sum over all positions of all examples, or over each example's sum."""
        if self._reduces(gradients):
            gradients = gradients.flatten(1, -2).sum(1, dtype=self.grams.dtype if self.grams else None)
        if self.grams is not None:
            return self.grams.of_rows(gradients.reshape(-1, self.module.out_features))
        return gram(gradients.reshape(1, -1, self.module.out_features))

    def _reduces(self, tensor: Tensor) -> bool:
        return self.config.sequence == "reduce" and tensor.ndim > 2
