"""Hooks on a model's layers that sum the statistics of their factors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core.grams import Gram, Rows, dense, trace
from kfac_core.layers import KroneckerLayer, ProjectionLayer, TiedEmbeddingLayer
from kfac_core.layers.layer import is_sharded, strided
from kfac_core.loss_terms import ForwardPass, LossTerms, call_of, other_layers, output_of
from kfac_core.matmul import tf32_products
from kfac_core.packing import Packed, packed

_ALL = slice(None)
_NOTHING = torch.empty(0)
_NO_BACKWARD = -1  # torch's graph task id outside of any backward pass


class Capture:
    """Forward hooks on every layer; on steps with a factor update also a hook on each output's gradient.

    A call counts only once its gradient has arrived. Forward passes without a backward pass, layers that the
    loss does not depend on, and the second forward pass of activation checkpointing therefore add nothing.
    Every backward pass counts while `is_active`. On a copy of the model the hooks do nothing.

    Args:
        model: the model whose forward passes are counted, without wrappers.
        layers: all layers, in the order of `statistics`.
        captured: positions of the layers whose factors include this rank's batch; others get no hook.
        packed_early: factors whose grams are sent to other ranks; they are packed as soon as computed.
        dtype: dtype of the sums, at least float32.
        is_active: called in every forward and backward pass: whether it is captured. False costs one call per
            layer.
        on_stale: called in a forward pass if a weight has changed since its statistics were taken, before the
            new ones are: `forget_backward_passes` has to follow.
        timed: a context for each computation of a gram, from the layer's position.
        loss_scale: returns the factor by which the loss, and so every gradient, is scaled up, as a tensor
            where reading it would wait for the device; called once between two clearings.
        is_last: called in every forward pass: whether it is the last one before the sums are used.
        on_gradient: called after every gradient with the layer's position and whether its sums are complete:
            the gradient belongs to a last forward pass and no other one is pending. None for no callback.
        captured_share: of a step's loss terms, those of the backward passes that are captured.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[KroneckerLayer],
        captured: Iterable[int],
        packed_early: Container[tuple[int, str]],
        dtype: torch.dtype,
        is_active: Callable[[], bool],
        on_stale: Callable[[], None],
        timed: Callable[[int], AbstractContextManager[None]],
        loss_scale: Callable[[], float | Tensor],
        is_last: Callable[[], bool],
        on_gradient: Callable[[int, bool], None] | None,
        captured_share: float,
    ) -> None:
        self._count = len(layers)
        self._layers = list(layers)  # and after them the heads of tied embeddings
        self._head_of: dict[int, int] = {}
        self._owner: dict[int, int] = {}  # of a head: its embedding
        self._packed_early = packed_early
        self._dtype = dtype
        self._is_active, self._on_stale = is_active, on_stale
        self._timed = timed
        self._loss_scale = loss_scale
        self._is_last, self._callback = is_last, on_gradient
        for index, layer in enumerate(layers):
            if isinstance(layer, TiedEmbeddingLayer):
                layer.head.grams = layer.grams
                self._head_of[index] = len(self._layers)
                self._owner[len(self._layers)] = index
                self._layers.append(layer.head)
        self.loss_terms = LossTerms(layers, model, captured_share)
        # fully_shard gathers weights anew in each pass
        self._watched = {index for index, layer in enumerate(self._layers) if not is_sharded(layer.weight)}
        self.clear()
        observed: list[tuple[int, ProjectionLayer]] = []
        self._handles: list[Any] = []
        captured = list(captured)
        for index in captured:
            layer = layers[index]
            if isinstance(layer, ProjectionLayer):
                observed.append((index, layer))
                continue
            hook = partial(self._on_forward, index)
            self._handles.append(layer.module.register_forward_hook(hook, with_kwargs=True))
            for head in layer.heads if isinstance(layer, TiedEmbeddingLayer) else ():
                hook = partial(self._on_forward, self._head_of[index])
                self._handles.append(head.register_forward_hook(hook, with_kwargs=True))
        if observed:
            self._handles += Listener(observed, is_active, self._on_product).handles
        self._handles += self._observe_others(model, [layers[index] for index in captured])
        self._handles += [
            model.register_forward_pre_hook(self._on_model, with_kwargs=True),
            model.register_forward_hook(self._on_output),
        ]

    def clear(self) -> None:
        """Discard all sums, and what is known of the passes."""
        self.in_eval = False  # whether a pass with gradients was left out, because a layer was in eval mode
        self.loss_terms.clear()
        self.forget_backward_passes()

    def forget_backward_passes(self) -> None:
        """Discard all sums; the forward pass that goes on counts."""
        self.loss_terms.forget_backward_passes()
        self._versions: dict[int, tuple[int, int]] = {}  # weights and theirs, when statistics were taken
        self.statistics = [
            Statistics(layer.config.loss_reduction, self.loss_terms, index)
            for index, layer in enumerate(self._layers)
        ]
        self._scale: float | Tensor | None = None

    def join_ties(self, like: Tensor, all_reduce: Callable[[Tensor], object]) -> None:
        """Make one contribution of the uses of each tied weight; every rank calls it before it sends."""
        if self._head_of:
            ties = [(self.statistics[index], self.statistics[head]) for index, head in self._head_of.items()]
            for index, both in zip(self._head_of, joined(ties, like, all_reduce), strict=True):
                self.statistics[index] = both

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> tuple[Callable[[], Capture], tuple[()]]:
        """A copied or saved model gets hooks that do nothing: K-FAC stays with the original."""
        return _inactive, ()

    def _observe_others(self, model: nn.Module, captured: Sequence[KroneckerLayer]) -> list[Any]:
        """Hooks on layers that are not captured here: a loss may be made of the output of one."""
        others = other_layers(model, captured)
        return [module.register_forward_hook(partial(self._on_other, is_last)) for module, is_last in others]

    def _on_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A pass without gradients is no training pass; a reentrant checkpoint repeats its own with them."""
        if self._is_active() and module.training and torch.is_grad_enabled():
            self.loss_terms.begin([*args, *kwargs.values()])
        else:
            self.loss_terms.begin_other()

    def _on_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.loss_terms.end(output)

    def _on_other(self, is_last: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A call of a layer that is not captured. In compiled code only the last one ends a graph."""
        forward = self.loss_terms.current
        if forward is None or (torch.compiler.is_compiling() and not is_last):
            return
        found = output_of(module, output)
        if found is None or not (self.loss_terms.is_running or self._is_active()):
            return
        recomputed = torch._C._current_graph_task_id() != _NO_BACKWARD
        if recomputed or not forward.is_over:
            forward.call(call_of(module, found, recomputed=recomputed))

    def _on_forward(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if not (torch.is_grad_enabled() and output.requires_grad and self._is_active()):
            return
        self.in_eval |= not module.training
        layer = self._layers[index]
        if not (module.training and layer.is_trained and output.numel()):
            # in eval mode or frozen for a while; or no rows, as in an expert without tokens
            self._on_other(False, module, args, output)
            return
        inputs: Tensor = args[0] if args else next(iter(kwargs.values()))
        if strided(inputs) is not None and strided(output) is not None:
            self._on_product([(index, _ALL)], inputs, output)

    def _on_product(self, used: Sequence[tuple[int, slice]], inputs: Tensor, output: Tensor) -> None:
        """A call of layers that share an input, each with its part of the output's last dimension."""
        task = torch._C._current_graph_task_id()
        if task == _NO_BACKWARD and any(self._has_changed(index) for index, _ in used):
            self._on_stale()
        forward = self.loss_terms.of_layer(recomputed=task != _NO_BACKWARD)
        grams: dict[bool, Gram] = {}
        plain = _strided(output)
        for index, part in used:
            layer = self._layers[index]
            own = layer.arranged(_strided(inputs), forward.batch)
            counts = self._counts(layer, own, layer.arranged(_columns(plain, part), forward.batch))
            forward.call(call_of(layer.module, plain, recomputed=task != _NO_BACKWARD))
            a_gram = partial(self._input_gram, index, counts.kept(own), grams)
            # A checkpoint recomputes the call. Only a reentrant one, whose first pass ran without gradients,
            # sends a gradient through the recomputed call, so its gram is computed when one arrives.
            if task == _NO_BACKWARD:
                a_gram = partial(_identity, a_gram())
            first = task == _NO_BACKWARD  # a recomputed call gets no gradient, or one that cannot be foreseen
            self.statistics[index].pending_calls += first
            observed = _PendingCall(task, a_gram, counts, forward, part, first and self._is_last())
            output.register_hook(partial(self._on_gradient, index, observed))

    def _on_gradient(self, index: int, call: _PendingCall, gradient: Tensor | None) -> None:
        if not self._is_active():  # an inner backward pass in `KFAC.paused`; the outer one follows
            return
        statistics, layer, task = self.statistics[index], self._layers[index], call.task
        if torch.is_grad_enabled():
            self.loss_terms.inner.add(torch._C._current_graph_task_id())
        if task == _NO_BACKWARD:  # a checkpoint's own backward pass counts as part of the outer one
            task = torch._C._current_graph_task_id()
            statistics.pending_calls -= 1
        with torch.no_grad(), full_precision(gradient if gradient is not None else _NOTHING):
            if gradient is not None:  # None: later operations gave the output no gradient
                own, counts = _columns(_strided(gradient), call.part), call.counts
                g = layer.arranged(own, call.forward.batch)
                grams = call.a_gram(), self._output_gram(index, counts.kept(g))
                numbers = counts.counted_rows, counts.examples, counts.batch
                statistics.add(Call(task, call.forward, *grams, *numbers))
                if index in self._watched and layer.lost() is None:
                    self._versions[index] = id(layer.weight), layer.weight._version
            if self._callback is not None and index < self._count:
                alone = index not in self._head_of  # a tie is joined, and sent, at the step
                self._callback(index, alone and call.is_last and statistics.pending_calls <= 0)

    def has_changed(self) -> bool:
        """Whether an optimizer has changed any weight since its statistics were taken."""
        return any(map(self._has_changed, self._versions))

    def _has_changed(self, index: int) -> bool:
        """Whether an optimizer has changed a weight since its statistics were taken."""
        layer, (weight, version) = self._layers[index], self._versions.get(index, (0, 0))
        # `torch.func.functional_call` puts other tensors in the weight's place
        return layer.lost() is None and id(layer.weight) == weight and layer.weight._version != version

    def _counts(self, layer: KroneckerLayer, inputs: Tensor, output: Tensor) -> _Counts:
        """Examples and rows of one call, and how many examples of it enter the statistics."""
        batch, rows = layer.count(inputs, output)
        fraction = layer.config.factor_batch_fraction
        examples = batch if fraction == 1.0 else max(1, round(batch * fraction))
        return _Counts(examples, batch, rows, layer.batch_dim(output))

    def _input_gram(self, index: int, inputs: Tensor, known: dict[bool, Gram]) -> Gram | Packed:
        """The gram of an input; `known` are those of this input with and without a bias."""
        layer = self._layers[index]
        with self._timed(self._owner.get(index, index)), torch.no_grad(), full_precision(inputs):
            if layer.has_bias not in known or layer.is_diagonal("a"):
                known[layer.has_bias] = layer.input_gram(self._cast(index, inputs))
            return self._early(index, "a", known[layer.has_bias])

    def _output_gram(self, index: int, gradient: Tensor) -> Gram | Packed:
        if self._scale is None:
            self._scale = self._loss_scale()
        with self._timed(self._owner.get(index, index)):
            g = self._cast(index, gradient)
            if not isinstance(self._scale, Tensor):
                return self._gram(index, "g", g if self._scale == 1.0 else g / self._scale)
            if g.dtype != torch.float16:
                return self._gram(index, "g", g / self._scale)
            # Without its scale it would lose small numbers. Its largest squares are far from those of
            # float32.
            return _divided(self._gram(index, "g", g), self._scale.square())

    def _gram(self, index: int, kind: str, tensor: Tensor) -> Gram | Packed:
        return self._early(index, kind, self._layers[index].output_gram(tensor))

    def _early(self, index: int, kind: str, total: Gram) -> Gram | Packed:
        """A gram as it is kept: one that is sent is packed at once."""
        if isinstance(total, Rows):  # fewer elements than a triangle; later multiplied straight into place
            return total
        early = (index, kind) in self._packed_early and index not in self._head_of
        return packed(total) if early else total

    def _cast(self, index: int, tensor: Tensor) -> Tensor:
        """In the sums' dtype; on a GPU a layer casts as it copies."""
        keeps = self._layers[index].grams is not None or not tensor.is_floating_point()
        return tensor if keeps else tensor.to(self._dtype)


class _PendingCall(NamedTuple):
    """One call of a layer whose gradient has not arrived."""

    task: int
    a_gram: Callable[[], Gram | Packed]
    counts: _Counts
    forward: ForwardPass
    part: slice
    is_last: bool


class _Counts(NamedTuple):
    """One call of a layer: how many of its examples count, of how many; and all its rows."""

    examples: int
    batch: int
    rows: int
    dim: int

    @property
    def counted_rows(self) -> int:
        """Rows of the examples that count."""
        return self.rows * self.examples // self.batch

    def kept(self, tensor: Tensor) -> Tensor:
        """The part of an input or gradient that counts."""
        return tensor.narrow(self.dim, 0, self.examples) if self.examples < self.batch else tensor


def is_captured(module: nn.Module) -> bool:
    """Whether an active `Capture` has a hook on this module; one that was copied with it is inactive."""
    owners = [
        getattr(getattr(hook, "func", hook), "__self__", None) for hook in module._forward_hooks.values()
    ]
    return any(
        (isinstance(owner, Capture) and owner._is_active is not _never)
        or (isinstance(owner, Listener) and not owner.is_copy)
        for owner in owners
    )


def _inactive() -> Capture:
    capture = Capture.__new__(Capture)
    capture._is_active, capture.loss_terms = _never, LossTerms.__new__(LossTerms)  # without a pass
    return capture


def _never() -> bool:
    return False


def _divided(total: Gram | Packed, divisor: Tensor) -> Gram | Packed:
    """A new gram over a number, in its memory."""
    (total.triangle if isinstance(total, Packed) else total.rows if isinstance(total, Rows) else total).div_(
        divisor
    )
    return total


def _identity(gram: Gram | Packed) -> Gram | Packed:
    return gram


def _columns(tensor: Tensor, part: slice) -> Tensor:
    return tensor if part == _ALL else tensor[..., part]


def _strided(tensor: Tensor) -> Tensor:
    rows = strided(tensor.detach())
    assert rows is not None  # noqa: S101  `_on_forward` leaves others out
    return rows


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast and TF32, which would compute products in lower precision."""
    if tensor.is_cuda:
        return _on_gpu(tensor)
    return _without_autocast(tensor.device.type)


@contextmanager
def _on_gpu(tensor: Tensor) -> Iterator[None]:
    with _without_autocast(tensor.device.type), tf32_products(tensor, allowed=False):
        yield


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Nothing where it is off: entering the context takes longer than the operations of a small layer."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


# ------------------------------------------------------------
# Observes `functional.linear` while a module runs that applies its weights without modules of their own.


Observe = Callable[[Sequence[tuple[int, slice]], Tensor, Tensor], None]
"""Takes layers with their columns of the output, the input, and the output."""


class Listener:
    """Replaces `functional.linear` during the forward passes of modules that call it.

    A mode of `torch.overrides` would be told of attention as a whole, not of the products inside it. The
    function is replaced once for all listeners, each of which is told of the calls of its own thread.

    Args:
        layers: positions and layers, of any number of host modules.
        is_active: asked at the start of each forward pass.
        observed: told of every product of a layer's weight.
    """

    def __init__(
        self, layers: Sequence[tuple[int, ProjectionLayer]], is_active: Callable[[], bool], observed: Observe
    ) -> None:
        self._is_active, self._observe = is_active, observed
        self._of_host: dict[int, list[tuple[int, ProjectionLayer]]] = {}
        for index, layer in layers:
            self._of_host.setdefault(id(layer.host), []).append((index, layer))
        self._of_weight: dict[int, list[tuple[int, ProjectionLayer]]] = {}
        self._running = threading.local()  # its `hosts`, whose forward passes go on, inside of each other
        hosts = {id(layer.host): layer.host for _, layer in layers}.values()
        self.handles = [
            handle
            for host in hosts
            for handle in (
                host.register_forward_pre_hook(self._start),
                host.register_forward_hook(self._stop, always_call=True),
            )
        ]

    def __reduce__(self) -> tuple[Callable[[], Listener], tuple[()]]:
        """A copied or saved model gets hooks that do nothing."""
        return _no_listener, ()

    @property
    def is_copy(self) -> bool:
        """Whether this does nothing, as a copy."""
        return not self._of_host

    def _start(self, module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled() and self._is_active():
            hosts = self._hosts()
            if not hosts:
                self._of_weight = {}
                _PRODUCTS.add(self)
            hosts.append(module)
            self._of_weight |= _by_weight(self._of_host[id(module)])  # fully_shard puts others in their place

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        hosts = self._hosts()
        if hosts and hosts[-1] is module:
            hosts.pop()
            if not hosts:
                _PRODUCTS.remove(self)

    def _hosts(self) -> list[nn.Module]:
        hosts: list[nn.Module] = self._running.__dict__.setdefault("hosts", [])
        return hosts

    def tell(self, input: Tensor, weight: Tensor, output: Tensor) -> None:
        """A product in this thread, of any weight."""
        used = self._layers_of(weight)
        if used and output.requires_grad and output.numel():
            self._observe(used, input, output)

    def _layers_of(self, weight: Tensor) -> list[tuple[int, slice]]:
        """The layers whose rows lie in this weight, or view of one, with their columns of the output."""
        whole = weight._base if weight._base is not None else weight
        layers = self._of_weight.get(id(whole))
        if not layers or weight.ndim != 2 or weight.stride() != (whole.shape[-1], 1):
            return []
        first = (weight.storage_offset() - whole.storage_offset()) // whole.shape[-1]
        return [
            (index, slice(layer.rows[0] - first, layer.rows[1] - first))
            for index, layer in layers
            if layer.rows[0] >= first and layer.rows[1] <= first + len(weight) and layer.is_trained
        ]


class _Products:
    """Stands in for `functional.linear` while any listener listens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[int, list[Listener]] = {}  # by thread
        self._plain = functional.linear

    def add(self, listener: Listener) -> None:
        with self._lock:
            if not self._listeners:
                self._plain, functional.linear = functional.linear, self
            self._listeners.setdefault(threading.get_ident(), []).append(listener)

    def remove(self, listener: Listener) -> None:
        with self._lock:
            mine = self._listeners.get(threading.get_ident(), [])
            if listener in mine:
                mine.remove(listener)
            if not mine:
                self._listeners.pop(threading.get_ident(), None)
            if not self._listeners and functional.linear is self:
                functional.linear = self._plain

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = self._plain(input, weight, bias)
        for listener in self._listeners.get(threading.get_ident(), ()):
            listener.tell(input, weight, output)
        return output


_PRODUCTS = _Products()


def _by_weight(layers: Sequence[tuple[int, ProjectionLayer]]) -> dict[int, list[tuple[int, ProjectionLayer]]]:
    found: dict[int, list[tuple[int, ProjectionLayer]]] = {}
    for index, layer in layers:
        found.setdefault(id(layer.weight), []).append((index, layer))
    return found


def _no_listener() -> Listener:
    return Listener([], bool, _ignore)


def _ignore(used: Sequence[tuple[int, slice]], inputs: Tensor, output: Tensor) -> None:
    """Nobody is told."""


# ------------------------------------------------------------
# Sums of outer products that the hooks collect between two factor updates.


@dataclass(frozen=True)
class Call:
    """Sums over one call of a layer in a backward pass; several calls of one module count as positions.

    Attributes:
        task: of the backward pass.
        forward: the forward pass that the call belongs to.
        rows: in both sums.
        examples: that the layer itself counts in them.
        batch: that the layer counts in all; more where only part of the batch counts.
    """

    task: int
    forward: ForwardPass
    a_gram: Gram | Packed
    g_gram: Gram | Packed
    rows: int
    examples: int
    batch: int


class Share(NamedTuple):
    """`scale * gram`: a rank's contribution to a factor, before `factor_scale` of all ranks."""

    gram: Gram | Packed
    scale: float


class Statistics:
    """One layer's sums over the backward passes since the last `Capture.clear`.

    Args:
        layer: its position, by which loss terms may be stated.

    Attributes:
        rows: rows in the sums on this rank.
        pending_calls: calls whose gradient has not arrived.
    """

    def __init__(self, loss_reduction: str, loss_terms: LossTerms, layer: int) -> None:
        self.rows = self.pending_calls = 0
        self._layer = layer
        self._reduction, self._loss_terms = loss_reduction, loss_terms
        self._a_gram: Gram | Packed | None = None
        self._g_gram: Gram | Packed | None = None
        self._own: dict[int, tuple[int, int]] = {}  # by pass, where only the layer itself counts

    def add(self, call: Call) -> None:
        """Add one call; its grams are not modified, as a retained graph may use them again.

        A pass without examples adds nothing, also of a layer that does not see the batch, as one of
        positions.
        """
        if call.forward.is_empty:
            return
        if not self._loss_terms.count(call.task, call.forward):
            examples, batch = self._own.get(call.task, (0, 0))
            self._own[call.task] = max(examples, call.examples), max(batch, call.batch)
        self._a_gram, self._g_gram = _sum(self._a_gram, call.a_gram), _sum(self._g_gram, call.g_gram)
        self.rows += call.rows

    @property
    def terms(self) -> float:
        """This rank's loss terms whose gradients would be in the sums, also if the layer saw none of them."""
        return self._loss_terms.totals(self._layer)[0] + sum(examples for examples, _ in self._own.values())

    def shares(self) -> tuple[Share, Share] | None:
        """This rank's contributions to (A, G); None without statistics.

        With a mean loss, a loss term's own gradient is N times what it contributes to the mean's, so that G
        is scaled by N^2.
        """
        if self._a_gram is None or self._g_gram is None:
            return None
        own = self._loss_terms.of_all_passes(sum(batch for _, batch in self._own.values()))
        terms = self._loss_terms.totals(self._layer)[1] + own
        return Share(self._a_gram, 1.0), Share(
            self._g_gram, float(terms) ** 2 if self._reduction == "mean" else 1.0
        )

    def share(self, kind: Literal["a", "g"]) -> Share | None:
        """This rank's contribution to A or G; None without statistics."""
        shares = self.shares()
        return shares[kind == "g"] if shares is not None else None


def factor_scale(kind: Literal["a", "g"], terms: float, rows: float) -> float:
    """What the sums of all ranks are multiplied by, from all their loss terms N and rows M.

    A is multiplied by 1 / (N S max(S, 1)) and G by max(S, 1) / N, with S = M / N positions a term. The
    product, 1 / (N M), is the definition. For S >= 1 the two are those of SC20; below, as of an expert that
    sees a part of the tokens, A is the mean over the rows that there are, whose number varies.
    """
    more = max(rows / terms, 1.0)
    return 1.0 / (rows * more) if kind == "a" else more / terms


def factor_scales(kind: str, terms: Tensor, rows: Tensor) -> Tensor:
    """`factor_scale` of many factors on the device; 0 where there are no rows, or no loss terms."""
    more = (rows / terms).clamp_min_(1)
    scale = (rows * more).reciprocal_() if kind == "a" else more.div_(terms)
    return torch.where(rows.minimum(terms) > 0, scale, 0)


def _sum(before: Gram | Packed | None, new: Gram | Packed) -> Gram | Packed:
    """The sum of both; packed if one of them is."""
    if before is None:
        return new
    if isinstance(before, Packed) or isinstance(new, Packed):
        return Packed(torch.add(packed(before).triangle, packed(new).triangle))
    return torch.add(dense(before), dense(new))


# ------------------------------------------------------------
# Joins the statistics of an embedding and of the output layer that shares its weight.
#
# Each use k is a Kronecker product U_k x W_k of a factor over the words and one over the features. Their
# sum is none; the product with the same partial traces is
#
#     A = sum_k U_k tr(W_k) / t        G = sum_k W_k tr(U_k)        t = sum_k tr(U_k) tr(W_k)
#
# It has the trace of the sum, does not depend on how a use's scale is split between its factors, and is a
# use's own block where there is no other.


class JoinedStatistics(Statistics):
    """The final contribution of this rank to A and G, as of one loss term and row a rank."""

    def __init__(self, a: Tensor | None, g: Tensor | None) -> None:
        self.rows, self.pending_calls = int(a is not None), 0
        self._shares = (Share(a, 1.0), Share(g, 1.0)) if a is not None and g is not None else None

    @property
    def terms(self) -> float:
        """One, if there are any."""
        return float(self.rows)

    def shares(self) -> tuple[Share, Share] | None:
        """As they are."""
        return self._shares

    def share(self, kind: Literal["a", "g"]) -> Share | None:
        """One of them."""
        return None if self._shares is None else self._shares[kind == "g"]


def joined(
    ties: Sequence[tuple[Statistics, Statistics]], like: Tensor, all_reduce: Callable[[Tensor], object]
) -> list[JoinedStatistics]:
    """Of each embedding and its head, by the traces of all ranks: every rank calls it.

    `like` has the dtype and device of the sums.
    """
    uses = [(_factors(embedding, 0), _factors(head, 1)) for embedding, head in ties]
    numbers = like.new_zeros(len(ties), 8)  # two traces and the rows of either use; loss terms, ranks
    for row, tie, both in zip(numbers, ties, uses, strict=True):
        for place, (statistics, factors) in enumerate(zip(tie, both, strict=True)):
            if factors is not None:
                row[3 * place], row[3 * place + 1] = trace(factors[0]), trace(factors[1])
                row[3 * place + 2].fill_(statistics.rows)
        row[6].fill_(max(statistics.terms for statistics in tie))
        row[7].fill_(any(factors is not None for factors in both))
    all_reduce(numbers)
    return [_joined(row, both) for row, both in zip(numbers, uses, strict=True)]


def _factors(statistics: Statistics, words: int) -> tuple[Tensor, Tensor] | None:
    """The factors over the words and over the features; the words are a use's inputs (0) or outputs (1)."""
    shares = statistics.shares()
    if shares is None:
        return None
    both = []
    for share in shares:
        assert not isinstance(share.gram, Packed)  # noqa: S101  a tie's are not packed before they are joined
        both.append(dense(share.gram) * share.scale)
    return both[words], both[1 - words]


def _joined(numbers: Tensor, uses: Sequence[tuple[Tensor, Tensor] | None]) -> JoinedStatistics:
    """This rank's part of A and G from the numbers of all ranks."""
    traces = numbers[:6].view(2, 3)
    terms, ranks = numbers[6], numbers[7]
    words, features, rows = traces.unbind(1)
    weights = torch.where(rows * terms > 0, 1 / (rows * terms), 0)
    total = (weights * words * features).sum().clamp_min(torch.finfo(numbers.dtype).tiny)
    of_words, of_features = weights * features / total * ranks, weights * words * ranks
    a: Tensor | None = None
    g: Tensor | None = None
    for place, use in enumerate(uses):
        if use is not None:
            new_a, new_g = use[0] * of_words[place], use[1] * of_features[place]
            a, g = (new_a, new_g) if a is None or g is None else (a + new_a, g + new_g)
    return JoinedStatistics(a, g)
