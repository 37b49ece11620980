"""Whether a weight's gradient is the sum of g aT over the calls of its layer; checked in the first step.

A layer's output is linear in its weight, so for any direction R of the weight's shape

    <gradient of the weight, R> = sum over calls of <gradient of the output, forward pass with R as weight>.

A weight that is used without calling its layer (`functional.linear(x, embedding.weight)`) has more gradient
than that, and its factors are of another function. Both sides are this rank's, before the gradients are
averaged; that they are scaled does not matter. Against the gradient that the optimizer sees they also show a
loss scale that was left in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite, log2, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from kfac_core.layers import KroneckerLayer
from kfac_core.layers.layer import is_sharded, listed_layers
from kfac_core.overflow import HostCopy, copy_to_host

DIRECTIONS = 3
"""Random directions; each misses a gradient that is wrong by its own size with a probability of 1 in 15."""

_ATTEMPTS = 30  # steps that overflow halve a scale of 65,536
_LEAST_SCALE = 16.0
_TOLERANCE = 0.05  # of the gradient's norm; bfloat16 rounds to 0.004
_POWER_OF_TWO = 1e-3  # from a whole exponent: float16 rounds gradients to 0.0005
_LINEAR = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)  # in their weight, by their forward pass


class GradientCheck:
    """Hooks of its own on layers and weights, which it removes when the first step is over.

    Args:
        model: the model; all modules that share a layer's weight are captured.
        layers: of kinds whose forward pass is linear in the weight, others are left out.
        is_active: whether a forward pass counts: `KFAC.paused` makes it false.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[KroneckerLayer], is_active: Callable[[], bool]
    ) -> None:
        users: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            users.setdefault(id(module._parameters.get("weight")), []).append(module)
        self._layers = [
            (layer, users[id(layer.weight)])
            for layer in layers
            if id(layer.weight) in users
            and not is_sharded(layer.weight)  # its gradient does not pass through a hook
            and all(isinstance(user, _LINEAR) for user in users[id(layer.weight)])
        ]
        self._is_active = is_active
        self._summed: dict[int, Tensor] = {}
        self._actual: dict[int, Tensor] = {}
        self._left_out: set[int] = set()  # where a forward pass does not count, its backward pass may
        self._compared: list[int] = []
        self._copy: HostCopy | None = None
        self._attempts = 0
        self._handles: list[Any] = []
        self._listen()

    def remove(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def end(self, loss_scale: Callable[[], float | Tensor] | None) -> None:
        """Compare: the step's gradients are averaged and not yet preconditioned. Removes the hooks.

        Args:
            loss_scale: of the backward pass; None where the step overflowed, and the next one is compared.
        """
        if not self._handles:
            return
        self.remove()
        captured, actual, self._summed, self._actual = self._summed, self._actual, {}, {}
        if loss_scale is None:
            self._listen_again()
            return
        self._compared = [index for index in actual if index in captured and index not in self._left_out]
        if not self._compared:
            return
        scale = actual[self._compared[0]].new_zeros(1) + loss_scale()
        rows = [
            torch.cat([captured[index], actual[index], self._seen(index, actual[index]), scale])
            for index in self._compared
        ]
        self._copy = copy_to_host(torch.stack(rows))

    def read(self, *, scaled: bool, alone: bool) -> list[str]:
        """Warnings, once, in the step after `end`.

        Args:
            scaled: a GradScaler scales the loss.
            alone: there is one rank, so that gradients are not averaged.
        """
        if self._copy is None:
            return []
        found, self._copy = self._copy.numbers(), None
        if not all(isfinite(number) for row in found for number in row):
            self._listen_again()
            return []
        wrong, actual, seen = [], 0.0, 0.0
        for index, row in zip(self._compared, found, strict=True):
            one, other, norm = row[:DIRECTIONS], row[DIRECTIONS : 2 * DIRECTIONS], row[2 * DIRECTIONS]
            if any(abs(left - right) > _TOLERANCE * norm for left, right in zip(one, other, strict=True)):
                wrong.append(self._layers[index][0].name)
            actual += norm**2
            seen += row[-2] ** 2
        ratio = sqrt(seen / actual) if actual else 1.0
        return _mismatches(wrong) + _scale_warnings(ratio, found[0][-1] if scaled else None, alone=alone)

    def __reduce__(self) -> tuple[Callable[[], GradientCheck], tuple[()]]:
        """A copied or saved model gets hooks that do nothing."""
        return _inactive, ()

    def _seen(self, index: int, like: Tensor) -> Tensor:
        """The norm of the gradient that the optimizer will see, `[1]`."""
        gradient: Tensor | None = self._layers[index][0].weight.grad
        if gradient is None or gradient.is_sparse:
            return like.new_zeros(1)
        return torch.stack([torch.linalg.vector_norm(gradient.to(like.dtype))])

    def _listen_again(self) -> None:
        """The first steps under a GradScaler overflow."""
        if self._attempts < _ATTEMPTS:
            self._listen()

    def _listen(self) -> None:
        self._attempts += 1
        for index, (layer, modules) in enumerate(self._layers):
            call = partial(self._on_forward, index)
            self._handles += [module.register_forward_hook(call, with_kwargs=True) for module in modules]
            if layer.weight.requires_grad:
                self._handles.append(layer.weight.register_hook(partial(self._on_weight, index)))

    def _on_forward(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        weight = module._parameters.get("weight")
        used = self._handles and torch.is_grad_enabled() and output.requires_grad and output.numel()
        if weight is None or not used:
            return
        nested = output.is_nested or any(isinstance(each, Tensor) and each.is_nested for each in args)
        if nested or not self._is_active() or torch.compiler.is_compiling():
            self._left_out.add(index)
            return
        output.register_hook(
            partial(self._on_output, index, [_Call(module, weight, self._padding(index), args, kwargs)])
        )

    def _on_output(self, index: int, calls: list[_Call], gradient: Tensor | None) -> None:
        if gradient is None or not self._handles or not calls:
            return
        if torch.is_grad_enabled() or not self._is_active():  # an inner pass, which the outer one depends on
            self._left_out.add(index)
            return
        with torch.no_grad():
            new = calls.pop().along(gradient)  # popped: the graph may outlive the step, its inputs need not
            self._summed[index] = self._summed[index] + new if index in self._summed else new

    def _on_weight(self, index: int, gradient: Tensor | None) -> None:
        if not self._is_active():  # of a pass that does not count, and may not call the layer
            self._left_out.add(index)
            return
        with torch.no_grad():
            if gradient is not None and not gradient.is_sparse:
                new = self._projected(index, gradient)
                self._actual[index] = self._actual[index] + new if index in self._actual else new

    def _projected(self, index: int, gradient: Tensor) -> Tensor:
        """The gradient along every direction, and its norm, `[DIRECTIONS + 1]`."""
        wide = gradient.flatten().to(torch.promote_types(gradient.dtype, torch.float32))
        along = [
            torch.dot(wide, direction.flatten().to(wide.dtype))
            for direction in _directions(gradient, self._padding(index))
        ]
        return torch.stack([*along, torch.linalg.vector_norm(wide)])

    def _padding(self, index: int) -> int | None:
        """The padding token of the embedding among the modules that share a weight, for all of them."""
        tokens = [getattr(module, "padding_idx", None) for module in self._layers[index][1]]
        return next((token for token in tokens if token is not None), None)


class _Call:
    """A call of a layer, kept until the backward pass reaches it: references, no copies.

    The directions are tried in the backward pass, one after another, so that the first step holds one output
    more than others and not `DIRECTIONS` of every layer.
    """

    def __init__(
        self,
        module: nn.Module,
        weight: Tensor,
        padding: int | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        self._weight, self._padding = weight, padding
        kind = weight.device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def along(self, gradient: Tensor) -> Tensor:
        """<gradient of the output, forward pass with a direction as weight and no bias>, `[DIRECTIONS]`."""
        kind, dtype, enabled = self._autocast
        parameters = self._module._parameters
        own = {name: parameters[name] for name in ("weight", "bias") if parameters.get(name) is not None}
        g = gradient.flatten().to(torch.promote_types(gradient.dtype, torch.float32))
        products = []
        try:
            for name in own:
                parameters[name] = None
            for direction in _directions(self._weight, self._padding):
                parameters["weight"] = direction  # type: ignore[assignment]  # in its place
                with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
                    output = self._module.forward(*self._args, **self._kwargs)
                products.append(torch.dot(g, output.flatten().to(g.dtype)))
        finally:
            parameters.update(own)
        return torch.stack(products)


def _inactive() -> GradientCheck:
    check = GradientCheck.__new__(GradientCheck)
    check._handles = []
    return check


def _directions(like: Tensor, padding: int | None) -> list[Tensor]:
    """Fixed directions of elements in [-1, 1), the same in every call, without the process's random numbers.

    Hashes of integers, whose last bit no library rounds. An embedding's padding token, which its calls give
    no gradient, has zeros.
    """
    place = torch.arange(like.numel(), device=like.device, dtype=torch.int32).view(like.shape)
    directions = []
    for each in range(DIRECTIONS):
        mixed = place + (each + 1) * 0x1E3779B9
        for _ in range(2):
            mixed = mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF)).mul_(0x45D9F3B)  # modulo 2^32
        direction = mixed.bitwise_and_(0xFFFFFF).float().div_(1 << 23).sub_(1).to(like.dtype)
        if padding is not None:
            direction.narrow(0, padding, 1).zero_()
        directions.append(direction)
    return directions


def _mismatches(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    patterns = tuple(f"{name}$" for name in names[:4])
    advice = f"; exclude it: skip={patterns}" if all(names) else ""
    return [
        f"K-FAC: the gradient of {listed_layers(names)} is not the sum over the calls of the layer: its "
        "weight is also used without calling the layer, or a hook changes the gradients between; the factors "
        f"are of another function{advice}"
    ]


def _scale_warnings(ratio: float, scale: float | None, *, alone: bool) -> list[str]:
    """Where the optimizer's gradient has `ratio` times the norm of the backward pass's.

    An average over P ranks may be smaller than a rank's own by a factor of P.
    """
    if scale is not None:
        if scale <= _LEAST_SCALE or ratio * scale < sqrt(scale):
            return []
        return [
            f"K-FAC: the gradients still have the GradScaler's loss scale {scale:g}: call "
            "scaler.unscale_(optimizer) before kfac.step()"
        ]
    power = -log2(ratio) if ratio > 0 else 0.0
    if alone and 2**power > _LEAST_SCALE and abs(power - round(power)) < _POWER_OF_TWO:
        return [
            f"K-FAC: the gradients are 1/{2 ** round(power):g} of what the backward pass gave, as of a "
            "scaled loss; the factors are of the scaled one: pass KFAC(grad_scaler=scaler)"
        ]
    return []
