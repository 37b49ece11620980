"""Hyperparameters of K-FAC: one frozen record that refuses bad values when it is built."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from kfac_core.errors import ConfigError
from kfac_core.schedule import (
    Curve,
    Hyperparameter,
    Interval,
    Milestones,
    decay_at,
    interval_at,
    interval_below,
    value_at,
)

STRATEGIES = ("comm_opt", "mem_opt", "hybrid_opt", "dp_kfac", "mpd_kfac", "d_kfac", "spd_kfac")
"""Registry of strategies: each is the function of that name in `kfac_core/placement/strategies.py`."""

SOLVERS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "eigen": ("eigen", "EigenSolver"),
    "inverse": ("inverse", "InverseSolver"),
    "inverse_pi": ("inverse", "InversePiSolver"),
})  # fmt: skip
"""Registry of solvers: module in `kfac_core/solvers/` and class, loaded on first use: they import torch."""

ITEM_BYTES: Mapping[str, int] = MappingProxyType({"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2})
"""Bytes of an element, by the dtypes that factors and second-order data may have."""

DTYPES = tuple(ITEM_BYTES)


_RELEASED = {"factor_start": "identity", "factor_decay": 0.95, "grafting": False, "kl_clip": 0.001}
PAPERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "sc20": _RELEASED | {"damping": 0.001, "factor_update_steps": 10, "inverse_update_steps": 100},
    "kaisa": _RELEASED | {"damping": 0.003, "factor_update_steps": 50, "inverse_update_steps": 500},
    "dp_kfac": _RELEASED | {
        "strategy": "dp_kfac", "solver": "inverse_pi", "damping": 0.002, "factor_decay": 0.05,
        "factor_update_steps": 1, "inverse_update_steps": 1,
    },
})  # fmt: skip
"""The settings of the papers' released codes for ResNet-50 on ImageNet: SC20 and KAISA on 64 GPUs, DP-KFAC,
whose code calls the weight of the new factor by the name that here is that of the old one."""


class Execution(StrEnum):
    """How the work of a step is issued to its device: one operation after another, or many alike at once.

    On a CPU an operation costs its memory traffic: factors and layers are worked on one by one, in place,
    while they are in cache, and a number is read where it is needed. On a GPU an operation costs a launch,
    and reading a number makes the host wait for the device: factors and layers of one shape are worked on
    together, and what depends on data is decided on the device.
    """

    SEQUENTIAL = "sequential"
    BATCHED = "batched"

    @classmethod
    def on(cls, device_type: str) -> Execution:
        """The faster one for a kind of device, such as `cpu`."""
        return cls.SEQUENTIAL if device_type == "cpu" else cls.BATCHED


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured costs of a machine, by which layers are assigned to ranks.

    Raises:
        ConfigError: fewer than two pairs, a repeated size, or a number that is not positive and finite.
    """

    inverse_seconds: tuple[tuple[int, float], ...]
    """Pairs (n, seconds to invert or decompose an `n` by `n` factor), two or more, each size once.
    Example: `[[64, 0.0002], [576, 0.014]]`."""

    def __post_init__(self) -> None:
        """Check the pairs; lists, as files hold them, become tuples."""
        object.__setattr__(self, "inverse_seconds", _size_pairs(self.inverse_seconds))


