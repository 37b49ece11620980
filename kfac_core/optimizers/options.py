"""Options of `NLCG`, checked at construction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kfac_core.config import nearest
from kfac_core.errors import ConfigError
from kfac_core.optimizers.conjugacy import BETAS
from kfac_core.preconditioner import KFAC

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
        if self.kfac.config.kl_clip is not None:
            raise ConfigError(
                f"kl_clip={self.kfac.config.kl_clip} rescales K-FAC's direction in each step, but beta "
                "compares two steps; use KFACConfig(kl_clip=None)"
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
