"""NLCG: stochastic preconditioned nonlinear conjugate gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from kfac_core.collectives import Communicator, connect
from kfac_core.config import nearest
from kfac_core.errors import ConfigError
from kfac_core.optimizers.flat_parameters import FlatParameters
from kfac_core.preconditioner import KFAC

# ------------------------------------------------------------
# Beta, the weight of the old direction in a conjugate-gradient step: four formulas.
#
# Each takes, at step k: g `[n]`, y = g - g_old `[n]`, new = (-g).z `[]`, and the memory of step k - 1
# with d `[n]`, delta = (-g_old).z_old `[]` and, for `KEEP_Z`, z `[n]`. Each returns `[]` without
# synchronising.


EPS = 1e-8  # in the method's denominators, as in the release
KEEP_Z = frozenset({"PR", "HS"})


def clipped_beta(rule: str, g: Tensor, y: Tensor, new: Tensor, old: Mapping[str, Tensor]) -> Tensor:
    """Beta clipped to [0, 1], `[]`: a negative one restarts; above one the old direction would grow."""
    return BETAS[rule](g, y, new, old).clamp(0.0, 1.0)


def _fletcher_reeves(g: Tensor, y: Tensor, new: Tensor, old: Mapping[str, Tensor]) -> Tensor:
    return new / (old["delta"] + EPS)


def _polak_ribiere(g: Tensor, y: Tensor, new: Tensor, old: Mapping[str, Tensor]) -> Tensor:
    return (new - torch.dot(-g, old["z"])) / (old["delta"] + EPS)


def _hestenes_stiefel(g: Tensor, y: Tensor, new: Tensor, old: Mapping[str, Tensor]) -> Tensor:
    return (new - torch.dot(-g, old["z"])) / (torch.dot(old["d"], y) + EPS)


def _dai_yuan(g: Tensor, y: Tensor, new: Tensor, old: Mapping[str, Tensor]) -> Tensor:
    return new / (torch.dot(old["d"], y) + EPS)


# arXiv:1812.02886 has FR (the release's default) and PR; HS and DY are those of Hager & Zhang, "A survey of
# nonlinear conjugate gradient methods", 2006, with z instead of the residual. On a convex quadratic with
# exact line search all four equal the beta of linear CG.
BETAS: Mapping[str, Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor]], Tensor]] = MappingProxyType(
    {"FR": _fletcher_reeves, "PR": _polak_ribiere, "HS": _hestenes_stiefel, "DY": _dai_yuan}
)


# ------------------------------------------------------------
# Step control: shortens the step when the loss rises, by a table.


PERIOD_STEPS = 5  # the release's `step_line_search_period`
OLD_LOSS_WEIGHT = 0.7  # of the old average in the moving average of the loss
SMALLEST_SCALE = 1e-4
TOLERATED_RATIO, GROWTH = 1.01, 1.05


class Row(NamedTuple):
    """The change when the loss ratio exceeds `above`.

    Attributes:
        shrink: factor on the scale of the step.
        dropped: share of the last displacement to subtract.
    """

    above: float
    shrink: float
    dropped: float


# The release of arXiv:1812.02886, `online_line_search` at threshold 1; the paper has only the idea.
TABLE = (
    Row(1.15, 0.5, 0.9),
    Row(1.125, 0.7, 0.7),
    Row(1.10, 0.8, 0.5),
    Row(1.075, 0.9, 0.3),
    Row(1.05, 0.95, 0.2),
    Row(1.025, 0.975, 0.1),
)
BELOW_THE_TABLE = Row(TOLERATED_RATIO, 1.0, 0.1)


def controlled(scale: float, ratio: float) -> tuple[float, float]:
    """The new scale in [1e-4, 1] and the share of the last displacement to drop, in [0, 0.9].

    Args:
        scale: scale of the step so far.
        ratio: moving average of the loss over its value `PERIOD_STEPS` steps ago.
    """
    if ratio < TOLERATED_RATIO:
        return min(1.0, GROWTH * scale), 0.0
    row = next((row for row in TABLE if ratio > row.above), BELOW_THE_TABLE)
    return max(SMALLEST_SCALE, row.shrink * scale), row.dropped


# ------------------------------------------------------------
# Options of `NLCG`, checked at construction.


PRECONDITIONERS = ("bfgs", "kfac", "none")
# Set by torch, its schedulers and named parameters; NLCG would ignore any other option.
GROUP_KEYS = ("params", "lr", "initial_lr", "param_names")


@dataclass(frozen=True, kw_only=True)
class NLCGOptions:
    """The arguments of `NLCG` other than parameters and lr; documented there.

    Raises:
        ConfigError: a value is outside its range, or two values conflict.
    """

    beta: str
    precondition: str
    step_control: bool
    restart_steps: int | None
    lars: float | None
    kfac: KFAC | None

    def __post_init__(self) -> None:
        """Check every value."""
        _one_of("beta", self.beta, tuple(BETAS))
        _one_of("precondition", self.precondition, PRECONDITIONERS)
        steps = self.restart_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ConfigError(
                f"restart_steps={steps!r} is not a whole number of steps >= 1; use None for never"
            )
        if self.lars is not None and not 0 < self.lars < math.inf:
            raise ConfigError(f"lars={self.lars} lies outside (0, inf); use None for no LARS")
        self._check_conflicts()

    def _check_conflicts(self) -> None:
        if self.precondition == "kfac" and self.kfac is None:
            raise ConfigError("precondition='kfac' needs kfac, the KFAC of the same model")
        if self.kfac is None:
            return
        if self.precondition != "kfac":
            raise ConfigError(
                f"precondition={self.precondition!r} leaves kfac unused; remove one of them: K-FAC "
                "replaces BFGS"
            )
        if self.lars is not None:
            raise ConfigError(
                f"lars={self.lars} would scale gradients that K-FAC has read unscaled; remove lars or kfac"
            )
        for scale in self.kfac.config.scales:
            raise ConfigError(
                f"{scale} rescales K-FAC's direction in each step, but beta compares two steps; use "
                "KFACConfig(grafting=False)"
            )


def check_groups(groups: Sequence[dict[str, Any]]) -> None:
    """Check learning rates, and that groups have no options that NLCG would ignore.

    Raises:
        ConfigError: naming the group, the value and what is allowed.
    """
    for index, group in enumerate(groups):
        lr = float(group["lr"])
        if not 0 <= lr < math.inf:  # negated, so that NaN is an error too
            raise ConfigError(f"lr={lr} of parameter group {index} lies outside [0, inf)")
        for key in group:
            if key not in GROUP_KEYS:
                hint = nearest(key, GROUP_KEYS)
                raise ConfigError(f"{key}={group[key]!r} of parameter group {index} is unknown; use lr{hint}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        hint = nearest(str(value), allowed)
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(allowed)}{hint}")


class NLCG(Optimizer):
    """Steps along d = z + beta d_old, with preconditioned descent direction z and one beta for all layers.

    Call `step(loss)` after the gradients are averaged over ranks; NLCG averages the loss itself (one scalar
    per step), so that every rank takes the same branch of the step control.

    Symbols, with n parameters; vectors are `[n]`, scalars `[]`:
        k           steps so far, a host number
        g, y        averaged gradient, and its change g - g_old, `[n]`
        s           displacement of the last step, which caused y, `[n]`
        h           diagonal of the BFGS approximation of the Hessian, one at k = 0, `[n]`
        z           -g / (h + eps), or -g, or -F^-1 g with K-FAC (-g in layers it does not cover), `[n]`
        new, delta  (-g).z now and one step ago, `[]`
        d           conjugate direction, z + beta d_old, `[n]`
        scale       factor of step control on lr, in [1e-4, 1], a host number
        dropped     share of the last displacement that step control takes back, in [0, 0.9]

    Where the paper is not specific this follows the release: the dropped share is subtracted from theta while
    d is kept whole for the next step, and LARS scales g before anything else. Two differences: s is the
    displacement itself, not d times the current lr, and eps is not added to y^2 and (h s)^2.

    Only a control step, one in five, waits for the device, to read two moving averages.

    Args:
        params: parameters or groups, of one dtype on one device; a group's only option is `lr`.
        lr: learning rate, >= 0; schedulers may change it.
        beta: `FR` Fletcher-Reeves, `PR` Polak-Ribiere, `HS` Hestenes-Stiefel, `DY` Dai-Yuan.
        precondition: `bfgs`, `none` or `kfac`; None means `kfac` if one is given, else `bfgs`.
        step_control: whether the loss, which must then be positive, drives `scale`; False needs no loss.
        restart_steps: interval at which beta is set to zero; None for never.
        lars: eta of LARS, 0.001 in the release; None for no LARS.
        kfac: stepped inside `step()`, which leaves F^-1 g in the `.grad`s; its configuration has
            `grafting=False`.
        communicator: the ranks; torch.distributed's world by default, a world of one without it.

    Raises:
        ConfigError: a value is outside its range, or two values conflict.

    Source: Adya, Palakkode, Tuzel, "Nonlinear conjugate gradients for scaling synchronous distributed DNN
    training", arXiv:1812.02886, and its release; K-FAC instead of BFGS is this package's addition.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        beta: str = "FR",
        precondition: str | None = None,
        step_control: bool = True,
        restart_steps: int | None = None,
        lars: float | None = None,
        kfac: KFAC | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self._built = False
        super().__init__(params, {"lr": lr})
        check_groups(self.param_groups)
        self._options = NLCGOptions(
            beta=beta,
            precondition=precondition or ("bfgs" if kfac is None else "kfac"),
            step_control=step_control,
            restart_steps=restart_steps,
            lars=lars,
            kfac=kfac,
        )
        self._communicator = communicator if communicator is not None else connect()
        self._flat = FlatParameters(self.param_groups)
        self.state[self._flat.first] = {"k": 0, "scale": 1.0}  # as torch's LBFGS stores its one state
        self._built = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; returns the loss.

        Args:
            closure: this rank's mean loss, or a function that computes it and the averaged gradients (torch's
                name for it).

        Raises:
            ConfigError: step control got no loss, or its moving average is not positive.
        """
        loss = _evaluate(closure)
        flat, old = self._flat, self._memory
        dropped = self._control(loss) if self._options.step_control else 0.0
        k = old["k"]
        g = flat.gradient()
        if self._options.lars is not None:
            flat.adapt_by_layer(g, self._options.lars, EPS)
        y = g - old["g"] if k else None
        z = self._descend(g, y)
        new = torch.dot(-g, z)
        if y is None or self._restarts(k):
            d = z
        else:
            d = z + clipped_beta(self._options.beta, g, y, new, old) * old["d"]
        s = flat.by_group(d, [group["lr"] * old["scale"] for group in self.param_groups])
        if dropped:
            s = (1 - dropped) * s - dropped * old["s"]
        flat.move(s)
        old.update(k=k + 1, g=g, d=d, s=s, delta=new)
        if self._options.beta in KEEP_Z:
            old["z"] = z
        return loss

    @property
    def scale(self) -> float:
        """Factor of step control on the learning rate, in [1e-4, 1]."""
        return float(self._memory["scale"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume bitwise from `state_dict`; load the state of a `kfac` separately.

        Raises:
            ConfigError: the state is of other parameters, or of an NLCG with other options.
        """
        saved = state_dict["state"].get(0, {})
        expected = self._memory_keys(saved.get("k", 0))
        length = saved["g"].numel() if "g" in saved else self._flat.size
        if set(saved) != expected or length != self._flat.size:
            raise ConfigError(
                f"a state of {length} parameters with {', '.join(sorted(saved))} does not fit this NLCG of "
                f"{self._flat.size} with {', '.join(sorted(expected))}; use the options it was saved under"
            )
        super().load_state_dict(state_dict)
        like = self._flat.like  # torch has cast the state to the parameters' dtype, which may be half
        self.state[self._flat.first] = {
            key: value.to(like, copy=True) if isinstance(value, Tensor) else value
            for key, value in saved.items()
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, during construction only.

        Raises:
            ConfigError: after construction, when the length of the vectors is fixed.
        """
        if self._built:
            raise ConfigError(
                "add_param_group after construction: NLCG keeps one vector over all parameters; "
                "make a new NLCG"
            )
        super().add_param_group(param_group)

    @property
    def _memory(self) -> dict[str, Any]:
        memory: dict[str, Any] = self.state[self._flat.first]
        return memory

    def _memory_keys(self, k: int) -> set[str]:
        if k == 0:
            return {"k", "scale"}
        vectors = {"g", "d", "s", *(["h"] if self._options.precondition == "bfgs" else [])}
        vectors |= {"z"} if self._options.beta in KEEP_Z else set()
        averages = {"loss_ema", "loss_ema_old"} if self._options.step_control else set()
        return {"k", "scale", "delta", *vectors, *averages}

    def _restarts(self, k: int) -> bool:
        steps = self._options.restart_steps
        return steps is not None and k % steps == 0

    def _descend(self, g: Tensor, y: Tensor | None) -> Tensor:
        """z, `[n]`."""
        if self._options.kfac is not None:
            self._options.kfac.step()  # in place in the .grads, of which g is a copy
            return -self._flat.gradient()
        if self._options.precondition == "none":
            return -g
        old = self._memory
        h = torch.ones_like(g) if y is None else _bfgs_diagonal(old["h"], old["s"], y)
        old["h"] = h
        return -g / (h + EPS)

    def _control(self, loss: Any) -> float:
        """Update the average loss; every five steps set `scale` and return the share to drop."""
        old = self._memory
        k, mean = old["k"], self._mean_over_ranks(loss)
        average = mean if k == 0 else OLD_LOSS_WEIGHT * old["loss_ema"] + (1 - OLD_LOSS_WEIGHT) * mean
        old["loss_ema"] = average
        if k == 0:
            old["loss_ema_old"] = average
        if k == 0 or k % PERIOD_STEPS:
            return 0.0
        now, before = torch.stack([average, old["loss_ema_old"]]).tolist()  # the only wait for the device
        if before <= 0 or now <= 0:
            raise ConfigError(
                f"step_control=True needs a positive loss, and its average is {min(now, before)} at "
                f"step {k}; use step_control=False"
            )
        old["loss_ema_old"] = average
        old["scale"], dropped = controlled(old["scale"], now / before)
        return dropped

    def _mean_over_ranks(self, loss: Any) -> Tensor:
        if loss is None:
            raise ConfigError(
                "step_control=True needs the loss: step(loss), a closure, or step_control=False"
            )
        mean = torch.as_tensor(loss).detach().to(self._flat.like).reshape(1).clone()
        if self._communicator.world_size > 1:
            self._communicator.all_reduce(mean)
            mean /= self._communicator.world_size
        return mean[0]


def _evaluate(closure: Any) -> Any:
    if not callable(closure):
        return closure
    with torch.enable_grad():
        return closure()


def _bfgs_diagonal(h: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """|h - (h s)^2 / s.(h s) + y^2 / y.s| where both divisors are >= eps, else h, `[n]`."""
    hs = h * s
    curvature, modelled = torch.dot(y, s), torch.dot(s, hs)
    renewed = (h - hs * hs / modelled + y * y / curvature).abs()
    return torch.where((curvature >= EPS) & (modelled >= EPS), renewed, h)
