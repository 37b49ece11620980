"""Gradients that fully_shard (FSDP2) divides among ranks: whole for K-FAC, in parts for the optimizer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from kfac_core.layers import KroneckerLayer


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a `DTensor`, of which each process holds a part."""
    package = sys.modules.get("torch.distributed.tensor")  # where it is not imported, there is none
    return package is not None and isinstance(tensor, package.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, or all of one that is not sharded."""
    sharded: Any = tensor
    part: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return part


class WholeGradients:
    """Gathers the gradients of sharded parameters, and writes this rank's part of the new ones back.

    fully_shard shows a layer's whole weight during its forward and backward pass, and averages gradients over
    the ranks into parts of rows. So the statistics of factors are those of whole layers; only the gradients
    have to be gathered, one all-gather a parameter and step.

    Args:
        layers: all layers; they read their gradients here if any is sharded.

    Attributes:
        any: whether there are sharded parameters.
    """

    def __init__(self, layers: Sequence[KroneckerLayer]) -> None:
        self._layers = layers
        self._whole: dict[int, Tensor] = {}
        self.any = any(is_sharded(parameter) for parameter in self._parameters())
        for layer in layers if self.any else ():
            layer.gradient_of = self._of

    def gather(self) -> None:
        """Make the gradients whole; every rank calls it."""
        gradients: list[tuple[nn.Parameter, Any]] = [(each, each.grad) for each in self._sharded()]
        self._whole = {id(parameter): gradient.full_tensor() for parameter, gradient in gradients}

    def scatter(self) -> None:
        """Write this rank's parts of what the layers have made of the whole gradients; no communication."""
        for parameter in self._sharded():
            _write_part(parameter.grad, self._whole[id(parameter)])
        self._whole.clear()

    def _of(self, parameter: nn.Parameter) -> Tensor | None:
        return self._whole.get(id(parameter), parameter.grad)

    def _sharded(self) -> list[nn.Parameter]:
        if not self.any:
            return []
        return [each for each in self._parameters() if each.grad is not None and is_sharded(each.grad)]

    def _parameters(self) -> list[nn.Parameter]:
        """Each once, in an order that is the same on all ranks."""
        return list({id(each): each for layer in self._layers for each in layer.parameters()}.values())


def _write_part(gradient: Any, whole: Tensor) -> None:
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415  only where one exists already

    mesh = gradient.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    gradient.to_local().copy_(replicated.redistribute(placements=gradient.placements).to_local())
