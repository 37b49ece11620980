"""Registry of the workloads: data, model, loss and metrics of a learning problem.

A workload is listed here by its card, which a login node reads without torch; the card names the module with
the rest. To add one, write `harness/workloads/<name>.py` with `build(options, share)`, see
`harness.workloads.workload`, and add its card.
"""

from collections.abc import Mapping
from types import MappingProxyType

from harness.workloads.cards.card import WorkloadCard
from harness.workloads.cards.detection import COCO
from harness.workloads.cards.language import BERT, GPT
from harness.workloads.cards.segmentation import BRAIN_MRI
from harness.workloads.cards.translation import MULTI30K
from harness.workloads.cards.vision import CIFAR10, CIFAR100, DIGITS, IMAGENET

__all__ = ["WORKLOADS", "WorkloadCard"]

WORKLOADS: Mapping[str, WorkloadCard] = MappingProxyType(
    {
        "digits": DIGITS,
        "cifar10": CIFAR10,
        "cifar100": CIFAR100,
        "imagenet": IMAGENET,
        "coco": COCO,
        "brain_mri": BRAIN_MRI,
        "bert": BERT,
        "gpt": GPT,
        "multi30k": MULTI30K,
    }
)
