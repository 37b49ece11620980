"""Corpus BLEU (Papineni et al. 2002) as sacrebleu computes it (Post 2018), from 0 to 100 (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from harness.workloads.sources.extras import import_extra


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of translations with one reference each, with sacrebleu's defaults: cased, tokenizer 13a."""
    # force: no warning on each rank's output if the text looks tokenized already
    return float(sacrebleu().BLEU(force=True).corpus_score(list(translations), [list(references)]).score)


def sacrebleu() -> ModuleType:
    """The optional library's module of BLEU."""
    return import_extra("sacrebleu.metrics.bleu", "workload.options.bleu: true", "language")
