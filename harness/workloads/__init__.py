"""The drawer of workloads: data, model, loss, metric.

A workload is listed here by a card that a login node can read without torch; its module holds the rest. To
add one: write `harness/workloads/<name>.py` with a function `build(options, ...)` and add its card.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class WorkloadCard:
    """What planning needs to know of a workload.

    Attributes:
        module: where `build` is, imported on the ranks only.
        metrics: metrics that it evaluates, with the direction that improves each.
        options: its options with their defaults.
        train_examples: size of its training set.
        about: one line for `kronscale plan` and the README.
    """

    module: str
    metrics: Mapping[str, Literal["higher", "lower"]]
    options: Mapping[str, bool | int | float | str]
    train_examples: int
    about: str


WORKLOADS: Mapping[str, WorkloadCard] = MappingProxyType(
    {
        "digits": WorkloadCard(
            module="harness.workloads.digits",
            metrics=MappingProxyType({"accuracy": "higher", "loss": "lower"}),
            options=MappingProxyType({"width": 16}),
            train_examples=1437,
            about="1,797 real handwritten digits of 8x8 pixels (UCI, inside scikit-learn); a small ConvNet",
        ),
    }
)
