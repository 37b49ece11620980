"""A cell: one point of a study, with everything that determines its results and nothing about its site."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from kfac_core.config import STRATEGIES, KFACConfig
from kfac_core.errors import PlacementError
from kfac_core.placement.strategies import check_world_size
from kfac_core.schedule import Curve, Decay, Milestones, interval_at, interval_below


class Spec(BaseModel):
    """Base of everything read from a file: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
"""Of sweeps and methods, which are names of folders."""


AboutField = tuple[str, str]
"""A field by its dotted path, and the rest of a sentence: `("training.epochs", "=0 must be >= 1")`."""


class Target(Spec):
    """The target of a run: a metric of the workload at or beyond a value."""

    metric: str
    """One of the workload's metrics, evaluated on all held-out examples. Example: `accuracy`."""

    at_least: float | None = None
    """Value to reach where higher is better; give this or `at_most`. Example: `0.97`."""

    at_most: float | None = None
    """Value to reach where lower is better, such as a loss; give this or `at_least`. Example: `3.5`."""

    @model_validator(mode="after")
    def _one_direction(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("needs exactly one of at_least (higher is better) and at_most (lower is better)")
        return self

    @property
    def direction(self) -> Literal["higher", "lower"]:
        """Whether higher or lower values are better."""
        return "higher" if self.at_least is not None else "lower"

    @property
    def sign(self) -> str:
        """`>=` or `<=`, between metric and value."""
        return ">=" if self.direction == "higher" else "<="

    @property
    def value(self) -> float:
        """The value to reach."""
        return self.at_least if self.at_least is not None else self.at_most  # type: ignore[return-value]  # one is set

    def reached_by(self, value: float) -> bool:
        """Whether `value` is at or beyond the target; never for NaN."""
        return value >= self.value if self.direction == "higher" else value <= self.value


class Workload(Spec):
    """A workload by name, with the options of its description."""

    name: str
    """The workload. `workload: digits` is short for `workload: {name: digits}`. Example: `digits`."""

    options: dict[str, bool | int | float | str] = {}
    """Options of that workload; those left out have the defaults of its table. Example: `{width: 32}`."""


Precision = Literal["float32", "tf32", "bfloat16"]
GradientAveraging = Literal["overlapped", "flat"]


def _whole(value: float) -> float:
    """2 for 2.0, so that both make the same cell."""
    return int(value) if value == int(value) else value


class Training(Spec):
    """Length, batch and precision of a run."""

    global_batch_size: int | None = Field(default=None, ge=1)
    """Examples per step of all ranks together, a multiple of the world size: strong scaling. Give this or
    `local_batch_size`. Example: `256`."""

    local_batch_size: int | None = Field(default=None, ge=1)
    """Examples per step of each rank: weak scaling. Give this or `global_batch_size`. Example: `32`."""

    epochs: int = Field(ge=1)
    """Most passes over the training data; a run ends earlier if it reaches its target. Example: `60`."""

    evaluate_every_epochs: Annotated[int | float, AfterValidator(_whole)] = Field(default=1, gt=0)
    """Epochs between two evaluations, possibly fractional, which finds the time to the target more finely;
    the end is always evaluated. Example: `0.5`."""

    stop_at_target: bool = True
    """Whether a run ends at the first evaluation that reaches the target; false trains all epochs, for
    learning curves. Example: `false`."""

    window_steps: int | None = Field(default=None, ge=1)
    """Steps that one record of phases covers; null takes an inverse interval, or 100 steps without K-FAC.
    Example: `50`."""

    kfac_start_epoch: float = Field(default=0.0, ge=0)
    """Epochs, possibly fractional, before K-FAC starts; KAISA's BERT uses K-FAC in its second phase only.
    K-FAC's own schedules count from this epoch. Example: `2.5`."""

    precision: Precision = "float32"
    """Of the model's matrix products. `bfloat16` runs the model under autocast; `tf32` gives every product of
    the model to a GPU's TF32 units. K-FAC's products have their own (`kfac.gram_precision`,
    `kfac.product_precision`); its solvers and the optimizer stay float32. Example: `bfloat16`."""

    gradient_averaging: GradientAveraging = "overlapped"
    """How ranks average gradients: `overlapped` is torch's DistributedDataParallel, bucket after bucket in
    the backward pass, so that the phase `gradient_comm` is only the part that is not hidden; `flat` is one
    collective after it, whose whole cost is that phase, for breakdowns. Without effect on one rank; over
    MPI both are `flat`. Example: `flat`."""

    accumulate: int = Field(default=1, ge=1)
    """Micro-batches that a rank cuts its local batch into, one after another, for batches that do not fit its
    memory. Gradients and K-FAC's factors are those of the whole batch, but batch normalisation sees one
    micro-batch at a time. Ranks exchange once a step. Example: `4`."""

    sync_batch_norm: bool = False
    """Whether batch normalisation takes mean and variance over the batches of all ranks, for local batches of
    a few images. Each such layer then waits for all ranks once in the forward and once in the backward pass,
    which counts as `gradient_comm`. Without effect on one rank. Example: `true`."""

    factor_micro_batches: int | None = Field(default=None, ge=1)
    """How many of a step's micro-batches (`accumulate`) make K-FAC's factors, the first ones; null for all.
    Their factors are those of a batch of these examples alone, and the others cost K-FAC nothing. Example:
    `1`."""

    save_model: bool = False
    """Whether a finished run leaves its weights as `model.pt` in its attempt's folder, for a run that starts
    from them. Example: `true`."""

    @model_validator(mode="after")
    def _one_batch(self) -> Self:
        if (self.global_batch_size is None) == (self.local_batch_size is None):
            raise ValueError(
                "needs exactly one of global_batch_size (strong scaling) and local_batch_size (weak scaling)"
            )
        return self

    @property
    def scaling(self) -> Literal["strong", "weak"]:
        """Strong: the global batch is the same for all world sizes. Weak: the local batch is."""
        return "strong" if self.global_batch_size is not None else "weak"

    def batch_sizes(self, world_size: int) -> tuple[int, int]:
        """Global and local batch size on `world_size` ranks."""
        if self.local_batch_size is not None:
            return self.local_batch_size * world_size, self.local_batch_size
        batch = self.global_batch_size or 0  # exactly one is set, see _one_batch
        return batch, batch // world_size

    def conflicts(self) -> Iterator[AboutField]:
        """Settings that are valid alone but beyond the end of the run."""
        if self.kfac_start_epoch >= self.epochs:
            yield "training.kfac_start_epoch", f"={self.kfac_start_epoch:g} must be < epochs={self.epochs}"
        if (every := self.evaluate_every_epochs) > self.epochs:
            yield "training.evaluate_every_epochs", f"={every:g} must be <= epochs={self.epochs}"


class Optimizer(Spec):
    """The first-order optimizer and its learning-rate schedule; K-FAC, where present, acts before it."""

    name: Literal[
        "sgd", "rmsprop", "adam", "lars", "lamb", "nlcg", "muon", "soap", "shampoo", "lbfgs", "lm"
    ] = "sgd"
    """`sgd`, `rmsprop` and `adam` (AdamW) are torch's, and so is `muon`, which takes AdamW where a parameter
    is no matrix; `lars`, `lamb` (version 3 of its paper, without bias correction), `soap` and `shampoo`
    (distributed Shampoo's algorithm, roots every 10 steps) are those of pytorch-optimizer, otherwise with its
    defaults, and need the extra `large-batch`; `nlcg` is nonlinear conjugate gradients, which takes K-FAC as
    its preconditioner (with `kfac.grafting: false`). For least squares (`poisson`): `lbfgs` is torch's, with
    a line search, up to 20 iterations a step; `lm` steps along K-FAC's direction and the last step by an
    exact quadratic model, with a damping that it adapts. Example: `lamb`."""

    lr: float = Field(gt=0)
    """Peak learning rate at world size 1; see `lr_scaling`. Example: `0.1`."""

    lr_scaling: Literal["none", "linear"] = "none"
    """`linear` multiplies `lr` by the world size, as is usual for weak scaling. Example: `linear`."""

    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of `sgd`, `rmsprop`, `lars` and `muon`; not for the others. Example: `0.9`."""

    nesterov: bool = False
    """Whether `sgd`, `lars` and `muon` use Nesterov's momentum. Example: `true`."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay: an L2 penalty, or decoupled for `adam`, `lamb`, `muon` and `soap`; not for `nlcg`.
    Example: `0.0005`."""

    warmup_epochs: float = Field(default=0.0, ge=0)
    """Epochs of linear warm-up from a fifth of the peak (SC20). Example: `5`."""

    decay_epochs: tuple[float, ...] = ()
    """Epochs at which the learning rate is multiplied by `decay_factor`. Example: `[35, 75, 90]`."""

    decay_factor: float = Field(default=0.1, gt=0, le=1)
    """Multiplier of the learning rate at each of `decay_epochs`. Example: `0.5`."""

    schedule: Decay | None = None
    """The learning rate over the training, in place of the three fields above: a curve of torch's schedulers
    with a warm-up. Example: `{shape: cosine, warmup: 5}`."""

    def unread(self) -> Iterator[AboutField]:
        """Fields that nothing reads beside the others, each with the reason."""
        for field in dict.fromkeys(field for fields in OPTIMIZER_FIELDS.values() for field in fields):
            if field not in OPTIMIZER_FIELDS[self.name]:
                users = ", ".join(name for name, fields in OPTIMIZER_FIELDS.items() if field in fields)
                yield f"optimizer.{field}", f"with {self.name}; it is for {users}"
        if not self.decay_epochs:
            yield "optimizer.decay_factor", "without decay_epochs"
        if self.schedule is not None:
            for field in ("warmup_epochs", "decay_epochs"):
                yield f"optimizer.{field}", "beside optimizer.schedule, which has its own"

    def conflicts(self, training: Training) -> Iterator[AboutField]:
        """Settings that are valid alone but not in such a run."""
        epochs, listed = training.epochs, list(self.decay_epochs)
        if self.warmup_epochs > epochs:
            yield "optimizer.warmup_epochs", f"={self.warmup_epochs:g} must be <= epochs={epochs}"
        if self.schedule is not None and self.schedule.unit == "epochs":
            if self.schedule.warmup >= epochs:
                yield "optimizer.schedule.warmup", f"={self.schedule.warmup:g} must be < epochs={epochs}"
            if (self.schedule.length or 0) > epochs:
                yield "optimizer.schedule.length", f"={self.schedule.length:g} must be <= epochs={epochs}"
        if listed != sorted(set(listed)):
            yield "optimizer.decay_epochs", f"={listed} must be ascending, each epoch once"
        for epoch in listed:
            if not 0 < epoch < epochs:
                yield "optimizer.decay_epochs", f"={listed} must be > 0 and < epochs={epochs}, got {epoch:g}"
        if listed and self.decay_factor == 1:
            yield "optimizer.decay_factor", "=1 leaves decay_epochs without effect; remove both"
        if self.lr_scaling == "linear" and training.scaling == "strong":
            yield (
                "optimizer.lr_scaling",
                "=linear multiplies lr by world_size, but the global batch stays as it is "
                "(global_batch_size); use local_batch_size, or lr_scaling: none",
            )
        if self.nesterov and "nesterov" in OPTIMIZER_FIELDS[self.name] and not self.momentum:
            yield "optimizer.nesterov", " needs momentum > 0"


MOST_RANKS = 100_000  # names of record files have five digits
MOST_SEEDS = 2**32  # keys of held-out text begin here (harness/workloads/language)

OPTIMIZER_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "sgd": ("momentum", "nesterov", "weight_decay"),
    "rmsprop": ("momentum", "weight_decay"),
    "adam": ("weight_decay",),
    "lars": ("momentum", "nesterov", "weight_decay"),
    "lamb": ("weight_decay",),
    "nlcg": (),
    "muon": ("momentum", "nesterov", "weight_decay"),
    "soap": ("weight_decay",),
    "shampoo": ("weight_decay",),
    "lbfgs": (),
    "lm": (),
})  # fmt: skip
"""What each optimizer is built from beside `lr`: these and no others. The rate's schedule is for all."""

_LATER_OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "digits": {"network": "small"},
    "bert": {"next_sentence": False, "documents": "empty_lines", "positions": 0, "start": ""},
})  # fmt: skip
"""Options of workloads that stored runs do not have, with the defaults by which those were trained."""


