"""Small texts, tokenizers and options for the tests of the language workloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.workloads import WORKLOADS
from harness.workloads.workload import Share

CPU = torch.device("cpu")
WORDS = [f"w{number}" for number in range(40)]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SMALL = {"layers": 1, "hidden": 16, "heads": 2, "dropout": 0.0}


def share(rank: int = 0, world_size: int = 1, batch: int = 12, seed: int = 3) -> Share:
    """A rank's share of global batches of `batch`."""
    return Share(rank, world_size, batch // world_size, seed, CPU)


def options(name: str, folder: Path | str, **changes: Any) -> dict[str, Any]:
    """A workload's options with its defaults, a tiny model and the tokenizer of `write_texts`."""
    small = {**SMALL, "data": str(folder), "tokenizer": "words.json", "vocabulary": 45, "sequence_length": 10}
    return {**WORKLOADS[name].options, **small, **changes}


def write_texts(folder: Path, train: int = 1300, test: int = 300) -> None:
    """`train.txt` and `test.txt` of made-up words, blank lines between, and a tokenizer, `words.json`."""
    draws = np.random.default_rng(5)
    for name, count in (("train", train), ("test", test)):
        words = [WORDS[number] for number in draws.integers(0, len(WORDS), count)]
        lines = [" ".join(words[start : start + 13]) for start in range(0, count, 13)]
        (folder / f"{name}.txt").write_text("\n\n   \n".join(lines) + "\n", encoding="utf-8")
    write_tokenizer(folder / "words.json", [*SPECIALS, *WORDS])


def write_tokenizer(path: Path, tokens: list[str]) -> None:
    """A tokenizer.json that numbers `tokens` in their order, written by hand."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [
        {"id": index, "content": token, **special}
        for index, token in enumerate(tokens)
        if token.startswith("[")
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "unk_token": tokens[1],
        },
    }
    path.write_text(json.dumps(content), encoding="utf-8")


def independently(path: Path) -> list[int]:
    """Ids of a text of `WORDS`, by hand: the number of a word, after the special tokens."""
    return [len(SPECIALS) + int(word.removeprefix("w")) for word in path.read_text(encoding="utf-8").split()]
