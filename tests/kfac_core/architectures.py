"""Architectures that nobody here wrote, as tiny random configurations with a task that they can learn.

Each takes its batches from a fixed set, so that a few steps lower the loss. transformers comes with the
`language` extra.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

VOCABULARY, LENGTH, CLASSES, BATCH, BATCHES = 64, 12, 5, 16, 4


@dataclass(frozen=True)
class Architecture:
    """A model, its batches, and its loss.

    Attributes:
        make: the model, with random weights.
        batches: keyword arguments of `loss`, a list of batches.
        loss: the mean loss of a model on a batch.
    """

    make: Callable[[], nn.Module]
    batches: Callable[[], list[dict[str, Tensor]]]
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


def _tokens(seed: int) -> Tensor:
    """Sequences with a rule: each token is the last one plus 1 or 2, from a random start."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 3, (BATCH, LENGTH), generator=generator)
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    return (start + steps.cumsum(1)) % VOCABULARY


def _texts(**more: bool) -> Callable[[], list[dict[str, Tensor]]]:
    return lambda: [{"input_ids": _tokens(seed), "labels": _tokens(seed)} for seed in range(BATCHES)]


def _labelled(*shape: int) -> Callable[[], list[dict[str, Tensor]]]:
    """Noise around one mean a class."""

    def batches() -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        means = torch.randn(CLASSES, *shape, generator=generator)
        made = []
        for _ in range(BATCHES):
            y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
            made.append({"x": means[y] * 0.5 + torch.randn(BATCH, *shape, generator=generator), "y": y})
        return made

    return batches


def _own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss that a model of transformers returns."""
    loss: Tensor = model(**batch).loss
    return loss


def _classified(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    out = model(batch["x"])
    return functional.cross_entropy(getattr(out, "logits", out), batch["y"])


def _denoised(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    noise = torch.randn(batch["x"].shape, generator=torch.Generator().manual_seed(1))
    return functional.mse_loss(model(batch["x"] + 0.5 * noise), batch["x"])


def _hugging_face(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers from the names of its classes."""

    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return make


class LSTMTagger(nn.Module):
    """Two layers of LSTM between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(32, VOCABULARY)
        self.lstm = nn.LSTM(16, 32, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[B, T, vocabulary]`."""
        out: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return out


class Encoder(nn.Module):
    """torch's own TransformerEncoder, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[B, T, vocabulary]`."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        out: Tensor = self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))
        return out


def _next_token(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"][:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class Residual(nn.Module):
    """A residual block of two convolutions, as of ResNet."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([norm(channels), norm(channels)])

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return torch.relu(x + self.norms[1](self.two(torch.relu(self.norms[0](self.one(x))))))


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a skip connection, as of a diffusion model."""

    def __init__(self) -> None:
        super().__init__()

        def norm(channels: int) -> nn.Module:
            return nn.GroupNorm(4, channels)

        self.into, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down, self.up = nn.Conv2d(8, 16, 3, 2, 1), nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.left, self.middle = Residual(8, norm), Residual(16, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Images of the same size."""
        left = self.left(self.into(x))
        out: Tensor = self.out(torch.cat([left, self.up(self.middle(self.down(left)))], 1))
        return out


class LowRankAdapted(nn.Module):
    """A frozen layer with a trained product of two small ones beside it, as LoRA (Hu et al. 2021)."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        out: Tensor = self.frozen(x) + self.up(self.down(x))
        return out


def _adapted() -> nn.Module:
    return nn.Sequential(
        LowRankAdapted(nn.Linear(32, 64)),
        nn.GELU(),
        LowRankAdapted(nn.Linear(64, 64)),
        nn.GELU(),
        nn.Linear(64, CLASSES),
    )


def _mixer() -> nn.Module:
    """An MLP over patches and over channels in turn."""

    class Transposed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x.mT).mT

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    return nn.Sequential(
        nn.Linear(16, 24),
        Transposed(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))),
        nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU(), Mean(), nn.Linear(24, CLASSES),
    )  # fmt: skip


def _residual_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Residual(8),
        nn.Conv2d(8, 16, 1, 2), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


def _speech() -> nn.Module:
    return _hugging_face(
        "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        classifier_proj_size=16, num_labels=CLASSES, mask_time_prob=0.0, layerdrop=0.0, **_NO_DROPOUT,
    )()  # fmt: skip


_NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 16,
}  # fmt: skip
_VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "image_size": 16, "patch_size": 4, "num_labels": CLASSES, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def _text(config: str, model: str, **options: Any) -> Architecture:
    return Architecture(_hugging_face(config, model, **options), _texts(), _own_loss)


def _images(make: Callable[[], nn.Module]) -> Architecture:
    return Architecture(make, _labelled(3, 16, 16), _classified)


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({
    "gpt2": _text("GPT2Config", "GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2,
                  n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "bert": _text("BertConfig", "BertForMaskedLM", **_BERT),
    "albert": _text("AlbertConfig", "AlbertForMaskedLM", embedding_size=16, **_BERT),
    "t5": _text("T5Config", "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64,
                num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0),
    "llama": _text("LlamaConfig", "LlamaForCausalLM", **_LLAMA),
    "llama, tied": _text("LlamaConfig", "LlamaForCausalLM", tie_word_embeddings=True, **_LLAMA),
    "qwen2": _text("Qwen2Config", "Qwen2ForCausalLM", **_LLAMA),
    "mixtral": _text("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2,
                     **_LLAMA),
    "mamba": _text("MambaConfig", "MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=32,
                   num_hidden_layers=2, state_size=4),
    "vit": _images(_hugging_face("ViTConfig", "ViTForImageClassification", **_VIT)),
    "convnext": _images(_hugging_face("ConvNextConfig", "ConvNextForImageClassification", depths=[1, 1],
                                      hidden_sizes=[8, 16], num_stages=2, patch_size=4, num_labels=CLASSES)),
    "swin": _images(_hugging_face("SwinConfig", "SwinForImageClassification", image_size=16, patch_size=2,
                                  embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4,
                                  num_labels=CLASSES, drop_path_rate=0.0)),
    "wav2vec2": Architecture(_speech, _labelled(400), _classified),
    "resnet": _images(_residual_net),
    "u-net": Architecture(UNet, _labelled(3, 16, 16), _denoised),
    "lstm": Architecture(LSTMTagger, _texts(), _next_token),
    "transformer encoder": Architecture(Encoder, _texts(), _next_token),
    "low-rank adapters": Architecture(_adapted, _labelled(32), _classified),
    "mixer": Architecture(_mixer, _labelled(8, 16), _classified),
    "mlp": Architecture(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, CLASSES)),
                        _labelled(32), _classified),
    "weight norm": Architecture(
        lambda: nn.Sequential(weight_norm(nn.Linear(32, 64)), nn.GELU(), nn.Linear(64, CLASSES)),
        _labelled(32), _classified),
})  # fmt: skip


def made(name: str, seed: int = 0) -> nn.Module:
    """The model of an architecture, with the weights of a seed, in training mode."""
    torch.manual_seed(seed)
    return ARCHITECTURES[name].make().train()
