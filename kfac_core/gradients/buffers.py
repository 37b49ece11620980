"""Gradient matrices of all layers in two flat buffers: averaged, and preconditioned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kfac_core.collectives import Communicator
from kfac_core.errors import ConfigError
from kfac_core.execution import Execution
from kfac_core.gradients.kl_clip import kl_clip_scale
from kfac_core.gradients.together import copy_together
from kfac_core.layers import KroneckerLayer
from kfac_core.placement import Placement
from kfac_core.placement.groups import layer_groups


class Gradients:
    """Gradients of all layers, ordered by column, so that a row exchanges one part per column.

    Attributes:
        raw: averaged gradient of each layer, of `LayerShape.gradient_shape`: a view of the buffer, or, from
            `read` to `write` on a CPU, of the parameter's own gradient where that is one contiguous tensor.
        preconditioned: the same after K-FAC, a view.
        own: indices of the layers that this rank preconditions.
    """

    def __init__(
        self,
        layers: Sequence[KroneckerLayer],
        placement: Placement,
        communicator: Communicator,
        like: Tensor,
        execution: Execution,
    ) -> None:
        self._layers = layers
        self._communicator = communicator
        shapes = [layer.shape for layer in layers]
        column_of = [placement.layers[shape.name].gradient_workers[0] for shape in shapes]
        # On a CPU a copy costs as much as the separate dot products that it saves; on a GPU each is a launch.
        self._batched = execution is Execution.BATCHED
        order = sorted(range(len(layers)), key=lambda index: column_of[index])
        if self._batched:
            order = [index for each in layer_groups(shapes, placement) for index in each]
        elements = [shapes[index].gradient_elements for index in order]
        self._raw = like.new_zeros(sum(elements))
        self._preconditioned = torch.zeros_like(self._raw)
        self._buffers: list[Tensor] = [self._raw] * len(layers)
        self.preconditioned: list[Tensor] = [self._raw] * len(layers)
        for index, raw, preconditioned in zip(
            order, self._raw.split(elements), self._preconditioned.split(elements), strict=True
        ):
            size = shapes[index].gradient_shape
            self._buffers[index], self.preconditioned[index] = raw.view(size), preconditioned.view(size)
        self.raw = list(self._buffers)
        rank, columns = communicator.rank, placement.columns
        self._row = placement.row(rank // columns)
        self._sizes = [0] * columns
        for index, shape in enumerate(shapes):
            self._sizes[column_of[index]] += shape.gradient_elements
        self.own = [index for index, column in enumerate(column_of) if column == rank % columns]

    def read(self) -> None:
        """Read the averaged gradients of the parameters.

        Raises:
            ConfigError: there are none.
        """
        if all(layer.weight.grad is None for layer in self._layers):
            raise ConfigError("no layer that K-FAC takes has a gradient: call KFAC.step() after backward()")
        pairs = list(zip(self._layers, self._buffers, strict=True))
        if self._batched:
            copy_together([pair for layer, buffer in pairs for pair in layer.gradient_sources(buffer)])
            return
        self.raw = [layer.read_gradient(buffer) for layer, buffer in pairs]

    def exchange(self) -> None:
        """All-gather the row's gradients: each member receives what the others preconditioned."""
        if len(self._row) > 1:
            self._communicator.gather_parts(self._preconditioned, self._sizes, self._row)

    def clip(self, lr: float, kl_clip: float) -> None:
        """Scale all preconditioned gradients by the factor of `kl_clip_scale`."""
        if self._batched:
            change = torch.dot(self._preconditioned, self._raw)
        else:
            pairs = zip(self.preconditioned, self.raw, strict=True)
            change = torch.stack([torch.dot(new.flatten(), raw.flatten()) for new, raw in pairs]).sum()
        self._preconditioned *= kl_clip_scale(change, lr, kl_clip)

    def write(self) -> None:
        """Copy the preconditioned gradients into the parameters' gradient tensors."""
        targets = [
            pair
            for layer, matrix in zip(self._layers, self.preconditioned, strict=True)
            for pair in layer.gradient_targets(matrix)
        ]
        if self._batched:
            copy_together(targets)
        else:
            torch._foreach_copy_([gradient for gradient, _ in targets], [value for _, value in targets])
        self.raw = list(self._buffers)  # else the parameters' gradients would outlive `zero_grad`


def all_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether every element of every gradient is finite; waits for the device once."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return not dense or bool(torch.stack([gradient.isfinite().all() for gradient in dense]).all())
