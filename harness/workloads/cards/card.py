"""A workload's card: its options, metrics and sizes, known without torch and without its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Options = Mapping[str, Any]

EMBEDDED = "embedded"
SYNTHETIC = "synthetic"
FILES = "files"
"""Values of the option `data` that are not a folder; `files` is the folder that KRONSCALE_DATA names."""

DATA_MEANINGS: Mapping[str, str] = MappingProxyType({
    "data": "`files` (the folder that `KRONSCALE_DATA` names, else `data/`), `synthetic` (random examples, "
    "for throughput), `embedded` (data inside the package, where there is some), or a folder",
    "train_examples": "how many training examples are used; 0 for all",
    "test_examples": "how many held-out examples are used; 0 for all",
})  # fmt: skip
"""Meanings of the options that say where the examples come from."""


@dataclass(frozen=True)
class WorkloadCard:
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

    def examples(self, options: Options) -> int:
        """Training examples of an epoch under these options; missing ones have the card's defaults.

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


def check_minimum(options: Options, minimum: Mapping[str, int]) -> None:
    """Raise ValueError if an option is below its minimum."""
    for option, least in minimum.items():
        if options[option] < least:
            raise ValueError(f"{option}={options[option]} is not allowed; use a value >= {least}")


def limited(option: str, options: Options, most: int) -> int:
    """The number of examples that `option` asks for, of `most`; 0 asks for all.

    Raises:
        ValueError: it asks for more.
    """
    value = int(options[option])
    if not 0 <= value <= most:
        raise ValueError(f"{option}={value} is not allowed; use 0 for all, or 1 to {most}")
    return value or most
