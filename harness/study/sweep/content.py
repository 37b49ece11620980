"""What a sweep file may say; values of a cell's own fields are checked as part of the cell, see `cells`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from harness.cell import MOST_SEEDS, NAME_PATTERN, Spec
from harness.yaml_files.validation_messages import not_allowed

MAX_CELLS = 100_000  # a larger number is a mistake in the grid
DEFAULT_REPEATS = 6  # the smallest number of runs with a 95 % interval of the median
MOST_TRIALS = 1_000


def _different(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"must be different whole numbers, got {list(seeds)}")
    return seeds


Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Values = Annotated[tuple[Any, ...], Field(min_length=1)]
Axes = dict[str, Values]
Seed = Annotated[int, Field(ge=0, lt=MOST_SEEDS)]
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1), AfterValidator(_different)]


class MethodContent(Spec):
    """A method: its name, and fields that override the shared ones, nested or dotted, in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    name: Name


class LikeContent(MethodContent):
    """A method of a study that takes the best setting of a tuned one."""

    like: str


class StudyContent(Spec):
    """The sweep that `kronscale choose` writes."""

    sweep: Name
    """Name of the study. Example: `fair`."""

    about: str = ""
    """Its question; empty for that of the sweep that tunes. Example: `which method is sooner?`."""

    seeds: Seeds
    """Its seeds, none of them a seed of the trials. Example: `[0, 1, 2, 3, 4, 5]`."""

    grid: Axes = {}
    """Its axes, in the place of the tuning's `grid`. Example: `{world_size: [1, 2]}`."""

    also: tuple[LikeContent, ...] = ()
    """More methods: each has a `name`, `like` (the tuned method whose best setting it takes) and fields that
    override it. Example: `[{name: mem_opt, like: comm_opt, kfac: {strategy: mem_opt}}]`."""


class TuningContent(Spec):
    """The search space of each method, and the number of trials of all."""

    trials: int = Field(ge=2, le=MOST_TRIALS)
    """Number of trials of every method. Example: `8`."""

    seed: Seed = 0
    """Of the quasi-random points; another seed gives other trials. Example: `1`."""

    shared: dict[str, Any] = {}
    """Fields that every method tunes, with their ranges. Example: `{optimizer.lr: {log: [0.02, 1]}}`."""

    space: dict[str, dict[str, Any]] = {}
    """By method, the fields that it tunes, with their ranges: `{log: [low, high]}`, `{linear: [low, high]}`,
    `{one_minus_log: [low, high]}` (1 - x is drawn as by `log`), or a list of choices. A choice may be a
    mapping of several fields of a section. Example: `{sgd: {optimizer.nesterov: [true, false]}}`."""

    study: StudyContent
    """The sweep that `kronscale choose` writes; see below. Example: `{sweep: fair, seeds: [0, 1, 2]}`."""


class TunedContent(Spec):
    """Where the settings of a study come from; written by `kronscale choose`."""

    sweep: str
    """Name of the sweep that tuned the methods. Example: `fair-tuning`."""

    trials: int
    """Trials of each method. Example: `8`."""

    seeds: Seeds
    """Seeds of the trials. Example: `[1000]`."""


