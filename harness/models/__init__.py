"""Networks of the papers that no library brings, or brings only with more than a benchmark wants."""

from harness.models.resnet import resnet32, resnet50

__all__ = ["resnet32", "resnet50"]
