"""Gradient matrices of all layers in two flat buffers: averaged, and preconditioned."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from math import inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from kfac_core.collectives import Communicator
from kfac_core.config import Execution
from kfac_core.errors import ConfigError
from kfac_core.layers import KroneckerLayer
from kfac_core.layers.layer import is_sharded
from kfac_core.placement import Placement
from kfac_core.placement.placement import layer_groups

_LEAST_NORM = 1e-30
"""A gradient below it counts as zero: its reciprocal times a norm of millions is a finite float32."""


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
        self._written: list[tuple[weakref.ref[Tensor], int]] = []
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
        if self._batched:
            self._copies_in, self._copies_out = (
                Copies(
                    [
                        view
                        for layer, matrix in zip(layers, each, strict=True)
                        for view in layer.aligned(matrix)
                    ]
                )
                for each in (self._buffers, self.preconditioned)
            )
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
        if self._batched:
            self._copies_in.read(self._gradients())
            return
        pairs = zip(self._layers, self._buffers, strict=True)
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

    def graft(self, fixed: float | None) -> None:
        """Give every layer's preconditioned gradient the norm of its averaged gradient; zero stays zero.

        With `fixed`, the norm is that number times the root of the layer's outputs (`KFACConfig.fixed_norm`).
        """
        given = torch._foreach_norm([each.flatten() for each in self.preconditioned])
        if fixed is None:
            wanted = torch._foreach_norm([each.flatten() for each in self.raw])
            torch._foreach_clamp_min_(given, torch.finfo(self._raw.dtype).tiny)
            torch._foreach_div_(wanted, given)
        else:
            torch._foreach_clamp_min_(given, _LEAST_NORM)
            wanted = torch._foreach_reciprocal(given)
            torch._foreach_mul_(wanted, [fixed * sqrt(each.numel() / each.shape[-1]) for each in self.raw])
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
        if self._batched:
            self._copies_out.write(self._gradients())
        else:
            targets = [
                pair
                for layer, matrix in zip(self._layers, self.preconditioned, strict=True)
                for pair in layer.gradient_targets(matrix)
            ]
            torch._foreach_copy_([gradient for gradient, _ in targets], [value for _, value in targets])
        self._sharded.scatter()
        self.raw = list(self._buffers)  # else the parameters' gradients would outlive `zero_grad`
        self._written = [(weakref.ref(gradient), gradient._version) for gradient in self._of_parameters()]

    def are_as_written(self) -> bool:
        """Whether no gradient has changed since the last `write`, so that `read` would get its results."""
        now = list(self._of_parameters())
        return len(now) == len(self._written) > 0 and all(
            before() is gradient and version == gradient._version
            for gradient, (before, version) in zip(now, self._written, strict=True)
        )

    def has_changed(self, parameter: Tensor, times: int) -> bool:
        """Whether the parameter's gradient is that of the last `write`, changed so often since."""
        gradient = parameter.grad
        return gradient is not None and any(
            before() is gradient and version + times == gradient._version for before, version in self._written
        )

    def _of_parameters(self) -> Iterator[Tensor]:
        for layer in self._layers:
            for parameter in layer.parameters():
                if (gradient := layer.gradient_of(parameter)) is not None:
                    yield gradient

    def _gradients(self) -> list[Tensor | None]:
        return [gradient for layer in self._layers for gradient in layer.gradients()]


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


# ------------------------------------------------------------
# The kl-clip: bounds how far one step moves the predictions of the model (SC20, KAISA).


def kl_clip_scale(size: Tensor, lr: float, kl_clip: float) -> Tensor:
    """The factor nu = min(1, sqrt(kl_clip / |lr^2 change|)) for all layers.

    It stays on the device, so that the host does not wait for it.

    Args:
        size: absolute sum over layers of <preconditioned gradient, gradient>, without dimensions.
        lr: learning rate of the step.
        kl_clip: bound on the predicted KL divergence, kappa in the papers.
    """
    return (size * (lr**2 / kl_clip)).rsqrt().clamp_max(1.0)


# ------------------------------------------------------------
# Gradients that fully_shard (FSDP2) divides among ranks: whole for K-FAC, in parts for the optimizer.


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


# ------------------------------------------------------------
# Copies of many tensors with few launches.


