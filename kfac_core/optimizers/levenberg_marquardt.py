"""Levenberg-Marquardt steps for least squares: K-FAC's direction and the last step, weighed exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kfac_core.collectives import Communicator, connect
from kfac_core.errors import ConfigError
from kfac_core.optimizers.flat_parameters import FlatParameters
from kfac_core.preconditioner import KFAC

PERIOD_STEPS = 5
"""Accepted steps between two changes of the damping, T in Martens & Grosse."""

SHRINK = 0.95**PERIOD_STEPS
GOOD, POOR = 0.75, 0.25
"""Ratios of the loss's decrease to the model's, above which the damping falls and below which it rises."""

REJECTED = 4.0
"""Factor on the damping after a step that does not lower the loss and is taken back."""

Residuals = Callable[[], Tensor]


class AdaptiveDamping:
    """A damping for `KFACConfig(damping=)` that `LevenbergMarquardt` moves.

    Raises:
        ConfigError: the initial value lies outside (0, inf).
    """

    def __init__(self, initial: float) -> None:
        if not 0 < initial < math.inf:
            raise ConfigError(f"damping={initial} lies outside (0, inf)")
        self.value = initial

    def __call__(self, step: int) -> float:
        """The present value, of whichever step."""
        return self.value


class LevenbergMarquardt(Optimizer):
    """Minimises 1/2 |r|^2 along K-FAC's direction and the last step, by the exact quadratic model.

    Call `step(residuals)` after the gradients are averaged over ranks. With J the Jacobian of the residuals,
    d K-FAC's direction -F^-1 g and s the last step, the new step is lr (alpha d + mu s), whose alpha and mu
    minimise the model g.v + 1/2 v.(JT J + damping) v. It is taken back, bit for bit, where it does not lower
    the loss; no setting diverges. The damping follows the ratio of the loss's decrease to the model's, every
    five steps that were kept, and rises after one that was not.

    K-FAC's statistics are to be those of J: from the residuals, with `kfac` paused for the gradient.

        r = residuals()                                  # [n], such that the loss is their squares' sum / 2
        kfac.set_loss_terms(n)
        torch.autograd.grad(r.sum() / n**0.5, weights, retain_graph=True)
        with kfac.paused():
            (r.square().sum() / 2).backward()
        optimizer.step(residuals)

    J v is a difference of residuals, to about eight digits in float64: a step costs two forward passes for
    that, and one for the new loss. They run in `kfac.paused()`, without gradients.

    Args:
        params: parameters, in one group.
        kfac: stepped inside `step()`; its configuration has an `AdaptiveDamping` and `grafting=False`.
        lr: factor on the step, above 0; schedulers may change it.
        communicator: the ranks; torch.distributed's world by default, a world of one without it.

    Raises:
        ConfigError: several groups of parameters, or `kfac` has a fixed damping or scales its direction.

    Source: Martens & Grosse 2015, arXiv:1503.05671, sections 6.4, 6.5 and 7; KFAC* in Dangel et al. 2024,
    arXiv:2405.15603.
    """

    def __init__(
        self,
        params: Any,
        *,
        kfac: KFAC,
        lr: float = 1.0,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr})
        if len(self.param_groups) > 1:
            raise ConfigError(
                f"LevenbergMarquardt takes one group of parameters, got {len(self.param_groups)}"
            )
        config = kfac.config
        if config.scales:
            raise ConfigError(
                "LevenbergMarquardt sets the length of the step itself; use KFACConfig(grafting=False)"
            )
        damping = config.damping
        if not isinstance(damping, AdaptiveDamping):
            raise ConfigError(
                f"LevenbergMarquardt adapts the damping, got KFACConfig(damping={damping}): use "
                "AdaptiveDamping(1e-8)"
            )
        self._kfac, self._damping = kfac, damping
        self._communicator = communicator if communicator is not None else connect()
        self._flat = FlatParameters(self.param_groups)
        self.state[self._flat.first] = {"kept": 0, "rejected": 0, "damping": damping.value}

    @torch.no_grad()
    def step(self, closure: Any = None, now: Tensor | None = None) -> Any:
        """One step; returns the loss before it, over all ranks.

        Args:
            closure: this rank's residuals r `[n]` at the present parameters, as a function, such that its
                loss is 1/2 rT r (torch's name for it).
            now: what it would return, if that is known: a pass less.

        Raises:
            ConfigError: no residuals were given.
        """
        if not callable(closure):
            raise ConfigError("LevenbergMarquardt needs the residuals: step(residuals), a function")
        memory, flat = self._memory, self._flat
        g = flat.gradient()
        self._kfac.step()  # in place in the .grads, of which g is a copy
        directions = torch.stack([-flat.gradient(), *([memory["s"]] if "s" in memory else [])])
        with self._kfac.paused():
            r = closure() if now is None else now.detach()
            pushed = self._pushed(closure, r, directions)
            products = self._mean_over_ranks(torch.cat([r[None], pushed]) @ torch.cat([r[None], pushed]).T)
            loss, curvature = 0.5 * products[0, 0], products[1:, 1:]
            curvature = curvature + self._damping.value * directions @ directions.T
            slope = directions @ g
            unit = curvature.diagonal().clamp_min(_tiny(g)).rsqrt()  # the directions' lengths differ by far
            alike = torch.linalg.pinv(unit[:, None] * curvature * unit, hermitian=True)
            weights = -self.param_groups[0]["lr"] * unit * (alike @ (unit * slope))
            s = weights @ directions
            predicted = -(slope @ weights + 0.5 * weights @ curvature @ weights)
            before = flat.values()
            flat.move(s)
            after = self._mean_over_ranks(0.5 * closure().square().sum())
        now, then, expected = torch.stack([loss, after, predicted]).tolist()
        if then < now:  # also not where it is NaN
            memory["kept"] += 1
            memory["s"] = s
            if memory["kept"] % PERIOD_STEPS == 0:
                ratio = (now - then) / expected if expected > 0 else 0.0
                self._scale_damping(SHRINK if ratio > GOOD else 1 / SHRINK if ratio < POOR else 1.0)
        else:
            flat.restore(before)
            memory["rejected"] += 1
            memory.pop("s", None)
            self._scale_damping(REJECTED)
        return loss

    @property
    def rejected(self) -> int:
        """Steps that were taken back."""
        return int(self._memory["rejected"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume bitwise from `state_dict`; load the state of `kfac` separately."""
        super().load_state_dict(state_dict)
        self._damping.value = float(self._memory["damping"])

    def _scale_damping(self, factor: float) -> None:
        self._damping.value = min(max(self._damping.value * factor, 1e-30), 1e30)
        self._memory["damping"] = self._damping.value

    def _pushed(self, residuals: Residuals, r: Tensor, directions: Tensor) -> Tensor:
        """J v of every direction, `[directions, n]`."""
        flat, before = self._flat, self._flat.values()
        columns = []
        for v in directions:
            size = torch.finfo(v.dtype).eps ** 0.5 * (1 + before.norm()) / v.norm().clamp_min(_tiny(v))
            flat.move(size * v)
            columns.append((residuals() - r) / size)
            flat.restore(before)
        return torch.stack(columns)

    def _mean_over_ranks(self, numbers: Tensor) -> Tensor:
        if self._communicator.world_size > 1:
            numbers = numbers.contiguous()
            self._communicator.all_reduce(numbers)
            numbers /= self._communicator.world_size
        return numbers

    @property
    def _memory(self) -> dict[str, Any]:
        memory: dict[str, Any] = self.state[self._flat.first]
        return memory


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny
