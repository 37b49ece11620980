"""Linear layers, also on inputs with sequence dimensions."""

from torch import Tensor, nn

from kfac_core.layers.layer import KroneckerLayer, gram
from kfac_core.placement import FactorShape, LayerShape


class LinearLayer(KroneckerLayer):
    """`nn.Linear` on `[batch, ..., features]`; the dimensions between are positions (KFAC-expand)."""

    module: nn.Linear

    @property
    def shape(self) -> LayerShape:
        """A over inputs (and bias), G over outputs."""
        with_bias = self.module.bias is not None
        return LayerShape(
            self.name, FactorShape(self.module.in_features + with_bias), FactorShape(self.module.out_features)
        )

    def positions(self, inputs: Tensor, outputs: Tensor) -> tuple[int, int]:
        """The first dimension is the batch; a bare vector is one example."""
        rows = outputs.numel() // self.module.out_features
        examples = outputs.shape[0] if outputs.ndim > 1 else 1
        return examples, rows // max(examples, 1)

    def input_gram(self, inputs: Tensor) -> Tensor:
        """One row for each position of each example."""
        rows = inputs.reshape(1, -1, self.module.in_features)
        return gram(rows, with_ones=self.module.bias is not None)

    def output_gram(self, gradients: Tensor) -> Tensor:
        """One row for each position of each example."""
        return gram(gradients.reshape(1, -1, self.module.out_features), with_ones=False)
