"""Networks for ImageNet: this package's ResNets, and torchvision's DenseNet-201 and Inception-v3."""

from __future__ import annotations

from torch import nn

from harness.workloads.models.resnet import imagenet_resnet
from harness.workloads.sources.extras import import_extra


def imagenet_network(name: str, classes: int) -> nn.Module:
    """The network of that name, its weights random.

    Raises:
        ModuleNotFoundError: torchvision is missing, or built for another version of torch.
    """
    if name.startswith("resnet"):
        return imagenet_resnet(int(name.removeprefix("resnet")), classes)
    alternative = ", built for the installed torch, or use resnet50, resnet101 or resnet152, which need none"
    models = import_extra("torchvision", f"workload.options.model={name}", "vision", alternative).models
    if name == "densenet201":
        network: nn.Module = models.densenet201(num_classes=classes)
    else:
        # The auxiliary classifier's gradient would enter the factors of the shared layers.
        network = models.inception_v3(num_classes=classes, aux_logits=False, init_weights=True)
    return network
