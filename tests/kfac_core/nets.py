"""Tiny float64 networks and batches for exactness tests."""

import torch
from torch import Tensor, nn


def conv_net() -> nn.Module:
    """Stride, padding, dilation, groups, a layer with and without bias, and in-place activations."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=1, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, (3, 2), stride=2, padding=(2, 1), dilation=(2, 1), groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 3, 1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.Tanh(),
        nn.Linear(5, 3, bias=False),
    ).double()


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images [size, 2, 5, 5] and labels of three classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 5, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (size,), generator=generator)
