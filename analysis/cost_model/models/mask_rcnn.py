"""Mask R-CNN (He et al. 2017) on a ResNet with a feature pyramid; K-FAC preconditions the ROI heads alone."""

from analysis.cost_model.models.layers import Layer, Model
from analysis.cost_model.models.resnet import imagenet_resnet

_CHANNELS, _HIDDEN, _REGION, _MASK = 256, 1024, 7, 14  # of the published heads
_STAGES = (256, 512, 1024, 2048)  # channels of the ResNet's, at strides of 4 to 32
_ANCHORS = 3
_POSITIVE = 0.25  # most of the sampled regions that are objects, which alone train the masks


def mask_rcnn(classes: int = 80, short: int = 800, sampled: int = 512) -> Model:
    """On a ResNet-50, for images of 4:3 of `short` pixels; `sampled` regions of each train the heads."""
    pixels = short * short * 4 // 3
    trunk, trunk_flops = _trunk(pixels)
    return Model("mask_rcnn", tuple(_heads(classes + 1, sampled)), trunk, plain_flops=trunk_flops)


def _trunk(pixels: int) -> tuple[int, int]:
    """Parameters and FLOPs of backbone, pyramid and proposals; the backbone's normalisation is frozen."""
    resnet = imagenet_resnet(50)
    body = resnet.layers[:-1]
    parameters = sum(layer.shape.gradient_elements for layer in body)
    flops = sum(layer.forward_flops for layer in body) * pixels // 224**2
    areas = [pixels // (16 * 4**level) for level in range(len(_STAGES))]
    for channels, area in zip(_STAGES, areas, strict=True):
        inner, outer = channels * _CHANNELS, 9 * _CHANNELS * _CHANNELS
        parameters += inner + outer + 2 * _CHANNELS
        flops += 2 * area * (inner + outer)
    shared, outputs = 9 * _CHANNELS * _CHANNELS, _CHANNELS * 5 * _ANCHORS  # a score and four sides an anchor
    parameters += shared + _CHANNELS + outputs + 5 * _ANCHORS
    flops += sum(2 * area * (shared + outputs) for area in [*areas, areas[-1] // 4])
    return parameters, flops


def _heads(classes: int, sampled: int) -> list[Layer]:
    mask, regions, objects, side = "roi_heads.mask", (1, sampled), round(_POSITIVE * sampled), _MASK
    masks, doubled = (objects * side, side), (2 * objects * side, 2 * side)  # one object below the other
    return [
        *(
            Layer(f"roi_heads.{name}", inputs, outputs, size=regions, bias=True, kind="linear")
            for name, inputs, outputs in (
                ("box_head.fc6", _CHANNELS * _REGION**2, _HIDDEN),
                ("box_head.fc7", _HIDDEN, _HIDDEN),
                ("box_predictor.cls_score", _HIDDEN, classes),
                ("box_predictor.bbox_pred", _HIDDEN, 4 * classes),
            )
        ),
        *(
            Layer(f"{mask}_head.{n}.0", _CHANNELS, _CHANNELS, (3, 3), padding=(1, 1), size=masks, bias=True)
            for n in range(4)
        ),
        # transposed: every pixel of the result is a product with a patch of the spread input
        Layer(
            f"{mask}_predictor.conv5_mask", _CHANNELS, _CHANNELS, (2, 2),
            size=(doubled[0] + 1, doubled[1] + 1), bias=True,
        ),
        Layer(f"{mask}_predictor.mask_fcn_logits", _CHANNELS, classes, size=doubled, bias=True),
    ]  # fmt: skip
