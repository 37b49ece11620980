"""Weights that a module applies by `functional.linear` itself: attention's projections, fused experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from kfac_core.config import KFACConfig
from kfac_core.layers.linear import LinearLayer


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
    def has_weight(self) -> bool:
        """As of a module."""
        return isinstance(getattr(self.module, self._weight, None), nn.Parameter)

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

    def _gradients(self) -> list[Tensor | None]:
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
