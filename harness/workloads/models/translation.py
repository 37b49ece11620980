"""The Transformer of Vaswani et al. 2017, with every projection a plain `nn.Linear`.

`nn.Transformer` hides three of an attention's projections in one parameter, which K-FAC does not know. As in
DP-KFAC's release, attention has no biases, and the target's embedding may share its weight with the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Transformer(nn.Module):
    """Scores of the next target token from a source and the target so far.

    Padding stands behind sentences. No token attends to the source's padding, nor to a later one of the
    target, and so to none of the target's padding: what is scored for a token is the same without any.

    Args:
        options: `layers`, `hidden`, `feed_forward`, `heads`, `vocabulary`, `dropout`, `tied`.
        padding: id of the token that fills up shorter sources.
    """

    def __init__(self, options: Mapping[str, Any], padding: int) -> None:
        super().__init__()
        vocabulary, hidden = options["vocabulary"], options["hidden"]
        sizes = hidden, options["feed_forward"], options["heads"], options["dropout"]
        self._padding, self._scale = padding, hidden**0.5
        self.source_embedding = nn.Embedding(vocabulary, hidden)
        self.target_embedding = nn.Embedding(vocabulary, hidden)
        self.dropout = nn.Dropout(options["dropout"])
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(options["layers"]))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(options["layers"]))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if "embedding" in name or name == "head.weight":
                nn.init.normal_(parameter, std=hidden**-0.5)  # of unit variance once scaled, or as scores
            elif parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        if options["tied"]:
            self.head.weight = self.target_embedding.weight

    def forward(self, source: Tensor, shown: Tensor) -> Tensor:
        """Scores `[B, T, vocabulary]` of what follows each token of `shown` [B, T], from `source` [B, S]."""
        scores: Tensor = self.head(self.decode(*self.encode(source), shown))
        return scores

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Memory `[B, S, hidden]`, and which of it may be attended to, `[B, 1, 1, S]`."""
        real = (source != self._padding)[:, None, None]
        memory = self._embedded(self.source_embedding, source)
        for layer in self.encoder:
            memory = layer(memory, real)
        return memory, real

    def decode(self, memory: Tensor, real: Tensor, shown: Tensor) -> Tensor:
        """Features `[B, T, hidden]` of what follows each token of `shown`."""
        features = self._embedded(self.target_embedding, shown)
        for layer in self.decoder:
            features = layer(features, memory, real)
        return features

    def _embedded(self, embedding: nn.Module, tokens: Tensor) -> Tensor:
        vectors = embedding(tokens) * self._scale
        positions = sinusoids(tokens.shape[1], vectors.shape[2], vectors.device)
        embedded: Tensor = self.dropout(vectors + positions)
        return embedded


class EncoderLayer(nn.Module):
    """Attention to the source, then a network on each token; each is added to its input and normalised."""

    def __init__(self, hidden: int, feed_forward: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, dropout)
        self.feed_forward = FeedForward(hidden, feed_forward, dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        """`[B, S, hidden]` to the same."""
        tokens = self.norms[0](tokens + self.dropout(self.attention(tokens, tokens, real)))
        normalised: Tensor = self.norms[1](tokens + self.dropout(self.feed_forward(tokens)))
        return normalised


class DecoderLayer(nn.Module):
    """Attention to earlier tokens, attention to the source, a network on each token."""

    def __init__(self, hidden: int, feed_forward: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = Attention(hidden, heads, dropout)
        self.cross_attention = Attention(hidden, heads, dropout)
        self.feed_forward = FeedForward(hidden, feed_forward, dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, memory: Tensor, real: Tensor) -> Tensor:
        """`[B, T, hidden]` and the source's `[B, S, hidden]` to `[B, T, hidden]`."""
        tokens = self.norms[0](tokens + self.dropout(self.self_attention(tokens, tokens)))
        tokens = self.norms[1](tokens + self.dropout(self.cross_attention(tokens, memory, real)))
        normalised: Tensor = self.norms[2](tokens + self.dropout(self.feed_forward(tokens)))
        return normalised


class Attention(nn.Module):
    """Scaled dot-product attention of several heads."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self._heads, self._dropout = heads, dropout

    def forward(self, asking: Tensor, asked: Tensor, real: Tensor | None = None) -> Tensor:
        """`asking` [B, T, hidden] attends to `asked` [B, S, hidden].

        Args:
            asking: T queries.
            asked: S keys and values.
            real: which of `asked` may be seen, `[B, 1, 1, S]`; None lets each see what is not behind it.
        """
        query, key, value = (
            part.unflatten(2, (self._heads, -1)).transpose(1, 2)
            for part in (self.query(asking), self.key(asked), self.value(asked))
        )
        dropped = self._dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=real, dropout_p=dropped, is_causal=real is None
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Sequential):
    """Two layers, applied to each token alone."""

    def __init__(self, hidden: int, feed_forward: int, dropout: float) -> None:
        super().__init__(
            nn.Linear(hidden, feed_forward), nn.ReLU(), nn.Dropout(dropout), nn.Linear(feed_forward, hidden)
        )


def sinusoids(length: int, hidden: int, device: torch.device) -> Tensor:
    """Position encodings `[length, hidden]`, not learned (Vaswani et al. 2017, section 3.5)."""
    places = torch.arange(length, dtype=torch.float32, device=device)
    pairs = torch.arange(0, hidden, 2, dtype=torch.float32, device=device)
    angles = places[:, None] * 10_000 ** (-pairs / hidden)
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)[:, :hidden]


@torch.no_grad()
def translate(model: Transformer, source: Tensor, most: Tensor, begin: int, end: int) -> list[list[int]]:
    """Greedy decoding: the likeliest token each time, until the end mark or `most` tokens.

    Args:
        model: in evaluation mode.
        source: `[B, S]`.
        most: tokens of each translation at most, `[B]`, >= 1.
        begin: id of the mark that a target begins with.
        end: id of the mark that ends it.

    Returns:
        The ids of each translation, without marks.
    """
    found: list[list[int]] = [[] for _ in range(len(source))]
    memory, real = model.encode(source)
    rows = torch.arange(len(source), device=source.device)  # sentences that are not done
    shown = torch.full((len(source), 1), begin, device=source.device)
    while len(rows):
        likeliest = model.head(model.decode(memory, real, shown)[:, -1]).argmax(1)
        for row, token in zip(rows.tolist(), likeliest.tolist(), strict=True):
            if token != end:
                found[row].append(token)
        going = (likeliest != end) & (most > shown.shape[1])
        shown = torch.cat((shown, likeliest[:, None]), dim=1)[going]
        rows, memory, real, most = rows[going], memory[going], real[going], most[going]
    return found
