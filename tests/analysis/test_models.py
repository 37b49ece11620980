"""Promise: the tables of the papers' networks are the networks, layer by layer, to the parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.cost_model.errors import CostModelError
from analysis.cost_model.models import MODELS, Model, read_model
from kfac_core import KFACConfig
from kfac_core.layers import find_layers
from kfac_core.placement import FactorShape

# shared reference "sizes" (derived independently): layers, gradient, A, G, A triangle, G triangle, eigen data
SIZES = {
    "resnet32": (32, 461882, 4048474, 54116, 2029107, 27631, 4113476),
    "resnet110": (110, 1719866, 15370330, 193892, 7703139, 98975, 15604228),
    "resnet50": (54, 25503912, 124642410, 29209152, 62348671, 14618356, 153934054),
    "resnet101": (105, 44443816, 233825386, 49263168, 116970623, 24658420, 283258086),
    "resnet152": (156, 60041384, 323740778, 65778240, 161955199, 32927476, 389765350),
}
# trained parameters that the networks' public releases state
PARAMETERS = {
    "resnet50": 25_557_032, "resnet101": 44_549_160, "resnet152": 60_192_808,
    "densenet201": 20_013_928, "inception_v4": 42_679_816,
    "bert_base": 108_891_648 + 1_538, "bert_large": 334_092_288 + 2_050,
}  # fmt: skip
LAYERS = {"densenet201": 201, "inception_v4": 150, "bert_base": 73, "bert_large": 145, "resnet20": 20}


@pytest.mark.parametrize("name", SIZES)
def test_factors_and_gradients_have_the_published_sizes(name):
    shapes = read_model(name).shapes
    factors = [factor for shape in shapes for factor in (shape.a, shape.g)]
    assert SIZES[name] == (
        len(shapes),
        sum(shape.gradient_elements for shape in shapes),
        sum(shape.a.elements for shape in shapes),
        sum(shape.g.elements for shape in shapes),
        sum(shape.a.packed_elements for shape in shapes),
        sum(shape.g.packed_elements for shape in shapes),
        sum(factor.elements + factor.dim for factor in factors),
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_public_networks(name):
    assert read_model(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_of_the_network_is_there(name):
    assert len(read_model(name).layers) == LAYERS[name]


@pytest.mark.parametrize("name", MODELS)
def test_layer_names_are_unique_and_sizes_positive(name):
    model = read_model(name)
    assert len({layer.name for layer in model.layers}) == len(model.layers)
    assert all(layer.positions > 0 and layer.forward_flops > 0 for layer in model.layers)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, first: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *conv(channels, width, 1), nn.ReLU(), *conv(width, width, 3, stride), nn.ReLU(),
            *conv(width, 4 * width, 1),
        )  # fmt: skip
        self.short = nn.Sequential(*conv(channels, 4 * width, 1, stride)) if first else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.short(x))


class Basic(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stride = width // channels
        self.body = nn.Sequential(*conv(channels, width, 3, stride), nn.ReLU(), *conv(width, width, 3))
        self.stride, self.widen = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        short = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.widen))
        return functional.relu(self.body(x) + short)


class Dense(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), *conv(channels, 128, 1), nn.ReLU(),
            nn.Conv2d(128, 32, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    ]  # fmt: skip


def head(features: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes)]


def resnet50() -> nn.Module:
    parts: list[nn.Module] = [*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            parts.append(Bottleneck(channels, width, 2 if stage and not block else 1, block == 0))
            channels = 4 * width
    return nn.Sequential(*parts, *head(2048, 1000))


def resnet20() -> nn.Module:
    parts: list[nn.Module] = [*conv(3, 16, 3), nn.ReLU()]
    for channels, width in (
        (16, 16),
        (16, 16),
        (16, 16),
        (16, 32),
        (32, 32),
        (32, 32),
        (32, 64),
        (64, 64),
        (64, 64),
    ):
        parts.append(Basic(channels, width))
    return nn.Sequential(*parts, *head(64, 10))


def densenet201() -> nn.Module:
    parts: list[nn.Module] = [*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for block, layers in enumerate((6, 12, 48, 32)):
        for _ in range(layers):
            parts.append(Dense(channels))
            channels += 32
        parts.append(nn.BatchNorm2d(channels))
        if block < 3:
            parts += [nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return nn.Sequential(*parts, *head(1920, 1000))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 10))


REAL = {
    "resnet50": (resnet50, (3, 224, 224)), "resnet20": (resnet20, (3, 32, 32)),
    "densenet201": (densenet201, (3, 224, 224)), "perceptron": (perceptron, (64,)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_the_table_is_what_kfac_finds_in_a_real_network(name):
    build, size = REAL[name]
    with torch.device("meta"):
        network = build()
        table = read_model(name)
        outputs: dict[int, int] = {}
        found = find_layers(network, KFACConfig())
        for layer in found:
            layer.module.register_forward_hook(
                lambda module, _, out: outputs.__setitem__(id(module), out[0].numel())
            )
        network(torch.zeros(2, *size))
    assert sorted_shapes(found) == sorted_shapes(table.layers)
    real = sorted((layer.shape.a.dim, layer.shape.g.dim, outputs[id(layer.module)]) for layer in found)
    tabled = sorted((x.shape.a.dim, x.shape.g.dim, x.positions * x.outputs) for x in table.layers)
    assert real == tabled
    assert sum(parameter.numel() for parameter in network.parameters()) == table.parameters


def sorted_shapes(layers) -> list[tuple[FactorShape, FactorShape]]:
    return sorted(((x.shape.a, x.shape.g) for x in layers), key=lambda pair: (pair[0].dim, pair[1].dim))


def test_the_flops_of_resnet_50_are_the_published_four_billion_multiplications():
    model: Model = read_model("resnet50")
    assert model.forward_flops == pytest.approx(2 * 4.09e9, rel=0.01)  # torchvision's documentation


def test_an_unknown_model_is_an_error_that_lists_the_models():
    with pytest.raises(CostModelError, match=r"'resnet51' is not one of .*did you mean resnet5"):
        read_model("resnet51")