@dataclass(frozen=True, kw_only=True)
class KFACConfig:
    """What K-FAC computes, and who computes it.

    The defaults are those that did best on 21 small architectures (docs/lab-notebook); `sc20`, `kaisa` and
    `dp_kfac` have the papers' settings.

    Raises:
        ConfigError: a value is outside its range, naming the value and what is allowed.
    """

    strategy: str = "comm_opt"
    """Who computes what: `comm_opt`, `mem_opt`, `hybrid_opt`, `dp_kfac`, `mpd_kfac`, `d_kfac` or `spd_kfac`.
    Example: `hybrid_opt`."""

    grad_worker_fraction: float | None = None
    """Share of the world that preconditions each layer; for `hybrid_opt` only, where
    `world_size * grad_worker_fraction` must be a whole number dividing `world_size` (KAISA, section 3).
    Range: (0, 1]. Example: `0.5`."""

    assignment: Literal["balanced", "round_robin"] | None = None
    """`balanced` gives the costliest job to the least-loaded rank first (KAISA), and where ranks share the
    preconditioning makes that even too; `round_robin` is layer i to rank i mod world_size (SC20, DP-KFAC);
    null is `round_robin` for `dp_kfac` and `mpd_kfac`, as published, or `balanced`. Example:
    `round_robin`."""

    split_factors: Literal["always", "never", "when_ranks_exceed_layers"] | None = None
    """For `comm_opt`, whether A and G of a layer may go to different ranks; `when_ranks_exceed_layers` is the
    rule of the released SC20 code; null is `always`. Example: `never`."""

    costs: Costs | None = None
    """What balancing goes by in the place of the papers' n^3: measured seconds of inverses, in code also a
    `Costs`. What balances nothing takes no notice, and `spd_kfac` keeps its paper's machine.
    Example: `{inverse_seconds: [[64, 0.0002], [576, 0.014]]}`."""

    solver: str = "eigen"
    """`eigen` (inverse-free), `inverse`, or `inverse_pi` (DP-KFAC's damping split). Example: `inverse`."""

    eigen_start: Literal["cold", "warm"] | None = None
    """`cold` decomposes anew each time; `warm` refines the last basis by one step of orthogonal iteration, an
    approximation, and decomposes only what has changed too much for it (for `eigen` only). Null is `warm` on
    a GPU, where a decomposition takes as long as dozens of steps, and `cold` elsewhere. Example: `warm`."""

    eigen_rank: int | None = None
    """Eigenpairs kept of each factor, at most, the largest; the others count as their mean. An approximation
    (for `eigen` only); null keeps all. Range: [1, inf). Example: `128`."""

    damping: Hyperparameter | None = None
    """Tikhonov damping of the Kronecker product; a number, a schedule (`Milestones`), a curve (`Curve`), or
    in code a callable of the step. Null where `relative_damping` takes its place. Range: (0, inf).
    Example: `0.003`."""

    relative_damping: Hyperparameter | None = None
    """Damping as a multiple of the mean eigenvalue of each layer's Kronecker product, so that it means the
    same for every layer, scale of the loss and time in the training; inverses add its root, times their own
    mean eigenvalue, to A and to G. Null is 0.3 where `damping` is not set. May be scheduled like the damping.
    Range: (0, inf). Example: `0.1`."""

    factor_decay: Hyperparameter = 0.95
    """Weight of the OLD running factor in the running mean. The DP-KFAC release uses the same name for the
    weight of the new one: pass 1 minus theirs. May be scheduled like the damping. Range: [0, 1).
    Example: `0.9`."""

    kl_clip: Hyperparameter | None = None
    """Bound on the step's predicted KL divergence (kappa in the papers); null for none. May be scheduled like
    the damping. Range: (0, inf). Example: `0.01`."""

    grafting: bool | None = None
    """Whether each layer's preconditioned gradient gets the norm of its plain gradient, in the place of a
    kl-clip, so that the plain optimizer's learning rate keeps its meaning (Agarwal et al. 2020,
    arXiv:2002.11803; Anil et al. 2021, section 3.5). Null is true unless `kl_clip` or `fixed_norm` is set.
    Example: `false`."""

    fixed_norm: float | None = None
    """In the place of grafting: the norm of each layer's preconditioned gradient, over the root of its number
    of outputs, whatever that of its plain gradient, so that only the learning rate sets a step's length, as
    in Muon. For large batches, whose steps are few. Range: (0, inf). Example: `0.1`."""

    factor_batch_fraction: float = 1.0
    """Share of the local batch whose examples make the factors' statistics; the first ones, at least one.
    Range: (0, 1]. Example: `0.25`."""

    factor_start: Literal["mean", "identity", "first"] = "mean"
    """How a running factor starts: `mean` gives the first statistics the weights 1, 1/2, 1/3 and so on, until
    `factor_decay` binds; `identity` starts from the identity, as the released codes do, and is mostly that
    for 1 / (1 - `factor_decay`) updates; `first` starts from the first statistics. Example: `mean`."""

    factor_update_steps: Interval = 10
    """Steps between two updates of the factors (F); may be scheduled like the damping. Range: [1, inf).
    Example: `5`."""

    inverse_update_steps: Interval = 100
    """Steps between two updates of the second-order data (E), not below F; may be scheduled too.
    Range: [1, inf). Example: `50`."""

    overlap_factors: bool = False
    """Whether factors leave during the backward pass, a bucket of layers as soon as their gradients are
    there. It needs one backward pass a step, or, where several are added up, the `no_sync()` of
    DistributedDataParallel around all but the last. Over MPI they leave at the step. Example: `true`."""

    sequence: Literal["expand", "reduce"] = "expand"
    """How a Linear layer treats dimensions between batch and features: `expand` takes each position as a row,
    `reduce` averages inputs and adds up gradients (Eschenhagen et al. 2023). Example: `reduce`."""

    loss_terms: Literal["example", "token"] | None = None
    """What the loss is a mean over, which fixes the scale of A ⊗ G: `example` (images, sequences) or `token`
    (language models; pixels, where every one has a label). Null detects it in the first pass and logs it:
    tokens where the model's output is `[.., .., features]` and comes from a Linear layer.
    Example: `token`."""

    batch_dim: int | None = None
    """The dimension of the examples in inputs of the model and its layers; null is 0, or 1 where the model
    itself is a torch module without `batch_first`. For `loss_terms: example` and `sequence: reduce`; tokens
    are counted in any layout. Range: [0, 1]. Example: `1`."""

    loss_reduction: Literal["mean", "sum"] = "mean"
    """Whether the loss is a mean over the local batch or a sum; the harness's workloads use `mean`.
    Example: `mean`."""

    max_factor_dim: int | None = 8192
    """Rows of the largest dense factor; of a larger one only the diagonal is kept, as of the output layer of
    a large vocabulary. 8192 rows take 256 MiB of float32 for each copy, of which a step holds about five;
    null for no bound. Range: [1, inf). Example: `4096`."""

    factor_dtype: str | None = None
    """Dtype of the running factors: `float64`, `float32`, `bfloat16` or `float16`; null is the widest of any
    layer, at least float32. Example: `float32`."""

    gram_precision: Literal["ieee", "tf32", "bfloat16"] | None = None
    """On a GPU, the products that sum the statistics: `tf32` or `bfloat16` round what they multiply
    (`kfac_core.device_grams` says how much), and add up in at least float32; `ieee` multiplies exactly what
    autograd gives. Null is `tf32`: a gram of rounded rows is a gram. Example: `bfloat16`."""

    product_precision: Literal["ieee", "tf32"] | None = None
    """On a GPU, the products that precondition a float32 gradient. `tf32` rounds what they multiply to 11
    bits: an error of the preconditioned gradient of about 5e-4 times the root of the condition of the damped
    curvature, at most. Null is `tf32`, and `ieee` for layers of `solver: eigen` whose condition is above
    10,000. Decompositions are always IEEE. Example: `ieee`."""

    inverse_dtype: str | None = None
    """Dtype in which second-order data is stored and sent; null as for the factors. Arithmetic is never below
    float32. Example: `bfloat16`."""

    skip: tuple[str, ...] = ()
    """Regular expressions; a layer whose name matches one from its start, or whose class has that name, keeps
    its plain gradient. Example: `["head.*", "Embedding"]`."""

    # Read by pydantic when a sweep file is validated: a misspelt hyperparameter is refused there too.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        """Refuse what no run could use."""
        if not isinstance(self.costs, Costs | None):
            object.__setattr__(self, "costs", _costs(self.costs))
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("solver", self.solver, tuple(SOLVERS))
        if self.strategy == "hybrid_opt":
            if self.grad_worker_fraction is None:
                raise ConfigError("strategy=hybrid_opt needs grad_worker_fraction, a number in (0, 1]")
            _in_range("grad_worker_fraction", self.grad_worker_fraction, 0, 1, open_left=True)
        elif self.grad_worker_fraction is not None:
            raise ConfigError(
                f"grad_worker_fraction={self.grad_worker_fraction} has no meaning for "
                f"strategy={self.strategy}; leave it out, or use strategy=hybrid_opt"
            )
        self._check_damping()
        _in_range("factor_batch_fraction", self.factor_batch_fraction, 0, 1, open_left=True)
        _scheduled("factor_decay", self.factor_decay, 0, 1)
        self._check_scale()
        self._check_choices()
        self._check_fisher()
        self._check_intervals()
        if isinstance(self.skip, str):
            raise ConfigError(f"skip={self.skip!r} is one text; write a tuple of patterns: ({self.skip!r},)")
        if not isinstance(self.skip, tuple | list) or not all(isinstance(each, str) for each in self.skip):
            raise ConfigError(f"skip={self.skip!r} must be a tuple of patterns, each a text")
        for pattern in self.skip:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"skip pattern {pattern!r} must be a regular expression: {error}") from None

    @classmethod
    def sc20(cls, **changes: Any) -> Self:
        """The settings of the SC20 paper's code (arXiv:2007.00784), with changes to some: see `PAPERS`."""
        return cls(**{**PAPERS["sc20"], **changes})

    @classmethod
    def kaisa(cls, **changes: Any) -> Self:
        """The settings of KAISA's code (arXiv:2107.01739), with changes to some: see `PAPERS`."""
        return cls(**{**PAPERS["kaisa"], **changes})

    @classmethod
    def dp_kfac(cls, **changes: Any) -> Self:
        """The settings of DP-KFAC's code (arXiv:2206.15143), with changes to some: see `PAPERS`."""
        return cls(**{**PAPERS["dp_kfac"], **changes})

    @property
    def placed_by(self) -> Literal["balanced", "round_robin"]:
        """How layers are assigned to ranks: `assignment`, or what None means for the strategy."""
        if self.assignment is not None:
            return self.assignment
        return "round_robin" if self.strategy in ("dp_kfac", "mpd_kfac") else "balanced"

    def _check_damping(self) -> None:
        if self.damping is not None and self.relative_damping is not None:
            raise ConfigError(
                f"damping={self.damping} and relative_damping={self.relative_damping} are both set; set one "
                "of them to None (null)"
            )
        if self.damping is None and self.relative_damping is None:
            object.__setattr__(self, "relative_damping", 0.3)
        name = "damping" if self.relative_damping is None else "relative_damping"
        _scheduled(name, getattr(self, name), 0, math.inf, open_left=True)

    def _check_scale(self) -> None:
        if self.kl_clip is not None:
            _scheduled("kl_clip", self.kl_clip, 0, math.inf, open_left=True)
        if self.fixed_norm is not None:
            _in_range("fixed_norm", self.fixed_norm, 0, math.inf, open_left=True, open_right=True)
        if self.grafting is None:
            object.__setattr__(self, "grafting", self.kl_clip is None and self.fixed_norm is None)
        for name in ("grafting", "overlap_factors"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} is not one of true, false")
        if len(scales := self.scales) > 1:
            raise ConfigError(
                f"{' and '.join(scales)} each set the length of a step; keep one, and set the others to None "
                "(null), grafting to False"
            )

    @property
    def scales(self) -> list[str]:
        """What sets the length of a step, as `name=value`: nothing, or one of three fields."""
        fields = {
            "kl_clip": self.kl_clip,
            "fixed_norm": self.fixed_norm,
            "grafting": self.grafting and "true",
        }
        return [f"{name}={value}" for name, value in fields.items() if value]

    @property
    def any_damping(self) -> Hyperparameter:
        """`damping`, or `relative_damping` in its place."""
        damping = self.damping if self.relative_damping is None else self.relative_damping
        assert damping is not None  # noqa: S101  one of them is set
        return damping

    def _check_choices(self) -> None:
        if self.assignment is not None:
            _one_of("assignment", self.assignment, ("balanced", "round_robin"))
        if self.split_factors is not None:
            _one_of("split_factors", self.split_factors, ("always", "never", "when_ranks_exceed_layers"))
            if self.strategy != "comm_opt":
                raise ConfigError(
                    f"split_factors={self.split_factors} has no meaning for strategy={self.strategy}; "
                    "leave it out, or use strategy=comm_opt"
                )
        if self.eigen_start is not None:
            _one_of("eigen_start", self.eigen_start, ("cold", "warm"))
        if self.eigen_start == "warm" and self.solver != "eigen":
            raise ConfigError(
                f"eigen_start=warm has no meaning for solver={self.solver}; leave it out, or use solver=eigen"
            )
        if self.eigen_rank is not None:
            if (
                isinstance(self.eigen_rank, bool)
                or not isinstance(self.eigen_rank, int)
                or self.eigen_rank < 1
            ):
                raise ConfigError(f"eigen_rank={self.eigen_rank!r} is not allowed; use a whole number >= 1")
            if self.solver != "eigen":
                raise ConfigError(
                    f"eigen_rank={self.eigen_rank} has no meaning for solver={self.solver}; leave it out, or "
                    "use solver=eigen"
                )
        _one_of("factor_start", self.factor_start, ("mean", "identity", "first"))
        _one_of("sequence", self.sequence, ("expand", "reduce"))
        _one_of("loss_reduction", self.loss_reduction, ("mean", "sum"))
        if self.gram_precision is not None:
            _one_of("gram_precision", self.gram_precision, ("ieee", "tf32", "bfloat16"))
        if self.product_precision is not None:
            _one_of("product_precision", self.product_precision, ("ieee", "tf32"))
        for name in ("factor_dtype", "inverse_dtype"):
            if getattr(self, name) is not None:
                _one_of(name, getattr(self, name), DTYPES)

    def _check_fisher(self) -> None:
        if self.loss_terms is not None:
            _one_of("loss_terms", self.loss_terms, ("example", "token"))
        if self.batch_dim is not None and (isinstance(self.batch_dim, bool) or self.batch_dim not in (0, 1)):
            raise ConfigError(f"batch_dim={self.batch_dim!r} is not one of 0, 1")
        largest = self.max_factor_dim
        if largest is not None and (isinstance(largest, bool) or not isinstance(largest, int) or largest < 1):
            raise ConfigError(f"max_factor_dim={largest!r} is not allowed; use a whole number >= 1, or null")

    def _check_intervals(self) -> None:
        for name in ("factor_update_steps", "inverse_update_steps"):
            steps = getattr(self, name)
            if isinstance(steps, Milestones) or callable(steps):
                continue
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise ConfigError(f"{name}={steps!r} must be a whole number of steps >= 1")
        factor_steps, inverse_steps = self.factor_update_steps, self.inverse_update_steps
        if isinstance(factor_steps, int) and isinstance(inverse_steps, int) and inverse_steps < factor_steps:
            raise ConfigError(
                f"inverse_update_steps={inverse_steps} is below factor_update_steps={factor_steps}: "
                "the same factors would be inverted again"
            )


