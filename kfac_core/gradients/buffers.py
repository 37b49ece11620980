"""Gradient matrices of all layers in two flat buffers: averaged, and preconditioned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite

import torch
from torch import Tensor, nn

from kfac_core.collectives import Communicator
from kfac_core.errors import ConfigError
from kfac_core.execution import Execution
from kfac_core.gradients.kl_clip import kl_clip_scale
from kfac_core.gradients.sharded import WholeGradients, local
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
        checked, finite: steps whose gradients were looked at, and those where all were finite, on the device.
        clip_scale: the last factor of the kl-clip.
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
        self._change: Tensor | None = None
        self._zero = like.new_zeros(())
        self._sharded = WholeGradients(layers)
        self.clip_scale: Tensor | None = None
        self.checked, self.finite = 0, like.new_zeros((), dtype=torch.float32)
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
        self._sharded.gather()
        pairs = list(zip(self._layers, self._buffers, strict=True))
        if self._batched:
            copy_together([pair for layer, buffer in pairs for pair in layer.gradient_sources(buffer)])
            return
        self.raw = [layer.read_gradient(buffer) for layer, buffer in pairs]

    def exchange(self) -> None:
        """All-gather the row's gradients: each member receives what the others preconditioned."""
        if len(self._row) > 1:
            self._communicator.gather_parts(self._preconditioned, self._sizes, self._row)

    def clip(self, rates: Sequence[float], kl_clip: float) -> None:
        """Scale all preconditioned gradients by the factor of `kl_clip_scale`.

        `rates` are the learning rates of the layers, each in the unit of its parameter group.
        """
        pairs = zip(self.preconditioned, self.raw, strict=True)
        lr = rates[0]
        if any(rate != lr for rate in rates):
            changes = [torch.dot(new.flatten(), raw.flatten()) for new, raw in pairs]
            change, lr = torch.stack(torch._foreach_mul(changes, [rate**2 for rate in rates])).sum(), 1.0
        elif self._batched:
            change = torch.dot(self._preconditioned, self._raw)
        else:
            change = torch.stack([torch.dot(new.flatten(), raw.flatten()) for new, raw in pairs]).sum()
        self._change = change.abs()
        scale = kl_clip_scale(self._change, lr, kl_clip)
        self._preconditioned *= scale
        self.clip_scale = scale

    def graft(self) -> None:
        """Give every layer's preconditioned gradient the norm of its averaged gradient; zero stays zero."""
        wanted = torch._foreach_norm([each.flatten() for each in self.raw])
        given = torch._foreach_norm([each.flatten() for each in self.preconditioned])
        torch._foreach_clamp_min_(given, torch.finfo(self._raw.dtype).tiny)
        torch._foreach_div_(wanted, given)
        torch._foreach_mul_(self.preconditioned, wanted)

    def drop_unless_finite(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set gradients to zero where one is not finite, and count where all are.

        On a CPU those of all parameters. On a GPU, where the host does not know, those of K-FAC's layers;
        other parameters keep theirs, as they would without K-FAC.
        """
        self.checked += 1
        if not self._batched:
            gradients = [each.grad for each in parameters if each.grad is not None]
            if self._finite_on_all_ranks(largest(gradients)):
                self.finite += 1
            else:
                self._preconditioned.zero_()
                for gradient in gradients:
                    gradient.zero_()
            return
        change, self._change = self._change, None
        if change is None:
            change = torch.dot(self._preconditioned, self._raw).abs()
        finite = change < inf
        torch.where(finite, self._preconditioned, self._zero, out=self._preconditioned)
        self.finite += finite

    def _finite_on_all_ranks(self, size: Tensor) -> bool:
        finite = isfinite(size)
        if not self._sharded.any:  # averaged gradients are the same on all ranks
            return finite
        flag = self._zero.new_full((1,), float(not finite))
        self._communicator.all_reduce(flag)
        return float(flag) == 0.0

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
        self._sharded.scatter()
        self.raw = list(self._buffers)  # else the parameters' gradients would outlive `zero_grad`


def largest(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of the largest size of each gradient, of its part on this rank if it is sharded, `[]`.

    It is finite if and only if every element is.
    """
    parts = [local(gradient) for gradient in gradients]
    dense = [each.coalesce().values() if each.is_sparse else each for each in parts]
    sizes = torch._foreach_norm([each for each in dense if each.numel()], inf)
    return torch.stack([size.double() for size in sizes]).sum() if sizes else torch.zeros(())


def all_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether every element of every gradient is finite; waits for the device once."""
    return isfinite(largest(parameter.grad for parameter in parameters if parameter.grad is not None))
