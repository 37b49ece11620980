"""The drawer of workloads: data, model, loss, metric.

A workload is listed here by a card that a login node can read without torch; its module holds the rest. To
add one: write `harness/workloads/<name>.py` with a function `build(options, ...)` and add its card.
"""

from collections.abc import Mapping
from types import MappingProxyType

from harness.workloads.cards.card import WorkloadCard
from harness.workloads.cards.detection import COCO
from harness.workloads.cards.language import BERT, GPT
from harness.workloads.cards.translation import MULTI30K
from harness.workloads.cards.vision import CIFAR10, CIFAR100, IMAGENET

__all__ = ["WORKLOADS", "WorkloadCard"]

WORKLOADS: Mapping[str, WorkloadCard] = MappingProxyType(
    {
        "digits": WorkloadCard(
            module="harness.workloads.digits",
            metrics=MappingProxyType({"accuracy": "higher", "loss": "lower"}),
            options=MappingProxyType({"width": 16}),
            train_examples=1437,
            about="1,797 real handwritten digits of 8x8 pixels (UCI, inside scikit-learn); a small ConvNet",
        ),
        "cifar10": CIFAR10,
        "cifar100": CIFAR100,
        "imagenet": IMAGENET,
        "coco": COCO,
        "bert": BERT,
        "gpt": GPT,
        "multi30k": MULTI30K,
    }
)
