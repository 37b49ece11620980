"""BERT and GPT-2 from transformers, and the Transformer of 2017; every projection is an `nn.Linear`.

The Transformer is that of Vaswani et al. 2017. `nn.Transformer` stores three projections of an attention in
one parameter, which K-FAC does not support. As in DP-KFAC's release, attention has no biases, and the
target's embedding may share its weight with the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.workloads.sources.files import import_extra


def bert(options: Mapping[str, Any]) -> nn.Module:
    """Devlin et al. 2019, with its heads; the feed-forward layers are 4 times as wide.

    Args:
        options: `layers`, `hidden`, `heads`, `vocabulary`, `sequence_length`, `dropout`, `tied`; and
            where given `positions`, and `next_sentence` for the pooler and the head of that task.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    library = import_extra("transformers", "workload bert", "language")
    config = library.BertConfig(
        vocab_size=options["vocabulary"],
        hidden_size=options["hidden"],
        num_hidden_layers=options["layers"],
        num_attention_heads=options["heads"],
        intermediate_size=4 * options["hidden"],
        max_position_embeddings=options.get("positions") or options["sequence_length"],
        hidden_dropout_prob=options["dropout"],
        attention_probs_dropout_prob=options["dropout"],
        pad_token_id=None,  # no sequence is padded: every row of the embedding has a gradient
        tie_word_embeddings=options["tied"],
    )
    kind = library.BertForPreTraining if options.get("next_sentence") else library.BertForMaskedLM
    model: nn.Module = kind(config)
    head: Any = model.get_submodule("cls.predictions")
    if head.bias is not head.decoder.bias:
        del head.bias  # unused if nothing is tied: it would never have a gradient
    return model


def gpt2(options: Mapping[str, Any]) -> nn.Module:
    """Radford et al. 2019, with its language-model head.

    Args:
        options: `layers`, `hidden`, `heads`, `vocabulary`, `sequence_length`, `dropout`, `tied`.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    library = import_extra("transformers", "workload gpt", "language")
    config = library.GPT2Config(
        vocab_size=options["vocabulary"],
        n_embd=options["hidden"],
        n_layer=options["layers"],
        n_head=options["heads"],
        n_positions=options["sequence_length"],
        resid_pdrop=options["dropout"],
        embd_pdrop=options["dropout"],
        attn_pdrop=options["dropout"],
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=options["tied"],
    )
    model: nn.Module = library.GPT2LMHeadModel(config)
    return with_linear_projections(model)


def with_linear_projections(model: nn.Module) -> nn.Module:
    """Replace transformers' `Conv1D`, a linear layer with its weight stored as `[in, out]`, by `nn.Linear`.

    The function stays the same; K-FAC supports `nn.Linear` and ignores `Conv1D`.
    """
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415  an optional extra

    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Conv1D)]
    for name, module in found:
        inputs, outputs = module.weight.shape
        linear = nn.Linear(inputs, outputs, device=module.weight.device, dtype=module.weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(module.weight.T)
            linear.bias.copy_(module.bias)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, linear)
    return model


class Transformer(nn.Module):
    """Scores of the next target token from a source and the target so far.

    Padding follows the sentence. No token attends to the source's padding or to later tokens of the target,
    which include its padding: the scores of a token do not depend on padding.

    Args:
        options: `layers`, `hidden`, `feed_forward`, `heads`, `vocabulary`, `dropout`, `tied`.
        padding: id of the token that pads shorter sources.
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
                nn.init.normal_(parameter, std=hidden**-0.5)  # unit variance once scaled, and of scores
            elif parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        if options["tied"]:
            self.head.weight = self.target_embedding.weight

    def forward(self, source: Tensor, shown: Tensor) -> Tensor:
        """Scores `[B, T, vocabulary]` of what follows each token of `shown` [B, T], from `source` [B, S]."""
        scores: Tensor = self.head(self.decode(*self.encode(source), shown))
        return scores

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Memory `[B, S, hidden]`, and a mask of what is not padding, `[B, 1, 1, S]`."""
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
    """Self-attention, then a network on each token; each is added to its input and normalised."""

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
    """Self-attention to earlier tokens, attention to the source, a network on each token."""

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
    """Multi-head scaled dot-product attention."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self._heads, self._dropout = heads, dropout

    def forward(self, tokens: Tensor, memory: Tensor, real: Tensor | None = None) -> Tensor:
        """`tokens` attend to `memory`.

        Args:
            tokens: queries, `[B, T, hidden]`.
            memory: keys and values, `[B, S, hidden]`.
            real: mask of `memory` without padding, `[B, 1, 1, S]`; None for a causal mask.
        """
        query, key, value = (
            part.unflatten(2, (self._heads, -1)).transpose(1, 2)
            for part in (self.query(tokens), self.key(memory), self.value(memory))
        )
        dropped = self._dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=real, dropout_p=dropped, is_causal=real is None
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Sequential):
    """Two linear layers, applied to each token."""

    def __init__(self, hidden: int, feed_forward: int, dropout: float) -> None:
        super().__init__(
            nn.Linear(hidden, feed_forward), nn.ReLU(), nn.Dropout(dropout), nn.Linear(feed_forward, hidden)
        )


def sinusoids(length: int, hidden: int, device: torch.device) -> Tensor:
    """Fixed position encodings `[length, hidden]` (Vaswani et al. 2017, section 3.5)."""
    places = torch.arange(length, dtype=torch.float32, device=device)
    pairs = torch.arange(0, hidden, 2, dtype=torch.float32, device=device)
    angles = places[:, None] * 10_000 ** (-pairs / hidden)
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)[:, :hidden]


@torch.no_grad()
def translate(model: Transformer, source: Tensor, maximum: Tensor, begin: int, end: int) -> list[list[int]]:
    """Greedy decoding: the most probable token each time, until the end token or the maximum length.

    Args:
        model: in evaluation mode.
        source: `[B, S]`.
        maximum: tokens of each translation, `[B]`, >= 1.
        begin: id of the token that begins a target.
        end: id of the token that ends it.

    Returns:
        The ids of each translation, without begin and end.
    """
    translations: list[list[int]] = [[] for _ in range(len(source))]
    memory, real = model.encode(source)
    rows = torch.arange(len(source), device=source.device)  # unfinished sentences
    shown = torch.full((len(source), 1), begin, device=source.device)
    while len(rows):
        tokens = model.head(model.decode(memory, real, shown)[:, -1]).argmax(1)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            if token != end:
                translations[row].append(token)
        unfinished = (tokens != end) & (maximum > shown.shape[1])
        shown = torch.cat((shown, tokens[:, None]), dim=1)[unfinished]
        rows, memory = rows[unfinished], memory[unfinished]
        real, maximum = real[unfinished], maximum[unfinished]
    return translations
