"""Cards of the language workloads, and what their options allow (no torch, no tokenizers)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from harness.workloads.cards.card import Options, WorkloadCard
from harness.workloads.cards.vision import FILES, SYNTHETIC

BYTES = 256  # a trained vocabulary begins with every byte, so that no text is unknown to it
BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GPT_SPECIALS = ()
SYNTHETIC_TRAIN, SYNTHETIC_TEST = 8192, 256  # sequences that are made up where the options name no number

_TEXT_OPTIONS: dict[str, Any] = {
    "layers": 12,
    "hidden": 768,
    "heads": 12,
    "dropout": 0.1,
    "tied": True,
    "data": FILES,
    "train_text": "train.txt",
    "test_text": "test.txt",
    "tokenizer": "",
    "train_examples": 0,
    "test_examples": 0,
}


def bert_examples(options: Options) -> int:
    """Sequences of an epoch, or 0: those of a text are known once it is read."""
    return _examples(options, len(BERT_SPECIALS), shortest=4)  # [CLS], two tokens, [SEP]


def gpt_examples(options: Options) -> int:
    """As for BERT."""
    return _examples(options, len(GPT_SPECIALS), shortest=2)


def refuse_sizes(options: Options, specials: int, least: Mapping[str, int]) -> None:
    """What no Transformer can be, and no vocabulary with so many special tokens.

    Raises:
        ValueError: a size is below its least one, or does not fit another.
    """
    trained = options["data"] != SYNTHETIC and not options["tokenizer"]
    smallest = {
        "layers": 1,
        "heads": 1,
        "hidden": 1,
        **least,
        "vocabulary": specials + (BYTES if trained else 2),
        "train_examples": 0,
        "test_examples": 0,
    }
    for option, low in smallest.items():
        if options[option] < low:
            raise ValueError(f"{option}={options[option]} is not allowed; use a value >= {low}")
    if options["hidden"] % options["heads"]:
        raise ValueError(f"hidden={options['hidden']} is not a multiple of heads={options['heads']}")
    if not 0 <= options["dropout"] < 1:
        raise ValueError(f"dropout={options['dropout']} is not allowed; use a value in [0, 1)")


def named_or_made_up(options: Options) -> int:
    """Examples that the options name, or that are made up; 0 where only reading tells."""
    made_up = SYNTHETIC_TRAIN if options["data"] == SYNTHETIC else 0
    return int(options["train_examples"]) or made_up


def _examples(options: Options, specials: int, shortest: int) -> int:
    refuse_sizes(options, specials, {"sequence_length": shortest})
    return named_or_made_up(options)


BERT = WorkloadCard(
    module="harness.workloads.language.workload",
    builder="build_bert",
    metrics=MappingProxyType({"accuracy": "higher", "loss": "lower"}),
    options=MappingProxyType({**_TEXT_OPTIONS, "vocabulary": 30522, "sequence_length": 128}),
    train_examples=0,
    counted=bert_examples,
    about="masked words of a text, BERT of any size (Devlin et al. 2019); text files, a part of WikiText-2",
)
GPT = WorkloadCard(
    module="harness.workloads.language.workload",
    builder="build_gpt",
    metrics=MappingProxyType({"accuracy": "higher", "loss": "lower", "perplexity": "lower"}),
    options=MappingProxyType({**_TEXT_OPTIONS, "vocabulary": 50257, "sequence_length": 1024}),
    train_examples=0,
    counted=gpt_examples,
    follows=MappingProxyType({"perplexity": "loss"}),
    about="the next word of a text, GPT-2 of any size (Radford et al. 2019); the same texts",
)