class Copies:
    """Copies between the gradients of parameters and views of a buffer, which are fixed.

    `_foreach_copy_` is one launch for all pairs only if both tensors of each are laid out alike and dense.
    Those of other pairs, as a matrix whose rows end in the bias, or a gradient in channels-last order, pass
    through a dense tensor for all pairs of a layout, if the views lie evenly spaced in memory. What goes how
    is planned once for a layout of the gradients.

    Args:
        views: one for each parameter, of the shape of its gradient or of one that the gradient is viewed as.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        self._shapes = [view.shape for view in views]
        self._views = [view.squeeze() for view in views]
        self._layout: list[tuple[tuple[int, ...], torch.dtype] | None] = []
        self._direct: dict[torch.dtype, list[int]] = {}
        self._spaced: list[tuple[list[int], Tensor]] = []
        self._alone: list[int] = []

    def read(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy the gradients to the views; zeros where there is none."""
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
        own = self._planned(gradients)
        passed = [(_dense([own[place] for place in places]), whole, places) for places, whole in self._spaced]
        self._together(own, passed, to_views=True)
        for dense, whole, _ in passed:
            whole.copy_(dense)
        for place in self._alone:
            self._views[place].copy_(own[place])

    def write(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy the views to the gradients that exist."""
        own = self._planned(gradients)
        passed = [(_dense([own[place] for place in places]), whole, places) for places, whole in self._spaced]
        for dense, whole, _ in passed:
            dense.copy_(whole)
        self._together(own, passed, to_views=False)
        for place in self._alone:
            own[place].copy_(self._views[place])

    def _together(
        self, own: dict[int, Tensor], passed: list[tuple[Tensor, Tensor, list[int]]], *, to_views: bool
    ) -> None:
        pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {
            dtype: ([self._views[place] for place in places], [own[place] for place in places])
            for dtype, places in self._direct.items()
        }
        for dense, _, places in passed:
            here, there = pairs.setdefault(dense.dtype, ([], []))
            here += dense.unbind()
            there += [own[place] for place in places]
        for here, there in pairs.values():
            torch._foreach_copy_(*((here, there) if to_views else (there, here)))

    def _planned(self, gradients: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """The gradients that exist, without dimensions of one element, after a plan for their layout."""
        layout = [None if each is None else (each.stride(), each.dtype) for each in gradients]
        own = {
            place: (each if each.shape == shape else each.view(shape)).squeeze()
            for place, (each, shape) in enumerate(zip(gradients, self._shapes, strict=True))
            if each is not None
        }
        if layout == self._layout:
            return own
        self._layout, self._direct, self._spaced, self._alone = layout, {}, [], []
        alike: dict[tuple[object, ...], list[int]] = {}
        for place, gradient in own.items():
            view = self._views[place]
            same = view.stride() == gradient.stride() and view.dtype == gradient.dtype
            if same and torch.ops.aten.is_non_overlapping_and_dense(view):
                self._direct.setdefault(view.dtype, []).append(place)
            else:
                key = view.shape, view.stride(), gradient.stride(), gradient.dtype
                alike.setdefault(key, []).append(place)
        for places in alike.values():
            whole = evenly_spaced([self._views[place] for place in places]) if len(places) > 1 else None
            if whole is None:
                self._alone += places
            else:
                self._spaced.append((places, whole))
        return own


def evenly_spaced(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors of one shape and layout as one view with a leading dimension, if one memory holds them."""
    first, *others = tensors
    memory, start = first.untyped_storage()._cdata, first.storage_offset()
    step = others[0].storage_offset() - start if others else first.numel()
    for place, tensor in enumerate(tensors):
        if tensor.untyped_storage()._cdata != memory or tensor.storage_offset() != start + place * step:
            return None
    if step <= 0:
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), start)


def _dense(like: Sequence[Tensor]) -> Tensor:
    """Memory for tensors that are laid out like the first of these, one after another."""
    first = like[0]
    strides = torch.empty_like(first, device="meta").stride()  # dense, in the order of its dimensions
    return first.new_empty_strided((len(like), *first.shape), (first.numel(), *strides))


def adjacent_runs(tensors: Sequence[Tensor]) -> list[slice]:
    """The longest runs of contiguous tensors of one size that follow each other in memory."""
    runs: list[slice] = []
    for place, tensor in enumerate(tensors):
        before = tensors[place - 1]
        follows = (
            place > 0
            and tensor.numel() == before.numel()
            and tensor.untyped_storage()._cdata == before.untyped_storage()._cdata
            and tensor.storage_offset() == before.storage_offset() + before.numel()
        )
        if follows:
            runs[-1] = slice(runs[-1].start, place + 1)
        else:
            runs.append(slice(place, place + 1))
    return runs
