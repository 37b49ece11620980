"""A workload's description: its options, metrics and sizes, known without torch and without its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # it imports pydantic, which a host of `harness.bench gpu` may lack
    from harness.cell import AboutField, Cell


Options = Mapping[str, Any]

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

EMBEDDED = "embedded"
SYNTHETIC = "synthetic"
FILES = "files"
"""Values of the option `data` that are not a folder; `files` is the folder that KRONSCALE_DATA names."""

DATA_MEANINGS: Mapping[str, str] = {
    "data": "`files` (the folder that `KRONSCALE_DATA` names, else `data/`), `synthetic` (random examples, "
    "for throughput), `embedded` (data inside the package, where there is some), or a folder",
    "train_examples": "how many training examples are used; 0 for all",
    "test_examples": "how many held-out examples are used; 0 for all",
}  # fmt: skip
"""Meanings of the options that say where the examples come from."""

MOST: Mapping[str, int] = {
    "width": 4096, "hidden": 2**16, "heads": 2**12, "layers": 2**12, "feed_forward": 2**20,
    "vocabulary": 2**24, "sequence_length": 2**20, "longest": 2**20, "classes": 2**20, "image_size": 4096,
    "min_size": 2**14, "max_size": 2**14, "anchor_size": 2**14, "proposals": 2**20, "sampled_boxes": 2**20,
    "workers": 1024, "positions": 2**20, "inside": 2**20, "boundary": 2**20,
}  # fmt: skip
"""Largest values of options that tensors' sizes follow from, beyond every model; torch fails far above."""

METRIC_RANGES: Mapping[str, tuple[float, float]] = {
    "accuracy": (0.0, 1.0),
    "top5_accuracy": (0.0, 1.0),
    "loss": (0.0, math.inf),
    "next_sentence_accuracy": (0.0, 1.0),
    "next_sentence_loss": (0.0, math.inf),
    "perplexity": (1.0, math.inf),
    "bleu": (0.0, 100.0),  # sacrebleu's scale
    "l2_error": (0.0, math.inf),
    "dice": (0.0, 1.0),
    "iou": (0.0, 1.0),
    "box_map": (0.0, 1.0),
    "mask_map": (0.0, 1.0),
    "box_ap50": (0.0, 1.0),
    "mask_ap50": (0.0, 1.0),
}  # fmt: skip
"""Of every metric of every workload, what a target may be: above the first number and up to the second."""


@dataclass(frozen=True)
class WorkloadDescription:
    """What planning needs to know of a workload.

    Attributes:
        module: with the function that builds it; imported on the ranks only.
        metrics: metrics that it evaluates, with the direction that improves each.
        options: its options with their defaults.
        meanings: what each of them does, with its range, for the sweep reference.
        train_examples: size of its whole training set; 0 if known only once the data is read.
        about: one line for `kronscale plan` and the README.
        builder: name of the function or class in `module` that builds it.
        choices: allowed values of text options that have only a few.
        counted: size of the training set under given options, 0 if known only once the data is read; None if
            no option changes it. Raises ValueError for options that no data could satisfy.
        follows: metrics that are the exponential of another one's mean: perplexity of the loss.
        needs: metrics that are evaluated only if an option is set, with that option: BLEU takes time.
        ignored: options that are not read where an option has a value: random pixels are not augmented.
        least_local_batch: smallest local batch that the model trains on under given options.
        whole_batch: the one global batch that it takes under given options, the same every step; its loss is
            half a sum of squares of residuals that it gives. None for any batch.
        divided: options that ranks share evenly: the world size divides them.
        no_batch_norm: why nothing is normalised over the batch under given options; empty if something is.
    """

    module: str
    metrics: Mapping[str, Literal["higher", "lower"]]
    options: Mapping[str, bool | int | float | str]
    meanings: Mapping[str, str]
    train_examples: int
    about: str
    builder: str = "build"
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counted: Callable[[Options], int] | None = None
    follows: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[tuple[str, Any], tuple[str, ...]] = field(default_factory=dict)
    least_local_batch: Callable[[Options], int] = lambda _: 1
    whole_batch: Callable[[Options], int] | None = None
    divided: tuple[str, ...] = ()
    no_batch_norm: Callable[[Options], str] = lambda _: "its network has no batch normalisation"

    def completed(self, given: Options) -> dict[str, Any]:
        """The options with the description's defaults, which are part of a cell's id.

        Raises:
            ValueError: one is unknown, of another type than its default, or refused by `examples`; the
                message begins with its path in a cell's `workload`.
        """
        from harness.yaml_files.validation_messages import not_allowed  # noqa: PLC0415  pydantic

        options = {**self.options, **given}
        for option, value in given.items():
            default = self.options.get(option)
            if default is None:
                known = not_allowed(option, self.options)
                raise ValueError(f"options.{option}={value!r} is not an option of this workload{known}")
            if isinstance(default, float) and type(value) is int:
                options[option] = float(value)
            elif type(value) is not type(default):
                allowed = f"must be {_KINDS[type(default)]}"
                raise ValueError(f"options.{option} {allowed}, got {value!r} (default {default!r})")
            if option in self.choices and value not in self.choices[option]:
                known = not_allowed(str(value), self.choices[option])
                raise ValueError(f"options.{option}={value!r} is not a known value{known}")
        try:
            self.examples(options)
        except ValueError as error:
            raise ValueError(f"options.{error}") from None
        return options

    def unread(self, cell: Cell) -> Iterator[AboutField]:
        """Fields that the cell's options leave without effect, each with the reason."""
        options = cell.workload.options
        for (given, value), ignored in self.ignored.items():
            if options[given] == value:
                for option in ignored:
                    yield f"workload.options.{option}", f"with {given}={value!r}"
        if cell.training.sync_batch_norm and (reason := self.no_batch_norm(options)):
            yield "training.sync_batch_norm", f"with workload {cell.workload.name}: {reason}"

    def conflicts(self, cell: Cell) -> Iterator[AboutField]:
        """What of the cell this workload cannot do: its target, its batch."""
        from harness.yaml_files.validation_messages import not_allowed  # noqa: PLC0415  pydantic

        workload, target, options = cell.workload.name, cell.target, cell.workload.options
        if target.metric not in self.metrics:
            known = not_allowed(target.metric, self.metrics)
            yield "target.metric", f"={target.metric!r} is not a metric of {workload}{known}"
            return
        if (option := self.needs.get(target.metric)) and not options[option]:
            yield "target.metric", f"={target.metric!r} needs workload.options.{option}: true"
        got, better = ("at_least", "at_most") if target.direction == "higher" else ("at_most", "at_least")
        if (direction := self.metrics[target.metric]) != target.direction:
            where = f"contradicts {target.metric}, where {direction} is better"
            yield f"target.{got}", f"={target.value} {where}; use {better}"
        low, high = METRIC_RANGES[target.metric]
        if not low < target.value <= high:
            yield f"target.{got}", f"={target.value:g} must be in ({low:g}, {high:g}], as {target.metric} is"
        batch, local = cell.training.batch_sizes(cell.world_size)
        name = "global_batch_size" if cell.training.scaling == "strong" else "local_batch_size"
        value = getattr(cell.training, name)
        if (examples := self.examples(options)) and batch > examples:
            yield (
                f"training.{name}",
                f"={value} makes a global batch of {batch}, but {workload} has {examples} training examples",
            )
        if self.whole_batch is not None and batch != (whole := self.whole_batch(options)):
            yield f"training.{name}", f"={value} makes a global batch of {batch}; {workload} takes {whole}"
        if self.whole_batch is not None and cell.training.accumulate > 1:
            yield "training.accumulate", f"={cell.training.accumulate}, but {workload} takes its batch whole"
        for option in self.divided:
            if options[option] % cell.world_size:
                shared = f"is not a multiple of world_size={cell.world_size}"
                yield f"workload.options.{option}", f"={options[option]} {shared}"
        if cell.optimizer.name in ("lm", "lbfgs") and self.whole_batch is None:
            yield "optimizer.name", f"={cell.optimizer.name} needs the same batch every step: use poisson"
        local //= cell.training.accumulate
        least = self.least_local_batch(options)
        if local * (cell.world_size if cell.training.sync_batch_norm else 1) < least:
            yield (
                f"training.{name}",
                f"={value} makes a local batch of {local}, but {options['model']} normalises over {least} "
                "examples or more",
            )

    def examples(self, options: Options) -> int:
        """Training examples of an epoch under these options; missing ones have the description's defaults.

        Returns:
            Their number, or 0 if known only once the data is read.

        Raises:
            ValueError: no data could satisfy the options; the message begins with the option's name.
        """
        return self.train_examples if self.counted is None else self.counted({**self.options, **options})

    def value(self, metric: str, means: Mapping[str, float]) -> float:
        """A metric from the means over all held-out examples."""
        if metric in self.follows:
            return math.exp(min(means[self.follows[metric]], 700.0))  # e^710 is not a finite float
        return means[metric]

    def values(self, means: Mapping[str, float]) -> dict[str, float]:
        """Every metric that was measured, in this order; those of an option that is not set are not."""
        return {
            metric: self.value(metric, means)
            for metric in self.metrics
            if self.follows.get(metric, metric) in means
        }


def check_minimum(options: Options, minimum: Mapping[str, int]) -> None:
    """Raise ValueError if an option is below its minimum, or above what `MOST` says."""
    for option, least in minimum.items():
        if options[option] < least:
            raise ValueError(f"{option}={options[option]} is not allowed; use a value >= {least}")
        most = MOST.get(option, 2**40)
        if options[option] > most:
            raise ValueError(f"{option}={options[option]} is not allowed; use a value <= {most}")


def check_width(options: Options, channels: int) -> None:
    """Raise ValueError unless `width` times the published `channels` is a number of channels."""
    width, most = options["width"], MOST["width"]
    if not 1 <= round(channels * width) <= most:
        raise ValueError(
            f"width={width} is not allowed: it makes {channels * width:g} channels of {channels}; use 1 to "
            f"{most} channels"
        )


def check_share(options: Options, option: str) -> None:
    """Raise ValueError if an option is not in [0, 1)."""
    if not 0 <= options[option] < 1:
        raise ValueError(f"{option}={options[option]} is not allowed; use a value in [0, 1)")


def limited(option: str, options: Options, most: int) -> int:
    """The number of examples that `option` asks for, of `most`; 0 asks for all.

    Raises:
        ValueError: it asks for more.
    """
    value = int(options[option])
    if not 0 <= value <= most:
        raise ValueError(f"{option}={value} is not allowed; use 0 for all, or 1 to {most}")
    return value or most
