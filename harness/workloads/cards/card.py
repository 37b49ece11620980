"""A workload's card: what a login node may know of it, without torch and without its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Options = Mapping[str, Any]


@dataclass(frozen=True)
class WorkloadCard:
    """What planning needs to know of a workload.

    Attributes:
        module: where its builder is, imported on the ranks only.
        metrics: metrics that it evaluates, with the direction that improves each.
        options: its options with their defaults.
        train_examples: size of its whole training set; 0 where only its reading tells.
        about: one line for `kronscale plan` and the README.
        builder: name of the function in `module` that builds it.
        choices: for text options that are one of a few words, those words.
        counted: size of the training set that given options leave, 0 where only its reading tells; None if
            no option changes it. Raises ValueError for options that no data could serve.
        follows: metrics that are e to the mean of another one: perplexity of the loss.
        needs: metrics that are evaluated only where an option says so, with that option: BLEU takes time.
    """

    module: str
    metrics: Mapping[str, Literal["higher", "lower"]]
    options: Mapping[str, bool | int | float | str]
    train_examples: int
    about: str
    builder: str = "build"
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counted: Callable[[Options], int] | None = None
    follows: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)

    def examples(self, options: Options) -> int:
        """Training examples of an epoch with these options, the card's defaults filled in where missing.

        Returns:
            Their number, or 0 where only reading the data tells it.

        Raises:
            ValueError: no data could serve the options; the sentence begins with the option's name.
        """
        return self.train_examples if self.counted is None else self.counted({**self.options, **options})

    def value(self, metric: str, means: Mapping[str, float]) -> float:
        """A metric from the means of what the workload evaluates, over all held-out examples."""
        if metric in self.follows:
            return math.exp(min(means[self.follows[metric]], 700.0))  # e^710 is no number any more
        return means[metric]