def check_schedules(config: KFACConfig, steps_per_epoch: int | None) -> None:
    """Raise a schedule's error now, not in a hook of the first forward pass.

    Raises:
        ConfigError: a schedule's first value cannot be used, it needs `steps_per_epoch`, or the inverse
            interval falls below the factor interval.
    """
    value_at(config.any_damping, 0, steps_per_epoch)
    decay_at(config.factor_decay, 0, steps_per_epoch)
    if config.kl_clip is not None:
        value_at(config.kl_clip, 0, steps_per_epoch)
    for interval in (config.factor_update_steps, config.inverse_update_steps):
        interval_at(interval, 0, steps_per_epoch)
    below = interval_below(config.inverse_update_steps, config.factor_update_steps, steps_per_epoch)
    if below is not None:
        raise ConfigError(f"inverse_update_steps{below}: the same factors would be inverted again")


def _costs(values: object) -> Costs:
    if not isinstance(values, Mapping) or set(values) != set(Costs.__dataclass_fields__):
        raise ConfigError(
            f"costs={values!r} must be a mapping of inverse_seconds to pairs of a size and seconds"
        )
    return Costs(**values)


def _size_pairs(points: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(n, seconds) for n, seconds in points]
    except (TypeError, ValueError):
        pairs = []
    good = all(isinstance(n, int) and _is_positive(n) and _is_positive(s) for n, s in pairs)
    if not good or len({n for n, _ in pairs}) < max(2, len(pairs)):
        raise ConfigError(
            f"inverse_seconds={points!r} are not pairs of a size and seconds, two or more, each size once: "
            "[[64, 0.0002], [576, 0.014]]"
        )
    return tuple(sorted((int(n), float(seconds)) for n, seconds in pairs))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def nearest(value: str, allowed: tuple[str, ...]) -> str:
    """`; did you mean x?` for a near miss, the empty string otherwise."""
    close = difflib.get_close_matches(value, allowed, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        hint = nearest(str(value), allowed)
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(allowed)}{hint}")


def _scheduled(name: str, value: object, low: float, high: float, *, open_left: bool = False) -> None:
    """Check a number; a schedule's values are checked as they are used."""
    if isinstance(value, Milestones | Curve) or callable(value):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}={value!r} must be a number, a schedule or a function of the step")
    _in_range(name, value, low, high, open_left=open_left, open_right=True)


def _in_range(
    name: str, value: float, low: float, high: float, *, open_left: bool = False, open_right: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}={value!r} must be a number")
    above = value > low if open_left else value >= low
    below = value < high if open_right else value <= high
    if not (above and below):  # written so that NaN is refused too
        bounds = f"{'(' if open_left else '['}{low}, {high}{')' if open_right else ']'}"
        raise ConfigError(f"{name}={value} lies outside {bounds}")
