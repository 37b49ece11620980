"""Multi30k (Elliott et al. 2016), or any text in two languages, as token ids kept in the cache (no torch).

A split is two files, `train.de` and `train.en`, plain or gzipped; each line of one is the translation of the
same line of the other. The text is not in the package: its terms allow non-commercial research only.

Both languages share one vocabulary: of a given tokenizer, or of a byte-level BPE trained on both sides of the
training text. Training pairs with more than `longest` tokens on a side are dropped, as is usual in
translation: a truncated pair would teach half a translation. No held-out pair is dropped or truncated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.errors import DataError
from harness.workloads.description import SYNTHETIC
from harness.workloads.language import SYNTHETIC_TEST, SYNTHETIC_TRAIN
from harness.workloads.sources.files import check_enough, read_lines
from harness.workloads.sources.folders import Published, data_folder, download_files, file_stamp, how_to_point
from harness.workloads.sources.tokenizer import Ids, Tokenizer, Vocabulary, encode, encode_once
from harness.workloads.translation import SPECIALS

FOLDER = "multi30k"
SOURCE = "https://github.com/multi30k/dataset"
SYNTHETIC_TOKENS = (5, 22)  # of a synthetic sentence; a caption has twelve words
TRAIN, TEST = "train", "val"  # val is what the authors of DP-KFAC evaluate on: 1,014 pairs

_COMMIT = "a3d2e0d26b56f3846f66a952536ffed4e401d05a"
_RAW = f"https://raw.githubusercontent.com/multi30k/dataset/{_COMMIT}/data/task1/raw"
# SHA-256 of the files of that commit; their authors publish no checksums.
_SHA256 = {
    "train.cs": "a65adb8b32e3bc664f21ecba7a6e7f6950fd1f405e135f7c312faabdb6255077",
    "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "train.fr": "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c",
    "val.cs": "b63226e05c4bd5dd6a42897d74b86a1b9d2c31498252c572b1ea7f7996927fcc",
    "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "val.fr": "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9",
}
PUBLISHED = tuple(Published(f"{_RAW}/{name}.gz", f"sha256:{digest}") for name, digest in _SHA256.items())


class Files(NamedTuple):
    """The two files of a split."""

    source: Path
    target: Path


def find_files(options: Mapping[str, Any]) -> tuple[Files, Files]:
    """The files of training and held-out pairs, downloaded if none exist and `download` is set.

    Raises:
        DataError: one is missing, or could not be downloaded.
    """
    root, source, target = data_folder(options["data"]), options["source"], options["target"]
    names = [f"{split}.{side}" for split in (TRAIN, TEST) for side in (source, target)]
    folders = [folder for folder in (root / FOLDER, root) if any(_find(folder, name) for name in names)]
    if not folders and options["download"]:
        download_files(PUBLISHED, root / FOLDER)
        folders = [root / FOLDER]
    if not folders:
        raise DataError(
            f"{root / FOLDER} does not exist; multi30k reads {', '.join(names)}, also gzipped: get them from "
            f"{SOURCE}, set workload.options.download: true, {how_to_point(options['data'])}"
        )
    paths = []
    for name in names:
        path = _find(folders[0], name)
        if path is None:
            raise DataError(
                f"neither {folders[0] / name} nor {name}.gz exists; both languages are needed: "
                f"get it from {SOURCE}, or choose others in workload.options.source and target"
            )
        paths.append(path)
    return Files(*paths[:2]), Files(*paths[2:])


def read_split(files: Files) -> tuple[list[str], list[str]]:
    """Lines of both sides, stripped.

    Raises:
        DataError: a file is damaged, empty or not text, a line is empty, or the sides differ in length.
    """
    source, target = (_lines(path) for path in files)
    if len(source) != len(target):
        raise DataError(
            f"{files.source} has {len(source)} lines, {files.target.name} {len(target)}; each line needs its "
            f"translation in the same line of the other file: get both from one source"
        )
    return source, target


def _find(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _lines(path: Path) -> list[str]:
    lines = list(read_lines(path))
    if not any(lines):
        raise DataError(f"{path} must have at least one line of text")
    if "" in lines:
        raise DataError(
            f"{path}: line {lines.index('') + 1} is empty; remove it, also from the other language"
        )
    return lines


@dataclass(frozen=True)
class Sentences:
    """Sentences as token ids, without begin and end tokens.

    Attributes:
        tokens: all ids, one sentence after another.
        starts: offset of each sentence, and the end of the last one, `[N + 1]`.
    """

    tokens: np.ndarray[Any, Any]
    starts: Ids

    @property
    def lengths(self) -> Ids:
        """Tokens of each, `[N]`."""
        return np.diff(self.starts)

    def padded(self, indices: Ids, width: int, padding: int) -> Ids:
        """The sentences of these indices, `[len(indices), width]`, followed by padding."""
        columns = np.arange(width)
        inside = columns < self.lengths[indices][:, None]
        rows = np.full(inside.shape, padding, dtype=np.int64)
        rows[inside] = self.tokens[(self.starts[indices][:, None] + columns)[inside]]
        return rows


@dataclass(frozen=True)
class Pairs:
    """Sentence n of the target is the translation of sentence n of the source.

    Attributes:
        indices: of the pairs that are used, ascending.
    """

    source: Sentences
    target: Sentences
    indices: Ids


@dataclass(frozen=True)
class ParallelText:
    """Training and held-out pairs, their ids, and text for BLEU.

    Attributes:
        decode: the text of a sentence's ids.
        references: the held-out translations, by index.
    """

    train: Pairs
    test: Pairs
    vocabulary: Vocabulary
    decode: Callable[[Sequence[int]], str]
    references: Callable[[], list[str]]


def read_pairs(options: Mapping[str, Any]) -> ParallelText:
    """The pairs that the options ask for.

    Raises:
        DataError: a file or tokenizer is missing, damaged or does not fit, or the cache cannot be written.
        ModuleNotFoundError: the library `tokenizers` is not installed.
    """
    if options["data"] == SYNTHETIC:
        return _synthetic(options)
    train_files, test_files = find_files(options)

    def write(folder: Path, tokenizer_of: Callable[[Iterable[str]], Tokenizer]) -> None:
        splits = {"train": read_split(train_files), "test": read_split(test_files)}
        tokenizer = tokenizer_of(chain(*splits["train"]))
        for split, sides in splits.items():
            for side, lines in zip(Files._fields, sides, strict=True):
                ids = list(encode(tokenizer, lines))
                starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
                np.save(folder / f"{split}.{side}.starts.npy", starts)
                np.save(
                    folder / f"{split}.{side}.tokens.npy", np.fromiter(chain(*ids), np.uint32, starts[-1])
                )

    stamps = [file_stamp(path) for path in (*train_files, *test_files)]
    folder, tokenizer, vocabulary = encode_once("pairs", options, SPECIALS, stamps, write)
    return ParallelText(
        _limited(_load(folder, "train"), options, "train_examples", train_files, options["longest"]),
        _limited(_load(folder, "test"), options, "test_examples", test_files, None),
        vocabulary,
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        references=lambda: read_split(test_files)[1],
    )


def _load(folder: Path, split: str) -> tuple[Sentences, Sentences]:
    source, target = (
        Sentences(
            np.load(folder / f"{split}.{side}.tokens.npy", mmap_mode="r"),
            np.load(folder / f"{split}.{side}.starts.npy"),
        )
        for side in Files._fields
    )
    return source, target


def _limited(
    sides: tuple[Sentences, Sentences],
    options: Mapping[str, Any],
    option: str,
    files: Files,
    longest: int | None,
) -> Pairs:
    """The first pairs of at most `longest` tokens a side, as many as `option` asks for."""
    lengths = np.maximum(sides[0].lengths, sides[1].lengths)
    indices = np.flatnonzero(lengths <= longest) if longest is not None else np.arange(len(lengths))
    wanted = options[option] or len(indices)
    if not len(indices):
        raise DataError(
            f"{files.source}: no pair has at most {longest} tokens a side; use a larger "
            f"workload.options.longest"
        )
    short = "" if longest is None else f" of at most {longest} tokens a side"
    check_enough(files.source, f"pairs{short}", len(indices), option, wanted)
    return Pairs(*sides, indices[:wanted])


def _synthetic(options: Mapping[str, Any]) -> ParallelText:
    """Random sentences; the target is the source reversed, which can be learned."""
    generator = np.random.default_rng(0)
    shortest, longest = (min(tokens, options["longest"]) for tokens in SYNTHETIC_TOKENS)
    ordinary = np.arange(len(SPECIALS), options["vocabulary"])

    def pairs(count: int) -> Pairs:
        lengths = generator.integers(shortest, longest, count, endpoint=True)
        starts = np.cumsum([0, *lengths], dtype=np.int64)
        # A tenth of the vocabulary is nearly half of the text (0.1^(1/3) = 0.46), as in a language.
        source = ordinary[(len(ordinary) * generator.random(starts[-1]) ** 3).astype(np.int64)]
        target = source[np.repeat(starts[:-1] + starts[1:] - 1, lengths) - np.arange(starts[-1])]
        return Pairs(Sentences(source, starts), Sentences(target, starts), np.arange(count))

    train = pairs(options["train_examples"] or SYNTHETIC_TRAIN)
    test = pairs(options["test_examples"] or SYNTHETIC_TEST)

    def decode(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def references() -> list[str]:
        sentences = np.split(test.target.tokens, test.target.starts[1:-1])
        return [decode(sentence.tolist()) for sentence in sentences]

    vocabulary = Vocabulary({name: index for index, name in enumerate(SPECIALS)}, ordinary)
    return ParallelText(train, test, vocabulary, decode, references)
