"""Multi30k, translation of sentences: what a login node knows of the workload (no torch)."""

from __future__ import annotations

from typing import Any

from harness.workloads.description import (
    EMBEDDED,
    FILES,
    SYNTHETIC,
    Options,
    WorkloadDescription,
    check_share,
)
from harness.workloads.language import TRANSFORMER_MEANINGS, check_sizes, text_examples

PAD, BEGIN, END = SPECIALS = ("[PAD]", "[BOS]", "[EOS]")

# Sizes as in Vaswani et al. 2017, table 3, "base"; `longest` as the authors of DP-KFAC prepare their data.
_OPTIONS: dict[str, Any] = {
    "layers": 6,
    "hidden": 512,
    "feed_forward": 2048,
    "heads": 8,
    "dropout": 0.1,
    "tied": True,
    "label_smoothing": 0.1,
    "vocabulary": 10_000,
    "longest": 100,
    "data": FILES,
    "source": "de",
    "target": "en",
    "download": False,
    "tokenizer": "",
    "train_examples": 0,
    "test_examples": 0,
    "bleu": False,
}

_MEANINGS = {
    **TRANSFORMER_MEANINGS,
    "feed_forward": "width of the feed-forward layers, at least 1",
    "tied": "whether the target embedding and the output layer share their weights",
    "label_smoothing": "probability spread over all tokens, in [0, 1)",
    "longest": "training pairs with more tokens on a side are dropped",
    "source": "language of the source: the ending of its files",
    "target": "language of the target, another one; the download has de, en, fr and cs",
    "download": "whether missing files are downloaded and checked against the published checksum",
    "train_examples": "how many of the first training pairs are used; 0 for all",
    "test_examples": "how many of the first held-out pairs are used; 0 for all",
    "bleu": "whether evaluations decode greedily and score BLEU (sacrebleu, 13a, cased), which takes time; "
    "needed for a target of BLEU",
}


def multi30k_examples(options: Options) -> int:
    """Pairs of an epoch, or 0: how many are not too long is known only once they are read."""
    check_sizes(options, len(SPECIALS), {"feed_forward": 1, "longest": 1})
    check_share(options, "label_smoothing")
    if options["source"] == options["target"]:
        raise ValueError(f"target={options['target']!r} must be another language than source")
    if options["data"] == EMBEDDED:
        raise ValueError("data='embedded' has no parallel text; use files, synthetic or a folder")
    return text_examples(options)


MULTI30K = WorkloadDescription(
    module="harness.workloads.translation.multi30k",
    metrics={"accuracy": "higher", "loss": "lower", "perplexity": "lower", "bleu": "higher"},
    options=_OPTIONS,
    meanings=_MEANINGS,
    train_examples=0,
    counted=multi30k_examples,
    ignored={("data", SYNTHETIC): ("source", "target", "download", "tokenizer")},
    follows={"perplexity": "loss"},
    needs={"bleu": "bleu"},
    about="captions translated (Multi30k, Elliott et al. 2016) or any text in two files; the Transformer",
)