class Cell(Spec):
    """One run of one method on one world size with one seed.

    `sweep`, `method` and `trial` are names for people; all other fields determine the results and enter the
    hash.
    """

    sweep: str = Field(pattern=NAME_PATTERN)
    """Name of the study and of its folder of runs. Example: `demo`."""

    method: str = Field(pattern=NAME_PATTERN)
    """Name of the method, as figures show it. Example: `comm_opt`."""

    workload: Workload
    """What is trained: data, model and loss. Example: `{name: digits, options: {width: 32}}`."""

    target: Target
    """When a run has succeeded. Example: `{metric: accuracy, at_least: 0.97}`."""

    training: Training
    """Length, batch and precision. Example: `{global_batch_size: 256, epochs: 60}`."""

    optimizer: Optimizer
    """The first-order optimizer. Example: `{lr: 0.1, momentum: 0.9}`."""

    kfac: KFACConfig | None = None
    """K-FAC's hyperparameters; a method without this section trains without K-FAC. Example: `{damping:
    0.003}`."""

    world_size: int = Field(ge=1, le=MOST_RANKS)
    """Number of ranks, one per GPU, or one per `cpus_per_rank` CPUs. Example: `4`."""

    seed: int = Field(default=0, ge=0, lt=MOST_SEEDS)
    """Seed of the initial parameters, the order of the examples, augmentation and dropout; set by `repeats`
    or `seeds`. Example: `7`."""

    trial: int | None = Field(default=None, ge=1)
    """Number of the trial in a sweep that tunes its methods; null in others. Example: `3`."""

    @field_validator("workload", mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _world_divides(self) -> Self:
        # A sentence begins with the path of the field that it is about, see `explain`.
        training, kfac, nlcg = self.training, self.kfac, self.optimizer.name == "nlcg"
        batch, local = training.batch_sizes(self.world_size)
        parts, first, start = training.accumulate, training.factor_micro_batches, training.kfac_start_epoch
        if batch % self.world_size:
            raise ValueError(
                f"training.global_batch_size={batch} is not a multiple of world_size={self.world_size}"
            )
        if local % parts:
            raise ValueError(f"training.accumulate={parts} does not divide the local batch of {local}")
        if kfac is not None and first is not None and first > parts > 1:
            raise ValueError(f"training.factor_micro_batches={first} must be <= accumulate={parts}")
        if start and (kfac is None or self.optimizer.name in ("nlcg", "lm")):
            steps = f"for {self.optimizer.name}, which steps K-FAC itself"
            alone = "without a kfac section" if kfac is None else steps
            raise ValueError(f"training.kfac_start_epoch={start} has no meaning {alone}; leave it out")
        if kfac is not None:
            try:
                check_world_size(kfac, self.world_size)
            except PlacementError as error:
                raise ValueError(f"kfac.{error}") from None
            for scale in kfac.scales if self.optimizer.name in ("nlcg", "lm") else ():
                raise ValueError(
                    f"kfac.{scale} would scale the steps of {self.optimizer.name}; write only grafting: false"
                )
            if self.optimizer.name == "lm":
                _check_lm(kfac)
            if nlcg and kfac.overlap_factors:
                raise ValueError(
                    "kfac.overlap_factors=true needs one backward pass a step, and NLCG makes several: "
                    "remove it"
                )
        if {"lm": kfac is None, "lbfgs": kfac is not None}.get(self.optimizer.name):
            has = "needs a kfac section" if kfac is None else "has its own curvature: remove the kfac section"
            raise ValueError(f"optimizer.name={self.optimizer.name} {has}")
        return self

    def unread(self) -> Iterator[AboutField]:
        """Fields that no code of such a run reads, with the reason; a workload's description has others."""
        yield from self.optimizer.unread()
        if self.kfac is None:
            yield "training.factor_micro_batches", "without a kfac section"
            for field in KFACConfig.__dataclass_fields__:
                yield f"kfac.{field}", "without a kfac section"
            return
        if self.training.accumulate == 1:
            yield "training.factor_micro_batches", "without accumulate > 1"
        if self.kfac.strategy in ("d_kfac", "spd_kfac"):
            how = "all ranks do all work" if self.kfac.strategy == "d_kfac" else "it has the paper's own rule"
            for field in ("assignment", "costs"):
                yield f"kfac.{field}", f"with strategy={self.kfac.strategy}: {how}"
        elif self.kfac.placed_by == "round_robin":
            yield (
                "kfac.costs",
                f"with strategy={self.kfac.strategy}, which assigns layers by round robin here",
            )

    def conflicts(self) -> Iterator[AboutField]:
        """Settings that cannot be meant in such a run, though stored cells may have them.

        A workload's description has others.
        """
        if self.method in STRATEGIES:
            if self.kfac is None:
                yield (
                    "method",
                    f"={self.method!r} is a strategy of K-FAC but the method has no kfac section, so it "
                    f"would be {self.optimizer.name} alone; write {{name: {self.method}, kfac: {{strategy: "
                    f"{self.method}}}}}",
                )
            elif self.kfac.strategy != self.method:
                yield (
                    "method",
                    f"={self.method!r} has strategy={self.kfac.strategy}; set kfac.strategy: {self.method}, "
                    "or give it another name",
                )
        elif self.method in OPTIMIZER_FIELDS and self.method != self.optimizer.name:
            yield (
                "method",
                f"={self.method!r} has optimizer.name={self.optimizer.name}; set optimizer.name: "
                f"{self.method}, or give it another name",
            )
        yield from self.training.conflicts()
        yield from self.optimizer.conflicts(self.training)
        if self.kfac is not None:
            yield from _kfac_conflicts(self.kfac, self.training.epochs - self.training.kfac_start_epoch)

    @classmethod
    def from_stored(cls, text: bytes) -> Self:
        """The cell that a `cell.json` holds; one that is older than a field has what it was run with.

        Raises:
            ValidationError: it is not a cell.
        """
        with contextlib.suppress(ValueError, AttributeError, TypeError):  # validation names what is wrong
            stored = json.loads(text)
            if stored.get("kfac"):
                stored["kfac"] = {"grafting": False, **stored["kfac"]}
                text = json.dumps(stored).encode()
        cell = cls.model_validate_json(text)
        if cell.world_size == 1 or "gradient_averaging" in cell.training.model_fields_set:
            return cell
        training = cell.training.model_copy(update={"gradient_averaging": "flat"})
        return cell.model_copy(update={"training": training})

    @cached_property
    def content_hash(self) -> str:
        """Hash of the fields that determine the results, with defaults; equal if cells compute the same."""
        fields = self.model_dump(mode="json", exclude={"sweep", "method", "trial"})
        for name in (
            "accumulate",
            "factor_micro_batches",
            "kfac_start_epoch",
            "precision",
            "save_model",
            "sync_batch_norm",
        ):  # added after many runs were stored, whose ids must not change
            if fields["training"][name] == Training.model_fields[name].default:
                del fields["training"][name]
        if self.world_size == 1:
            fields["training"].pop("sync_batch_norm", None)  # one rank has the whole batch
        if self.world_size == 1 or self.training.gradient_averaging == "flat":
            del fields["training"]["gradient_averaging"]  # so computed the runs stored before it existed
        for name, default in _LATER_OPTIONS.get(self.workload.name, {}).items():  # and these options
            if fields["workload"]["options"].get(name) == default:
                del fields["workload"]["options"][name]
        if fields["optimizer"]["schedule"] is None:
            del fields["optimizer"]["schedule"]  # added later, too
        kfac = fields["kfac"] or {}
        for name in (
            "eigen_rank", "overlap_factors", "costs", "fixed_norm", "gram_precision", "grafting",
            "product_precision", "relative_damping",
        ):  # fmt: skip
            if not kfac.get(name, True):  # added later, too
                del kfac[name]
        if "eigen_start" in kfac and kfac["eigen_start"] is None:
            kfac["eigen_start"] = "cold"  # the default before it depended on the device
        for name, default in (("loss_terms", None), ("batch_dim", None), ("max_factor_dim", 8192)):
            if name in kfac and kfac[name] == default:  # and these, whose default is not all that is false
                del kfac[name]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def id(self) -> str:
        """Method, world size, seed and content hash; also the name of the cell's folder."""
        return f"{self.method}-p{self.world_size}-s{self.seed}-{self.content_hash}"

    @property
    def window_steps(self) -> int:
        """Steps per phase record: one inverse interval, so that seconds / steps is the amortised cost."""
        if self.training.window_steps is not None:
            return self.training.window_steps
        if self.kfac is None:
            return 100
        return interval_at(self.kfac.inverse_update_steps, 0, 1)  # a schedule's first interval


def _check_lm(config: KFACConfig) -> None:
    """Raise ValueError where K-FAC's damping does not start as a number."""
    if not isinstance(config.damping, int | float):
        raise ValueError(  # noqa: TRY004  pydantic takes ValueErrors
            f"kfac.damping={config.damping} must be a number with optimizer.name=lm, which adapts it"
        )


def _kfac_conflicts(config: KFACConfig, epochs: float) -> Iterator[AboutField]:
    """Schedules that do nothing in so many epochs with K-FAC, and what cancels itself."""
    for field in ("damping", "relative_damping", "factor_update_steps", "inverse_update_steps"):
        path, schedule = f"kfac.{field}", getattr(config, field)
        if isinstance(schedule, Curve) and schedule.unit == "epochs" and schedule.warmup >= epochs:
            yield f"{path}.warmup", f"={schedule.warmup:g} must be < the {epochs:g} epochs with K-FAC"
        if not isinstance(schedule, Milestones):
            continue
        if schedule.factor == 1:
            yield f"{path}.factor", f"=1 changes nothing; write {field}: {schedule.initial:g}"
        if schedule.unit == "epochs" and schedule.at[0] >= epochs:
            yield f"{path}.at", f"={list(schedule.at)} has no milestone in the {epochs:g} epochs with K-FAC"
        if "damping" not in field and schedule.initial < 1:
            yield f"{path}.initial", f"={schedule.initial:g} must be >= 1 step"
    crossing = interval_below(config.inverse_update_steps, config.factor_update_steps)
    if crossing is not None:
        yield "kfac.inverse_update_steps", f"{crossing}: the same factors would be inverted again"
    if len(set(config.skip)) < len(config.skip):
        yield "kfac.skip", f"={list(config.skip)} names a pattern twice"
