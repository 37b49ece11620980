"""Networks of the papers that no library brings, or brings only with more than a benchmark wants."""

from harness.workloads.models.resnet import cifar_resnet, imagenet_resnet, resnet32, resnet50
from harness.workloads.models.vgg import CifarVGG16

__all__ = ["CifarVGG16", "cifar_resnet", "imagenet_resnet", "resnet32", "resnet50"]
