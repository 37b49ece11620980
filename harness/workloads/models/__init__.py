"""Networks of the papers; those that torchvision or transformers have, in a form that K-FAC can use."""

from harness.workloads.models.vision import (
    CifarVGG16,
    cifar_resnet,
    imagenet_network,
    imagenet_resnet,
    resnet32,
    resnet50,
)

__all__ = ["CifarVGG16", "cifar_resnet", "imagenet_network", "imagenet_resnet", "resnet32", "resnet50"]