class SweepContent(Spec):
    """A sweep file."""

    sweep: Name
    """Name of the study and of its folder of runs: at most 64 letters, digits, `_`, `.`, `-`.
    Example: `demo`."""

    about: str = ""
    """The study's question, as reports show it. Example: `which method is sooner?`."""

    workload: str | dict[str, Any] | None = None
    """What is trained: a name, or `name` and `options`. Example: `digits`."""

    target: dict[str, Any] | None = None
    """The metric and value at which a run has succeeded. Example: `{metric: accuracy, at_least: 0.97}`."""

    training: dict[str, Any] | None = None
    """Length, batch and precision of every run. Example: `{global_batch_size: 256, epochs: 60}`."""

    optimizer: dict[str, Any] | None = None
    """The first-order optimizer and its learning rate. Example: `{lr: 0.1}`."""

    kfac: dict[str, Any] | None = None
    """K-FAC's hyperparameters, for the methods that have a `kfac` section of their own; `paper: sc20`,
    `kaisa` or `dp_kfac` begins from a paper's settings. Example: `{paper: sc20, damping: 0.003}`."""

    world_size: int | None = None
    """Number of ranks of every run; usually an axis of `grid` instead. Example: `4`."""

    methods: tuple[MethodContent, ...] = Field(min_length=1)
    """The methods to compare. Each has a `name` and any of the sections above, whose fields override the
    shared ones; one without a `kfac` section (`kfac: {}` is enough) trains without K-FAC.
    Example: `[{name: sgd}, {name: comm_opt, kfac: {strategy: comm_opt}}]`."""

    grid: Axes = {}
    """Axes: a field by its dotted path, or `method`, with a list of values. Every combination is a cell.
    Methods ignore axes that they do not read, such as those of `kfac`. Example: `{world_size: [1, 2, 4]}`."""

    zip: tuple[Annotated[Axes, Field(min_length=1)], ...] = ()
    """More axes, each a mapping of fields to lists of equal length that vary together.
    Example: `[{world_size: [1, 2], optimizer.lr: [0.1, 0.2]}]`."""

    exclude: tuple[Annotated[dict[str, Any], Field(min_length=1)], ...] = ()
    """Drops every cell that matches all fields of an entry; one that matches none is an error.
    Example: `[{method: sgd, world_size: 4}]`."""

    repeats: int = Field(default=DEFAULT_REPEATS, ge=1, le=MAX_CELLS)
    """Number of runs of every cell, with seeds 0 to n - 1; the default is the smallest number with a 95 %
    interval of the median. Example: `10`."""

    seeds: Seeds | None = None
    """The seeds themselves, in place of `repeats`. Example: `[7, 8, 9]`."""

    tuning: TuningContent | None = None
    """Search space of each method, and the number of trials of all; see [Tuning](#tuning).
    Example: `{trials: 8, shared: {optimizer.lr: {log: [0.02, 1]}}, study: {sweep: fair, seeds: [0, 1]}}`."""

    tuned: TunedContent | None = None
    """Which sweep tuned the methods, with how many trials and which seeds; written by `kronscale choose`. A
    seed of the trials cannot be one of the study. Example: `{sweep: fair-tuning, trials: 8, seeds: [1000]}`.
    """

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # A sentence begins with the path of the field that it is about, see `explain`.
        names = [method.name for method in self.methods]
        for index, name in enumerate(names):
            if (first := names.index(name)) < index:
                raise ValueError(f"methods.{index}.name={name!r} is already the name of methods[{first}]")
        if self.seeds is not None and "repeats" in self.model_fields_set:
            raise ValueError("seeds must not be beside repeats: repeats: n means seeds 0 to n - 1")
        if self.tuned is not None:
            _refuse_shared("seeds", self.all_seeds, self.tuned.seeds, self.tuned.sweep)
        if self.tuning is None:
            return self
        study = self.tuning.study
        if self.seeds is None:
            raise ValueError("seeds must be listed in a sweep that tunes: its study has none of them")
        for key in ("zip", "exclude"):
            if key in self.model_fields_set:
                raise ValueError(f"{key} must not be combined with `tuning`: trials are all at one point")
        if study.sweep == self.sweep:
            raise ValueError(f"tuning.study.sweep={study.sweep!r} is this sweep; give the study another")
        _refuse_shared("tuning.study.seeds", study.seeds, self.seeds, self.sweep)
        for index, method in enumerate(study.also):
            if method.like not in names:
                known = f"is not a tuned method{not_allowed(method.like, names)}"
                raise ValueError(f"tuning.study.also.{index}.like={method.like!r} {known}")
        return self

    @property
    def all_seeds(self) -> Sequence[int]:
        """The seeds of every cell."""
        return range(self.repeats) if self.seeds is None else self.seeds


def _refuse_shared(path: str, seeds: Sequence[int], of_trials: Sequence[int], sweep: str) -> None:
    """Runs which choose settings and runs which judge them share no seed."""
    if shared := sorted(set(seeds) & set(of_trials)):
        listed = ", ".join(map(str, shared))
        raise ValueError(f"{path} must be others than those of the trials of {sweep}, got {listed} in both")
