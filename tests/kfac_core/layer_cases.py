"""One module of every layer kind and option, by name, with the input that it is tried on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

EXAMPLES = 4
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "linear-no-bias": (lambda: nn.Linear(3, 2, bias=False), (3,)),
    "linear-frozen-bias": (lambda: freeze(nn.Linear(3, 2), "bias"), (3,)),
    "linear-sequence": (lambda: nn.Linear(3, 2), (5, 3)),
    "linear-two-sequence-dimensions": (lambda: nn.Linear(3, 2), (2, 3, 3)),
    "linear-transposed-input": (lambda: nn.Sequential(Transposed(), nn.Linear(3, 2)), (3, 5)),
    "linear-called-three-times": (lambda: Repeated(nn.Linear(3, 3), 3), (3,)),
    "linear-called-by-keyword": (lambda: ByKeyword(nn.Linear(3, 2)), (3,)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), (2, 7)),
    "conv1d-groups-dilation": (lambda: nn.Conv1d(2, 4, 2, dilation=2, groups=2, bias=False), (2, 6)),
    "conv1d-same": (lambda: nn.Conv1d(2, 3, 4, padding="same"), (2, 5)),
    "conv1d-circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5)),
    "conv1d-reflect-same": (lambda: nn.Conv1d(2, 3, 2, padding="same", padding_mode="reflect"), (2, 5)),
    "conv-1x1": (lambda: nn.Conv2d(3, 2, 1), (3, 2, 2)),
    "conv-depthwise": (lambda: nn.Conv2d(3, 6, 3, padding=1, groups=3), (3, 3, 3)),
    "conv-frozen-bias": (lambda: freeze(nn.Conv2d(2, 2, 2), "bias"), (2, 3, 3)),
    "conv-called-twice": (lambda: Repeated(nn.Conv2d(2, 2, 3, padding=1), 2), (2, 3, 3)),
    "conv-channels-last": (lambda: nn.Sequential(ChannelsLast(), nn.Conv2d(2, 4, 3, groups=2)), (2, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (2, 1, 2), padding=(1, 0, 1)), (2, 3, 2, 3)),
    "conv3d-strided": (lambda: nn.Conv3d(2, 4, 2, (2, 1, 1), 1, (1, 2, 1), groups=2), (2, 3, 3, 2)),
    "conv3d-circular": (lambda: nn.Conv3d(1, 2, 2, padding="same", padding_mode="circular"), (1, 2, 2, 3)),
    "transposed1d": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 4)),
    "transposed2d": (lambda: nn.ConvTranspose2d(2, 3, (3, 2), (2, 1), (1, 0)), (2, 3, 2)),
    "transposed2d-groups": (
        lambda: nn.ConvTranspose2d(4, 6, (2, 3), 2, 1, groups=2, dilation=(2, 1), bias=False),
        (4, 3, 3),
    ),
    "transposed2d-cropped": (lambda: nn.ConvTranspose2d(2, 2, 2, stride=2, padding=2), (2, 4, 4)),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 2, 2, stride=(1, 2, 1)), (2, 2, 1, 2)),
    "conv1d-of-transformers": (lambda: Conv1D(2, 3), (3,)),
    "conv1d-of-transformers-sequence": (lambda: nn.Sequential(Conv1D(2, 3), nn.Tanh(), Conv1D(3, 2)), (5, 3)),
    "embedding": (lambda: nn.Embedding(4, 3), ()),
    "embedding-sequence": (lambda: nn.Embedding(4, 3), (6,)),  # six of four tokens: some repeat
    "embedding-of-two-tokens": (lambda: nn.Embedding(2, 3), (6,)),
    "embedding-padding": (lambda: nn.Embedding(4, 3, padding_idx=2), (6,)),
    "embedding-called-twice": (lambda: Doubled(nn.Embedding(4, 3)), (3,)),
    "frozen-weight-beside": (lambda: nn.Sequential(freeze(nn.Linear(3, 3), "weight"), nn.Linear(3, 2)), (3,)),
}
REDUCED = (
    "linear",
    "conv1d-of-transformers-sequence",
    "linear-sequence",
    "linear-two-sequence-dimensions",
    "linear-called-three-times",
)


def _conv(stride: int, dilation: int, groups: int, padding: object, mode: str, variant: int) -> nn.Module:
    """Kernel and bias alternate with the variant."""
    kernel = ((3, 3), (2, 3))[variant % 2]
    return nn.Conv2d(
        2, 4, kernel, stride, padding, dilation, groups, bias=variant // 2 % 2 == 0, padding_mode=mode
    )


# Each pair of values of two options occurs; torch has no convolution of padding `same` with a stride.
for index, (m, p) in enumerate(product(range(4), range(3))):
    mode, padding = ("zeros", "circular", "reflect", "replicate")[m], ("valid", "same", (2, 1))[p]
    stride = 1 if padding == "same" else 1 + (m + p // 2) % 2
    dilation, groups = 1 + (m // 2 + p) % 2, 1 + (m + m // 2 + p // 2) % 2
    name = f"conv-{mode}-{padding}-stride{stride}-dilation{dilation}-groups{groups}".replace(" ", "")
    CASES[name] = partial(_conv, stride, dilation, groups, padding, mode, index), (2, 5, 6)


def module_and_batch(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The module in float64, inputs of all examples and a weight for each of its outputs."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    module = make().double()
    if "embedding" in name:
        x = torch.randint(0, 2 if "two" in name else 4, (EXAMPLES, *shape))
    else:
        x = torch.randn(EXAMPLES, *shape, dtype=torch.float64)
    return module, x, torch.randn_like(module(x).detach())


def loss(outputs: Tensor, weights: Tensor) -> Tensor:
    """A batch mean whose gradient differs at every output of every example."""
    return (outputs * weights).flatten(1).square().sum(1).mean()


def freeze(module: nn.Module, parameter: str) -> nn.Module:
    getattr(module, parameter).requires_grad_(False)
    return module


class Repeated(nn.Module):
    """The same layer several times in a row, as in a recurrent net."""

    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.inner(x))
        return x


class Doubled(nn.Module):
    """The same embedding for two halves of a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens) * self.inner(tokens.flip(1)).tanh()


class ByKeyword(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(input=x)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)
