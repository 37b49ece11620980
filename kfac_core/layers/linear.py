"""Linear layers, also on inputs with sequence dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from kfac_core.config import KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.grams import Gram, gram, squares
from kfac_core.layers.layer import KroneckerLayer
from kfac_core.placement import FactorShape, LayerShape


class LinearLayer(KroneckerLayer):
    """`nn.Linear` on `[batch, ..., features]`.

    With `sequence="expand"` the dimensions in between are positions. `sequence="reduce"` reduces them first:
    mean of the inputs, sum of the gradients (Eschenhagen et al. 2023, arXiv:2311.00636).
    """

    module: nn.Linear

    @cached_property
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


# ------------------------------------------------------------
# Weights that a module applies by `functional.linear` itself: attention's projections, fused experts.


class ProjectionLayer(LinearLayer):
    """Consecutive rows of a weight `[.., in]`, and of its bias, that are one linear map.

    Args:
        owner: the module that has the weight.
        owner_name: its qualified name.
        host: the module in whose forward pass `functional.linear` is called.
        weight: the weight's name.
        rows: first and last (exclusive) output, with all leading dimensions of the weight flattened.
        bias: the bias's name; None for none.
        bias_first: the element of the bias that belongs to the first row.
        time_major: whether inputs are `[T, B, in]`, whatever the model's own layout.

    Attributes:
        rows: as given; None in a layer that is a module.
    """

    def __init__(
        self,
        name: str,
        owner: nn.Module,
        config: KFACConfig,
        *,
        owner_name: str,
        host: nn.Module,
        weight: str,
        rows: tuple[int, int],
        bias: str | None = None,
        bias_first: int = 0,
        time_major: bool = False,
    ) -> None:
        super().__init__(name, owner, config)
        self.module_name = owner_name
        self.host = host
        self._weight, self.rows, self._bias, self._time_major = weight, rows, bias, time_major
        self._bias_first = bias_first
        trained = getattr(owner, bias, None) if bias is not None else None
        self.has_bias = isinstance(trained, nn.Parameter) and trained.requires_grad

    @property
    def weight(self) -> nn.Parameter:
        """The whole parameter."""
        weight: nn.Parameter = getattr(self.module, self._weight)
        return weight

    def parameters(self) -> list[nn.Parameter]:
        """The whole weight, and the whole bias."""
        bias = getattr(self.module, self._bias) if self.has_bias and self._bias is not None else None
        return [self.weight] if bias is None else [self.weight, bias]

    @property
    def is_trained(self) -> bool:
        """As of a module."""
        return self.weight.requires_grad

    @property
    def features(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.weight.shape[-1], self.rows[1] - self.rows[0]

    @property
    def batch_axis(self) -> int:
        """That of the module's own inputs."""
        return 1 if self._time_major else super().batch_axis

    def aligned(self, matrix: Tensor) -> Iterator[Tensor]:
        """Weight and bias as they are."""
        yield from self._views(matrix)

    def gradients(self) -> list[Tensor | None]:
        whole, (first, last) = self.gradient_of(self.weight), self.rows
        weight = None if whole is None else whole.view(-1, whole.shape[-1])[first:last]
        if not self.has_bias or self._bias is None:
            return [weight]
        bias = self.gradient_of(getattr(self.module, self._bias))
        return [weight, None if bias is None else bias.narrow(0, self._bias_first, last - first)]


def attention_layers(name: str, module: nn.MultiheadAttention, config: KFACConfig) -> list[ProjectionLayer]:
    """Queries, keys and values, each a linear map of its own, and the output."""
    width, whole = module.embed_dim, module.in_proj_weight is not None
    found = [
        ProjectionLayer(
            _joined(name, f"{part}_proj"), module, config, owner_name=name, host=module, time_major=True,
            weight="in_proj_weight" if whole else f"{part}_proj_weight",
            rows=(place * width, (place + 1) * width) if whole else (0, width),
            bias="in_proj_bias", bias_first=place * width,
        )
        for place, part in enumerate("qkv")
    ]  # fmt: skip
    out = _joined(name, "out_proj")
    found.append(
        ProjectionLayer(
            out, module.out_proj, config, owner_name=out, host=module, time_major=True,
            weight="weight", rows=(0, width), bias="bias",
        )
    )  # fmt: skip
    return found


def is_fused_experts(module: nn.Module) -> bool:
    """Whether this is a module of transformers with all experts' weights in one, applied one by one."""
    return (
        getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager"
        and getattr(module, "is_transposed", None) is False
        and not getattr(module, "has_bias", True)
        and bool(_fused(module))
    )


def expert_layers(name: str, module: nn.Module, config: KFACConfig) -> list[ProjectionLayer]:
    """Each weight of each expert."""
    return [
        ProjectionLayer(
            _joined(name, f"{weight}.{expert}"), module, config, owner_name=name, host=module, weight=weight,
            rows=(expert * outputs, (expert + 1) * outputs),
        )
        for weight, (experts, outputs, _) in _fused(module).items()
        for expert in range(experts)
    ]  # fmt: skip


def _fused(module: nn.Module) -> dict[str, tuple[int, ...]]:
    experts = getattr(module, "num_experts", None)
    own = module.named_parameters(recurse=False)
    return {name: tuple(p.shape) for name, p in own if p.ndim == 3 and p.shape[0] == experts}


def _joined(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


# ------------------------------------------------------------
# Embeddings: linear layers whose inputs are one-hot, so that A is a diagonal of token frequencies.


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

    @cached_property
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


# ------------------------------------------------------------
# An embedding whose weight is also that of the output layer: one block from both uses.


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

    @cached_property
    def shape(self) -> LayerShape:
        words, features = self.weight.shape
        return LayerShape(self.name, FactorShape(features), FactorShape(1, words), "g")
