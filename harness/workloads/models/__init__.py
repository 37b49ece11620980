"""Networks of the papers; those that torchvision or transformers have, in a form that K-FAC can use."""

from harness.workloads.models.imagenet import imagenet_network
from harness.workloads.models.resnet import cifar_resnet, imagenet_resnet, resnet32, resnet50
from harness.workloads.models.vgg import CifarVGG16

__all__ = ["CifarVGG16", "cifar_resnet", "imagenet_network", "imagenet_resnet", "resnet32", "resnet50"]
