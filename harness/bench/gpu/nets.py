"""Small nets with every kind of layer that K-FAC takes, and an encoder with the shapes of BERT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ConvNet(nn.Module):
    """Convolutions: wide, grouped, strided, dilated, 1 by 1, in one dimension."""

    def __init__(self, wide: int = 640, channels: int = 64) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.a, self.grouped = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.point = nn.Conv2d(32, channels, 1, stride=2)
        self.dilated = nn.Conv2d(channels, channels, 3, padding=2, dilation=2)
        self.wide = nn.Conv2d(channels, wide, 1)
        self.signal = nn.Conv1d(wide, 24, 3, padding=1, padding_mode="circular")
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, 10]` of `[B, 3, height, width]`."""
        x = self.grouped(self.a(torch.relu(self.norm(self.stem(images)))))
        x = self.wide(self.dilated(self.point(x)))
        logits: Tensor = self.head(self.signal(x.flatten(2)).mean(2))
        return logits


class Transformer(nn.Module):
    """An embedding, attention, a feed-forward block and a head over the vocabulary."""

    def __init__(self, vocabulary: int = 400, features: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features, padding_idx=0)
        self.norm = nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)
        self.head = nn.Linear(features, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[B, length, vocabulary]` of `[B, length]`."""
        x = self.embedding(tokens)
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(query, key, value))
        logits: Tensor = self.head(x + self.down(torch.relu(self.up(self.norm(x)))))
        return logits


class Encoder(nn.Module):
    """The layers of BERT (Devlin et al. 2019) with its head for masked words, as transformers has them.

    For machines without transformers: every linear layer has the shape, and the number of tokens, that it has
    in BERT; attention has no mask and there is no dropout.
    """

    def __init__(self, layers: int, hidden: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Parameter(0.02 * torch.randn(length, hidden))
        self.blocks = nn.Sequential(*(EncoderBlock(hidden, heads) for _ in range(layers)))
        self.cls = nn.Sequential(
            nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[B, length, vocabulary]` of `[B, length]`."""
        logits: Tensor = self.cls(self.blocks(self.embeddings(tokens) + self.positions))
        return logits


class EncoderBlock(nn.Module):
    """Attention and a feed-forward block four times as wide, each followed by its norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.attention_norm, self.output_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, length, hidden]` to the same."""
        query, key, value = (
            project(x).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.output(seen))
        result: Tensor = self.output_norm(x + self.down(functional.gelu(self.up(x))))
        return result
