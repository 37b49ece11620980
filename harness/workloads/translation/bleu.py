"""Corpus BLEU (Papineni et al. 2002) as sacrebleu computes it (Post 2018), from 0 to 100 (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def bleu(found: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of translations beside one reference each, with sacrebleu's defaults: cased, tokenizer 13a."""
    # force: a text that is tokenized already is scored without a warning on each rank's output
    return float(scorer()(force=True).corpus_score(list(found), [list(references)]).score)


def scorer() -> Any:
    """The library's class.

    Raises:
        ModuleNotFoundError: it is not installed, and which extra has it.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU  # noqa: PLC0415  an optional extra
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "workload.options.bleu: true needs the extra language: pip install 'kronscale[language]'"
        ) from None
    return BLEU
