"""What KFAC is given: arguments of another kind, and settings assigned where they have no effect."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from kfac_core.config import KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.execution import Execution
from kfac_core.placement.cost import CostModel
from kfac_core.timing.timer import PhaseTimer

_SETTINGS = frozenset(field.name for field in fields(KFACConfig))
_SCHEDULED = frozenset(("damping", "kl_clip", "factor_decay", "factor_update_steps", "inverse_update_steps"))
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
