"""Registry of the workloads: data, model, loss and metrics of a learning problem.

Each is a package. Its `__init__.py` describes it, and a login node reads that without torch; the description
names the module with the rest. To add one, write `harness/workloads/<name>/<name>.py` with
`build(options, share)`, see `harness.workloads.workload`, and a description beside it, and list it here.
"""

from collections.abc import Mapping

from harness.workloads.brain_mri import BRAIN_MRI
from harness.workloads.cifar import CIFAR10, CIFAR100
from harness.workloads.coco import COCO
from harness.workloads.description import WorkloadDescription
from harness.workloads.digits import DIGITS
from harness.workloads.imagenet import IMAGENET
from harness.workloads.language import BERT, GPT
from harness.workloads.poisson import POISSON
from harness.workloads.translation import MULTI30K

__all__ = ["WORKLOADS", "WorkloadDescription"]

WORKLOADS: Mapping[str, WorkloadDescription] = {
    "digits": DIGITS,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "imagenet": IMAGENET,
    "coco": COCO,
    "brain_mri": BRAIN_MRI,
    "bert": BERT,
    "gpt": GPT,
    "multi30k": MULTI30K,
    "poisson": POISSON,
}
