"""Guards against mistakes around K-FAC: each names what is wrong, and none makes a device wait."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kfac_core.capture import is_captured
from kfac_core.collectives import Communicator
from kfac_core.collectives.communicator import differing, of_all_ranks
from kfac_core.config import Execution, KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.factors import Key
from kfac_core.gradients import Gradients
from kfac_core.layers import KroneckerLayer, find_layers
from kfac_core.layers.layer import is_sharded, layer_text, listed_layers
from kfac_core.overflow import HostCopy, copy_to_host
from kfac_core.placement import LayerShape
from kfac_core.placement.balance import CostModel
from kfac_core.timing import PhaseTimer

# ------------------------------------------------------------
# What KFAC is given: arguments of another kind, and settings assigned where they have no effect.


_SETTINGS = frozenset(field.name for field in fields(KFACConfig))
_SCHEDULED = frozenset((
    "damping", "relative_damping", "kl_clip", "factor_decay", "factor_update_steps", "inverse_update_steps",
))  # fmt: skip
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType({
    "config": ((KFACConfig,), "a KFACConfig"),
    "cost": ((CostModel,), "a CostModel"),
    "timer": ((PhaseTimer,), "a PhaseTimer"),
    # a number is NON_GROUP_MEMBER, which `connect` names; torch may lack the module
    "process_group": ((getattr(dist, "ProcessGroup", object), int), "a ProcessGroup of torch.distributed"),
    "execution": ((Execution,), "an Execution"),
})  # fmt: skip
ARGUMENTS = frozenset((*_KINDS, "lr", "steps_per_epoch", "grad_scaler", "is_last_pass", "captured_share"))
"""Arguments of `KFAC` by keyword that no attribute changes."""


def refuse_other_kinds(model: object, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of another kind before anything reads them; None stands for a default.

    Raises:
        ConfigError: naming the argument, what it is and what it must be; or a parameter of the model that is
            not initialised yet.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"KFAC: model must be a torch.nn.Module, got a {_kind(model)}: K-FAC needs the layers, not their "
            "parameters"
        )
    for name, (kind, text) in _KINDS.items():
        given = arguments.get(name)
        if given is not None and not isinstance(given, kind):
            hint = "; pass it as lr=" if isinstance(given, torch.optim.Optimizer) else ""
            raise ConfigError(f"KFAC: {name} must be {text}, got a {_kind(given)}{hint}")
    _check_numbers(arguments)
    scaler, last = arguments["grad_scaler"], arguments["is_last_pass"]
    if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
        raise ConfigError(f"KFAC: grad_scaler must be a torch.amp.GradScaler, got a {_kind(scaler)}")
    if last is not None and not _takes_nothing(last):
        raise ConfigError(f"KFAC: is_last_pass must be a callable without arguments, got {_shown(last)}")
    lr = arguments["lr"]
    if callable(lr) and not isinstance(lr, torch.optim.Optimizer) and not _takes_nothing(lr):
        raise ConfigError(
            f"KFAC: lr must be a number, the optimizer or a callable without arguments, got {_shown(lr)}"
        )
    _refuse_lazy(model)


def refuse_other_configs(
    communicator: Communicator, config: KFACConfig, shapes: Sequence[LayerShape], like: Tensor
) -> None:
    """Refuse a config or layers that are not those of the other ranks, which call this at the same time.

    Ranks that disagree would wait for each other forever.

    Raises:
        ConfigError: naming the fields.
    """
    if communicator.world_size == 1:
        return
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    texts = {name: type(each).__name__ if callable(each) else repr(each) for name, each in values.items()}
    names = [*texts, "the model's layers"]
    found = [names[place] for place in differing(communicator, [*texts.values(), repr(shapes)], like)]
    if found:
        own = ", ".join(f"{name}={texts[name]}" if name in texts else name for name in found)
        raise ConfigError(
            f"rank {communicator.rank} has {own}, and other ranks do not: every rank must make the same KFAC"
        )


def refuse_setting(name: str, value: object) -> None:
    """Refuse an assignment to an attribute of KFAC that is a setting: it would have no effect.

    Raises:
        ConfigError: saying how the setting is changed.
    """
    if name not in _SETTINGS | ARGUMENTS or (name == "config" and isinstance(value, KFACConfig)):
        return
    what = f"kfac.{name} = {value!r} would have no effect: settings are fixed when KFAC is made"
    if name == "config":
        raise ConfigError(f"kfac.config must be a KFACConfig, got a {_kind(value)}")
    if name == "lr":
        raise ConfigError(f"{what}; pass lr= the optimizer, or a callable that gives the present rate")
    if name in ARGUMENTS:
        raise ConfigError(f"{what}; pass {name}= to a new KFAC")
    schedule = (
        f"{name} may be a schedule or a function of the step in KFACConfig; or " if name in _SCHEDULED else ""
    )
    raise ConfigError(
        f"{what}; {schedule}make a new KFAC with dataclasses.replace(kfac.config, {name}={value!r}) after "
        "kfac.remove(), and load the state_dict() of this one into it"
    )


def _check_numbers(arguments: Mapping[str, Any]) -> None:
    steps, share, lr = (arguments[name] for name in ("steps_per_epoch", "captured_share", "lr"))
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, Integral) or int(steps) < 1):
        raise ConfigError(f"KFAC: steps_per_epoch={steps!r} must be a whole number of steps >= 1")
    if isinstance(share, bool) or not isinstance(share, Real):
        raise ConfigError(f"KFAC: captured_share={share!r} must be a number in (0, 1]")
    if not 0 < float(share) <= 1:
        raise ConfigError(f"captured_share={share!r} lies outside (0, 1]")
    if isinstance(lr, Real) and (isinstance(lr, bool) or not 0 <= float(lr) < math.inf):
        raise ConfigError(f"KFAC: lr={lr!r} must be a finite number >= 0")


def _refuse_lazy(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"parameter {name} of the model is not initialised yet, as of a lazy module: run one forward "
                "pass before KFAC is made"
            )


def _takes_nothing(function: object) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _kind(value: object) -> str:
    return type(value).__name__


def _shown(value: Callable[..., object] | object) -> str:
    return f"{value!r}" if callable(value) else f"a {_kind(value)}"


# ------------------------------------------------------------
# Whether the model is still the one that K-FAC was made for.


_REMEDY = "call kfac.refresh(), which keeps the factors of layers that did not change"


class ModelChanges:
    """Compares the model with itself at construction: at each step one pass over its parameters, on the host.

    Args:
        model: the model without wrappers.
        layers: those that K-FAC takes.
        device: theirs.
    """

    def __init__(self, model: nn.Module, layers: Sequence[KroneckerLayer], device: torch.device) -> None:
        self._model, self._layers, self._device = model, layers, device
        self._shapes = [layer.weight.shape for layer in layers]
        self._known = {id(p) for p in _parameters(model) if p.requires_grad}
        self._taken = {(layer.name, id(layer.module)): layer.has_bias for layer in layers}
        self._sharded = [is_sharded(layer.weight) for layer in layers]
        uses = Counter(map(id, _parameters(model)))
        self._uses = [uses[id(layer.weight)] for layer in layers]
        self._said: set[str] = set()
        self._seen = self._fingerprint()

    def warnings(self) -> list[str]:
        """Of layers, projections and biases that were added, frozen or unfrozen since; each once.

        Raises:
            ConfigError: a layer that K-FAC takes was replaced, resized, tied, sharded or moved to another
                device, or its weight or bias is computed now.
        """
        fingerprint = self._fingerprint()
        if fingerprint == self._seen:
            return []
        self._check_lost()
        device = self._layers[0].weight.device
        if device != self._device:
            raise ConfigError(
                f"the model was on {self._device} when KFAC was made and is on {device} now: make KFAC "
                "after the model has been moved"
            )
        for layer, shape in zip(self._layers, self._shapes, strict=True):
            if layer.weight.shape != shape:
                raise ConfigError(
                    f"the weight of {layer_text(layer.name)} was {list(shape)} when KFAC was made and is "
                    f"{list(layer.weight.shape)} now: {_REMEDY}"
                )
        self._check_replaced()
        self._check_ties()
        self._check_sharded()
        self._seen = fingerprint
        return self._new() + self._frozen()

    def _check_replaced(self) -> None:
        now = dict(self._model.named_modules(remove_duplicate=False))
        for layer in self._layers:
            name = layer.module_name
            if now.get(name) is not layer.module:
                kind = type(now[name]).__name__ if name in now else "nothing"
                raise ConfigError(
                    f"{layer_text(layer.name)} was replaced by {kind} since KFAC was made: {_REMEDY}"
                )

    def _check_lost(self) -> None:
        for layer in self._layers:
            if (kind := layer.lost()) is not None:
                raise ConfigError(
                    f"the {kind} of {layer_text(layer.name)} was a parameter when KFAC was made and is "
                    "computed now, or gone, as by pruning, weight norm or another parametrisation: make that "
                    "permanent (such as prune.remove), or call kfac.refresh(), which takes the model as it is"
                )

    def _check_ties(self) -> None:
        uses = Counter(map(id, _parameters(self._model)))
        for layer, before in zip(self._layers, self._uses, strict=True):
            if uses[id(layer.weight)] > before:
                raise ConfigError(
                    f"the weight of {layer_text(layer.name)} is tied to another module since KFAC was made: "
                    f"{_REMEDY}"
                )

    def _frozen(self) -> list[str]:
        """Weights or biases that are frozen alone, each once; a whole layer may be frozen for a while."""
        names = []
        for layer in self._layers:
            trained = [parameter.requires_grad for parameter in layer.parameters()]
            if len(set(trained)) > 1:
                names.append(f"the {'bias' if trained[0] else 'weight'} of {layer.name}".strip())
        new = [name for name in names if name not in self._said]
        self._said |= set(new)
        if not new:
            return []
        return [
            f"K-FAC: {listed_layers(new)} frozen since KFAC was made, and still part of the curvature: call "
            "kfac.refresh() to leave it out"
        ]

    def _check_sharded(self) -> None:
        for layer, sharded in zip(self._layers, self._sharded, strict=True):
            if is_sharded(layer.weight) and not sharded:
                raise ConfigError(
                    f"the weight of {layer_text(layer.name)} was sharded since KFAC was made: make KFAC "
                    "after fully_shard"
                )

    def _new(self) -> list[str]:
        """Nothing is searched where each trained parameter is known, as while a generator learns by turns."""
        trained = {id(p) for p in _parameters(self._model) if p.requires_grad}
        new = trained - self._known
        if not new:
            return []
        self._known |= new
        names = []
        for layer in self._now():
            before = self._taken.get((layer.name, id(layer.module)))
            if before is None and any(id(each) in new for each in layer.parameters()):
                names.append(layer.name)
            elif before is False and layer.has_bias:
                names.append(f"the bias of {layer.name}".strip())
        if not names:
            return []
        return [
            f"K-FAC: {listed_layers(names)} added or unfrozen since KFAC was made, and keeps its plain "
            "gradient: call kfac.refresh() to take it"
        ]

    def _now(self) -> list[KroneckerLayer]:
        """The layers that K-FAC would take now; none where a pattern of `skip` has lost its layer."""
        try:
            return find_layers(self._model, self._layers[0].config)
        except ConfigError:
            return []

    def _fingerprint(self) -> list[tuple[object, ...]]:
        return [
            (name, id(each), each.requires_grad, each.shape, each.device)
            for name, each in _named_parameters(self._model)
        ]


def _parameters(model: nn.Module) -> Iterator[Tensor]:
    return (parameter for _, parameter in _named_parameters(model))


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As `Module.parameters`, with repetitions and without their cost; names are those in each module."""
    stack: list[nn.Module] = [model]
    while stack:
        module = stack.pop()
        yield from (one for one in module._parameters.items() if one[1] is not None)  # type: ignore[misc]  # as it says
        stack.extend(child for child in module._modules.values() if child is not None)


