"""Small parallel texts, and options, for the tests of translation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from harness.workloads import WORKLOADS
from harness.workloads.translation.multi30k import Translation, build
from harness.workloads.workload import Share
from tests.harness.workloads.texts import WORDS, share, write_tokenizer

SPECIALS = ["[PAD]", "[BOS]", "[EOS]"]
PAD, BEGIN, END = range(3)
SMALL = {"layers": 2, "hidden": 16, "feed_forward": 24, "heads": 2, "dropout": 0.0, "vocabulary": 43}
TRAIN, TEST = 115, 31

Pair = tuple[tuple[int, ...], tuple[int, ...]]


def options(folder: Path | str, **changes: Any) -> dict[str, Any]:
    """The workload's options with its defaults, a tiny model and the tokenizer of `write_pairs`."""
    given = {**SMALL, "data": str(folder), "tokenizer": "words.json"}
    return {**WORKLOADS["multi30k"].options, **given, **changes}


def translation(folder: Path | str, mine: Share | None = None, **changes: Any) -> Translation:
    """The workload, by default of one rank with batches of 12."""
    return build(options(folder, **changes), mine or share())


def write_pairs(folder: Path) -> None:
    """`train` and `val` in `de` and `en`: lines of 2 to 10 made-up words, no two alike; and `words.json`."""
    draws = np.random.default_rng(5)
    for part, count in (("train", TRAIN), ("val", TEST)):
        for side in ("de", "en"):
            lines = [
                " ".join([WORDS[n // 40], WORDS[n % 40], *draws.choice(WORDS, draws.integers(0, 9))])
                for n in range(count)
            ]
            (folder / f"{part}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_tokenizer(folder / "words.json", [*SPECIALS, *WORDS])


def independently(folder: Path, part: str) -> list[Pair]:
    """Ids of the pairs of a part, by hand: the number of a word, after the special tokens."""
    german, english = (
        [
            tuple(len(SPECIALS) + int(word.removeprefix("w")) for word in line.split())
            for line in (folder / f"{part}.{side}").read_text(encoding="utf-8").splitlines()
        ]
        for side in ("de", "en")
    )
    return list(zip(german, english, strict=True))
