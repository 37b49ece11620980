"""BERT and GPT on texts: what a login node knows of them; checks of any Transformer's options (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.workloads.description import (
    DATA_MEANINGS,
    EMBEDDED,
    FILES,
    SYNTHETIC,
    Options,
    WorkloadDescription,
    check_minimum,
    check_share,
)

BYTES = 256  # a trained vocabulary contains every byte, so that it can encode any text
BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GPT_SPECIALS = ()
EMPTY_LINES, TITLES = "empty_lines", "titles"  # how documents of a text are told apart
SYNTHETIC_TRAIN, SYNTHETIC_TEST = 8192, 256  # sequences, unless the options give a number

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

TRANSFORMER_MEANINGS = {
    **DATA_MEANINGS,
    "layers": "Transformer blocks, of the encoder and of the decoder where it has both, at least 1",
    "hidden": "width of the model, a multiple of `heads`",
    "heads": "attention heads, at least 1",
    "dropout": "share of activations set to zero while training, in [0, 1)",
    "tied": "whether the word embedding and the output layer share their weights",
    "tokenizer": "a `tokenizer.json` file; empty trains a byte-level BPE on the training text",
    "vocabulary": "tokens, special ones included; at least 256 and those for a tokenizer trained here",
}
_TEXT_MEANINGS = {
    **TRANSFORMER_MEANINGS,
    "train_text": "training text in the data folder, lines of UTF-8: one file, or several separated by "
    "commas, plain, `.gz` or `.xz`; `*`, `?` and `[...]` match names, in alphabetical order",
    "test_text": "held-out text in the data folder, files as of `train_text`",
    "train_examples": "how many training sequences are used; 0 for all",
    "test_examples": "how many held-out sequences are used; 0 for all",
    "sequence_length": "tokens of a sequence, at least 4 for `bert` and 2 for `gpt`",
}


_BERT_MEANINGS = {
    **_TEXT_MEANINGS,
    "sequence_length": "tokens of a sequence, special ones included, at least 4, with `next_sentence` 8",
    "next_sentence": "whether the loss of the next-sentence task is added to that of the masked words: a "
    "sequence has two parts, of which the second comes from another document in half of the sequences",
    "documents": "how the text's documents are told apart, for `next_sentence`: by `empty_lines`, or by "
    "`titles` of the form `= Title =` as in WikiText",
    "positions": "rows of the position embedding, at least `sequence_length`; 0 for as many. A first phase "
    "on short sequences needs those of the second",
    "start": "weights to start from; empty for random ones: the folder of a finished run with "
    "`training.save_model`, a `model.safetensors` or `pytorch_model.bin` of Hugging Face's "
    "BertForPreTraining, or a folder with one. Names and shapes must be those of the model",
}


def bert_examples(options: Options) -> int:
    """Sequences of an epoch, or 0: known only once the text is read."""
    # [CLS], two tokens, [SEP]; with two parts, another [SEP] and room for both
    examples = _examples(options, len(BERT_SPECIALS), shortest=8 if options["next_sentence"] else 4)
    if options["positions"]:
        check_minimum(options, {"positions": options["sequence_length"]})
    return examples


def gpt_examples(options: Options) -> int:
    """As for BERT."""
    return _examples(options, len(GPT_SPECIALS), shortest=2)


def check_sizes(options: Options, specials: int, minimum: Mapping[str, int]) -> None:
    """Check a Transformer's sizes and its vocabulary, which has `specials` special tokens.

    Args:
        options: of the description.
        specials: how many.
        minimum: of the options that not every Transformer has.

    Raises:
        ValueError: a size is below its minimum, or does not fit another.
    """
    trained = options["data"] != SYNTHETIC and not options["tokenizer"]
    vocabulary = specials + (BYTES if trained else 2)
    check_minimum(options, {"layers": 1, "heads": 1, "hidden": 1, **minimum, "vocabulary": vocabulary})
    check_minimum(options, {"train_examples": 0, "test_examples": 0})
    if options["hidden"] % options["heads"]:
        raise ValueError(f"hidden={options['hidden']} must be a multiple of heads={options['heads']}")
    check_share(options, "dropout")


def text_examples(options: Options) -> int:
    """Training examples of a text: as the options say, or of a synthetic one; else 0, not known yet."""
    synthetic = SYNTHETIC_TRAIN if options["data"] == SYNTHETIC else 0
    return int(options["train_examples"]) or synthetic


def _examples(options: Options, specials: int, shortest: int) -> int:
    check_sizes(options, specials, {"sequence_length": shortest})
    return text_examples(options)


_IGNORED = {
    ("data", EMBEDDED): ("train_text", "test_text"),
    ("data", SYNTHETIC): ("train_text", "test_text", "tokenizer"),
}  # fmt: skip

BERT = WorkloadDescription(
    module="harness.workloads.language.language",
    builder="Bert",
    metrics={
        "accuracy": "higher", "loss": "lower",
        "next_sentence_accuracy": "higher", "next_sentence_loss": "lower",
    },
    options={
        **_TEXT_OPTIONS, "vocabulary": 30522, "sequence_length": 128,
        "next_sentence": False, "documents": EMPTY_LINES, "positions": 0, "start": "",
    },
    meanings=_BERT_MEANINGS,
    choices={"documents": (EMPTY_LINES, TITLES)},
    train_examples=0,
    counted=bert_examples,
    needs={
        "next_sentence_accuracy": "next_sentence", "next_sentence_loss": "next_sentence",
    },
    ignored={
        ("data", EMBEDDED): (*_IGNORED["data", EMBEDDED], "documents"),
        ("data", SYNTHETIC): (*_IGNORED["data", SYNTHETIC], "documents"),
        ("next_sentence", False): ("documents",),
    },
    about="masked words of a text, and next sentences, BERT of any size (Devlin et al. 2019); text files, "
    "a part of WikiText-2",
)  # fmt: skip
GPT = WorkloadDescription(
    module="harness.workloads.language.language",
    builder="Gpt",
    metrics={"accuracy": "higher", "loss": "lower", "perplexity": "lower"},
    options={**_TEXT_OPTIONS, "vocabulary": 50257, "sequence_length": 1024},
    meanings=_TEXT_MEANINGS,
    train_examples=0,
    counted=gpt_examples,
    ignored=_IGNORED,
    follows={"perplexity": "loss"},
    about="the next word of a text, GPT-2 of any size (Radford et al. 2019); the same texts",
)
