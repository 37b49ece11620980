"""Promise: the table of a workload's network is the network that its ranks build."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from analysis.cost_model.errors import CostModelError
from analysis.cost_model.models import Model
from analysis.cost_model.models.by_workload import SENTENCE_TOKENS, model_of
from harness.workloads import WORKLOADS
from harness.workloads.models import CifarVGG16, cifar_resnet, imagenet_network
from harness.workloads.models.language import bert, gpt2
from harness.workloads.models.translation import Transformer
from harness.workloads.models.unet import UNet
from kfac_core import KFACConfig
from kfac_core.layers import find_layers

TEXT = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 512, "sequence_length": 16}
TRANSLATION = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 512, "feed_forward": 128}
EMBEDDINGS = {
    "bert": ("bert.embeddings", "cls"), "gpt": ("transformer.wte", "transformer.wpe", "lm_head"),
    "multi30k": ("source_embedding", "target_embedding", "head"),
}  # fmt: skip


def options_of(workload: str, **options) -> dict[str, object]:
    return {**WORKLOADS[workload].options, **options}


def table(workload: str, **options) -> Model:
    return model_of(workload, options_of(workload, **options), EMBEDDINGS.get(workload, ()))


CASES: dict[str, tuple[str, dict[str, object], Callable[[dict], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "resnet20": ("cifar10", {"model": "resnet20"}, lambda _: cifar_resnet(20, 10, 16), ((3, 32, 32),)),
    "vgg16": ("cifar100", {"model": "vgg16"}, lambda _: CifarVGG16(100), ((3, 32, 32),)),
    "resnet50 at 64 pixels": (
        "imagenet", {"image_size": 64}, lambda _: imagenet_network("resnet50", 1000), ((3, 64, 64),),
    ),
    "unet": ("brain_mri", {"image_size": 96}, lambda _: UNet(), ((3, 96, 96),)),
    "transformer": (
        "multi30k", TRANSLATION, lambda options: Transformer(options, 0), ((SENTENCE_TOKENS,),) * 2,
    ),
    "bert": ("bert", TEXT, bert, ()),
    "gpt": ("gpt", TEXT, gpt2, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_table_is_what_kfac_finds_in_the_workloads_network(name):
    workload, options, build, inputs = CASES[name]
    if workload in ("bert", "gpt"):
        pytest.importorskip("transformers")
    tabled = table(workload, **options)
    with torch.device("meta"):
        network = build(options_of(workload, **options))
        found = find_layers(network, KFACConfig(skip=EMBEDDINGS.get(workload, ())))
        outputs = {layer.name: 0 for layer in found}
        for layer in found:
            layer.module.register_forward_hook(
                lambda module, _, out, name=layer.name: outputs.__setitem__(name, out[0].numel())
            )
        if inputs:
            kind = torch.float32 if len(inputs[0]) == 3 else torch.int64
            network(*(torch.zeros(2, *shape, dtype=kind) for shape in inputs))
    real = sorted((layer.shape.a.dim, layer.shape.g.dim, outputs[layer.name]) for layer in found)
    size = {True: lambda layer: layer.positions * layer.outputs, False: lambda layer: 0}[bool(inputs)]
    assert real == sorted((layer.shape.a.dim, layer.shape.g.dim, size(layer)) for layer in tabled.layers)
    assert sum(parameter.numel() for parameter in network.parameters()) == tabled.parameters
    if workload in EMBEDDINGS:  # where `skip` matches names
        assert {layer.name for layer in found} == {layer.name for layer in tabled.layers}


def test_mask_rcnn_has_the_parameters_that_torchvision_states():
    """Its documentation of `maskrcnn_resnet50_fpn`, with 91 classes, background included."""
    options = {"classes": 90, "backbone": "resnet50.pth", "train_examples": 8}
    model = model_of("coco", options_of("coco", **options), ("backbone", "rpn"))
    assert model.parameters == 44_401_393
    assert [layer.shape.a.dim for layer in model.layers] == [12545, 1025, 1025, 1025, *[2305] * 4, 1025, 257]
    assert [layer.positions for layer in model.layers[:5]] == [512] * 4 + [128 * 14 * 14]


def test_fewer_pixels_need_flops_in_proportion():
    whole, small = table("imagenet"), table("imagenet", image_size=112)
    assert small.forward_flops / whole.forward_flops == pytest.approx(0.25, rel=0.1)  # sides are rounded up
    assert (whole.name, small.name) == ("resnet50", "resnet50, 112 pixels")


def test_a_skipped_layer_still_counts_as_parameters_and_work():
    whole = table("bert", **TEXT)
    less = model_of("bert", options_of("bert", **TEXT), (*EMBEDDINGS["bert"], r"bert\.encoder\.layer\.0"))
    assert len(less.layers) == len(whole.layers) // 2
    assert (less.parameters, less.forward_flops) == (whole.parameters, whole.forward_flops)


@pytest.mark.parametrize(
    ("workload", "options", "skip", "message"),
    [
        ("digits", {}, (), "workload='digits' has no table of layers; tables: cifar10"),
        ("imagenet", {"model": "densenet201"}, (), "model='densenet201' of imagenet has no table"),
        ("coco", {}, ("backbone", "rpn"), "with a backbone from a file"),
        ("bert", TEXT, ("cls",), "no table with bert.embeddings preconditioned"),
        ("cifar10", {}, ("nowhere",), "kfac.skip='nowhere' matches no layer of the table of resnet32"),
    ],
)
def test_a_network_without_a_table_is_an_error_that_says_which(workload, options, skip, message):
    with pytest.raises(CostModelError) as error:
        model_of(workload, options_of(workload, **options), skip)
    assert message in str(error.value)