# ------------------------------------------------------------
# Whether steps have an effect: gradients that are not finite, a clip that always binds, eval mode.


_SAME = 1e-5  # of the largest norm, far above rounding

SAMPLES = 10
"""Second-order updates in a row at which the kl-clip must bind before it is reported, once."""

_BINDS = 0.5  # a step that is scaled by less is another learning rate


class Progress:
    """Reads a GPU at second-order updates only, and a step later, so that nothing waits.

    Attributes:
        nonfinite_steps: steps whose gradients were not finite on this rank, as far as the host knows.
    """

    def __init__(self) -> None:
        self.nonfinite_steps = 0
        self._binding = self._checked = self._said_nonfinite = 0
        self._largest = 0.0
        self._said_clip = self._said_eval = False
        self._copy: HostCopy | None = None

    def ask(self, checked: int, finite: Tensor, scale: Tensor | None) -> None:
        """Start to copy how many of the steps were finite, and the last factor of the kl-clip."""
        scale = scale if scale is not None else torch.full_like(finite, -1.0)
        self._checked = checked
        self._copy = copy_to_host(torch.stack([finite, scale.to(finite.dtype).reshape(())]).unsqueeze(0))

    def read(self, step: int) -> list[str]:
        """Warnings from what was asked for before; of steps that are not finite as often as they double."""
        if self._copy is None:
            return []
        ((finite, scale),), self._copy = self._copy.numbers(), None
        nonfinite = self._checked - round(finite)
        self._log_clip(scale)
        self.nonfinite_steps = nonfinite
        if nonfinite < max(1, 2 * self._said_nonfinite):
            return []
        self._said_nonfinite = nonfinite
        return [
            f"K-FAC: gradients that are not finite in {self.nonfinite_steps} of the steps up to {step}: they "
            "were set to zero, so that they reach no parameter that K-FAC takes; with float16 use a "
            "GradScaler (KFAC(grad_scaler=...)), else lower the learning rate or raise the damping"
        ]

    def of_eval(self, *, captured: bool, in_eval: bool) -> list[str]:
        """One warning of factors that are due, and a model in eval mode, whose passes do not count."""
        if captured or not in_eval or self._said_eval:
            return []
        self._said_eval = True
        return [
            "K-FAC: the model was in eval mode in a training pass, whose statistics do not count: call "
            "model.train(); to freeze BatchNorm, put its modules alone in eval mode"
        ]

    def _log_clip(self, scale: float) -> None:
        if self._said_clip or scale < 0:
            return
        self._binding, self._largest = (
            (self._binding + 1, max(self._largest, scale)) if scale < _BINDS else (0, 0.0)
        )
        if self._binding == SAMPLES:
            self._said_clip = True
            logging.getLogger("kfac_core.preconditioner").warning(
                "the kl-clip has scaled the step down at %d second-order updates in a row, to %.2g of its "
                "size or less: the learning rate has next to no effect; raise kl_clip, or lower the learning "
                "rate until the factor is 1 now and then", SAMPLES, self._largest,
            )  # fmt: skip


