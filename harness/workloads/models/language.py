"""BERT and GPT-2 of any size, from transformers, with every projection an `nn.Linear`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from harness.workloads.sources.extras import import_extra


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
