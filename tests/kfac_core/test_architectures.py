"""Promise: on architectures that nobody here wrote K-FAC takes the share stated here, and says nothing false.

The models are tiny random configurations. Each takes its batches from a fixed set with a rule, so that a few
steps lower the loss. The shares rise as kinds of layers are added; what stays plain is named in
`print(kfac)`. transformers comes with the `language` extra.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig

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


def _next_token(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"][:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


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
    "albert": _text("AlbertConfig", "AlbertForMaskedLM", embedding_size=16, **_BERT),
    "t5": _text("T5Config", "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64,
                num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0),
    "llama": _text("LlamaConfig", "LlamaForCausalLM", **_LLAMA),
    "llama, tied": _text("LlamaConfig", "LlamaForCausalLM", tie_word_embeddings=True, **_LLAMA),
    "mixtral": _text("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2,
                     **_LLAMA),
    "mamba": _text("MambaConfig", "MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=32,
                   num_hidden_layers=2, state_size=4),
    "vit": _images(_hugging_face("ViTConfig", "ViTForImageClassification", **_VIT)),
    "convnext": _images(_hugging_face("ConvNextConfig", "ConvNextForImageClassification", depths=[1, 1],
                                      hidden_sizes=[8, 16], num_stages=2, patch_size=4, num_labels=CLASSES)),
    "wav2vec2": Architecture(_speech, _labelled(400), _classified),
    "lstm": Architecture(LSTMTagger, _texts(), _next_token),
})  # fmt: skip
SHARES = {
    "gpt2": 0.989, "albert": 0.977, "t5": 0.944, "llama": 0.994, "llama, tied": 0.993, "mixtral": 0.199,
    "mamba": 0.958, "vit": 0.954, "convnext": 0.973, "wav2vec2": 0.831, "lstm": 0.174,
}  # fmt: skip
UNTAKEN_CALLS = {"mamba": "no statistics of backbone.layers.0.mixer.conv1d"}
"""Layers whose weights their model uses without calling them: K-FAC says so."""
pytestmark = pytest.mark.filterwarnings("default:Converting a tensor with requires_grad:UserWarning")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="comes with the extra `language`"
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_share_taken_is_known_and_steps_lower_the_loss(name, logged, recwarn):
    torch.manual_seed(0)
    model, architecture = ARCHITECTURES[name].make().train(), ARCHITECTURES[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = KFACConfig.sc20(kl_clip=0.01, damping=0.01, factor_update_steps=1, inverse_update_steps=2)
    kfac = KFAC(model, config, lr=optimizer)
    share = kfac.summary().share
    assert share == pytest.approx(SHARES[name], abs=0.0006)
    assert ("trained parameters" in logged.text) == (share < 0.8)
    first, *_ = batches = architecture.batches()
    with torch.no_grad():
        before = float(architecture.loss(model, first))
    for batch in (first, *batches, first):
        optimizer.zero_grad()
        architecture.loss(model, batch).backward()
        kfac.step()
        optimizer.step()
    with torch.no_grad():
        after = float(architecture.loss(model, first))
    assert after < before
    said = [str(warning.message) for warning in recwarn if "K-FAC" in str(warning.message)]
    assert len(said) == (name in UNTAKEN_CALLS)
    assert all(UNTAKEN_CALLS[name] in text for text in said)