class SameGradients:
    """Whether the ranks bring the same gradients to the first step; read in the next one."""

    def __init__(self, communicator: Communicator, *, averaged: bool) -> None:
        self._communicator = communicator
        self._asks = communicator.world_size > 1 and not averaged
        self._copy: HostCopy | None = None

    def ask(self, gradient: Tensor) -> None:
        """Start to compare, once; every rank calls it with its gradient of the first layer."""
        if self._asks:
            self._asks = False
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).reshape(1)
            self._copy = copy_to_host(of_all_ranks(self._communicator, norm))

    def read(self) -> list[str]:
        """A warning, if they differ by more than rounding."""
        if self._copy is None:
            return []
        norms, self._copy = [norm for (norm,) in self._copy.numbers() if norm], None
        if not norms or not max(norms) - min(norms) > _SAME * max(norms):
            return []
        return [
            "K-FAC: the gradients of the ranks differ: in the first step that of the first layer had norms "
            f"of {min(norms):.3g} to {max(norms):.3g}. Average them before step(), as DistributedDataParallel"
            " does, or the models drift apart"
        ]


class AddedGradients:
    """Whether the second step's gradients were added to those that the first has preconditioned.

    It follows one weight: every change to its gradient between the steps was an addition, and no `zero_grad`.
    """

    def __init__(self, layers: Sequence[KroneckerLayer], gradients: Gradients) -> None:
        self._weights = [layer.weight for layer in layers if not is_sharded(layer.weight)]
        self._gradients = gradients
        self._handle: Any = None
        self._additions, self._keeps_old = 0, False

    def watch(self) -> None:
        """From now on count what is added."""
        weight = next((each for each in self._weights if each.requires_grad), None)
        if weight is not None:
            self._additions, self._keeps_old = 0, False
            self._handle = weight.register_post_accumulate_grad_hook(self._on_addition)

    def read(self) -> list[str]:
        """A warning, and the end of counting."""
        self.remove()
        said, self._keeps_old = self._keeps_old, False
        return [
            "K-FAC: a backward pass was added to gradients that step() had preconditioned: call zero_grad() "
            "before it, and with micro-batches step() once, after the last one"
        ] * said

    def remove(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _on_addition(self, weight: Tensor) -> None:
        self._additions += 1
        self._keeps_old = self._gradients.has_changed(weight, self._additions)


# ------------------------------------------------------------
# What K-FAC reports to its user: failed factors, layers without statistics, a second KFAC on a layer.


@dataclass(frozen=True)
class Failure:
    """A factor that could not be used; the layer keeps its last good second-order data.

    Attributes:
        step: `KFAC.steps` at the failure.
        reason: the solver's error, or that statistics were not finite.
    """

    layer: str
    kind: str
    step: int
    rank: int
    reason: str

    def __str__(self) -> str:
        """The warning's text."""
        return (
            f"K-FAC: {self.kind.upper()} factor of {layer_text(self.layer)} at step {self.step} on rank "
            f"{self.rank}: {self.reason}; the last good second-order data stays in use"
        )


def missing_statistics(
    updates: Mapping[Key, int], shapes: Sequence[LayerShape], failures: Sequence[Failure], step: int
) -> list[str]:
    """A warning of layers that have had no statistics on any rank, by their factors' updates."""
    missing = sorted({shapes[layer].name for (layer, _), taken in updates.items() if not taken})
    if not missing or failures:
        return []
    return [
        f"K-FAC: no statistics of {listed_layers(missing)} by step {step}: a layer that takes no part in "
        "training passes, whose weight is used without calling the layer, or whose input is a nested tensor "
        "of another layout than torch.jagged, keeps the direction of its plain gradient; so do all layers if "
        "KFAC was made after the forward pass, or after the training step was compiled"
    ]


def warn_of_other_kfac(layers: Sequence[KroneckerLayer]) -> None:
    """Warn of layers with hooks of another KFAC; not an error, as its owner may have lost it."""
    shared = [layer.name for layer in layers if is_captured(layer.module)]
    if shared:
        warnings.warn(
            f"K-FAC: another KFAC still has hooks on {listed_layers(shared)}: it takes time and memory in "
            "every step, and a gradient preconditioned by both is wrong; call its remove() when it is done",
            RuntimeWarning,
            stacklevel=4,  # where KFAC() was called
        )
