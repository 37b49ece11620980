"""Multi30k (Elliott et al. 2016), or any text in two languages, from its files (no torch).

A part is two files, `train.de` and `train.en`, plain or gzipped, each line of one the translation of the same
line of the other. The text is not in the package: its terms are those of research without commerce.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import DataError
from harness.workloads.sources.download import Published, download_files
from harness.workloads.sources.folders import data_folder, how_to_point

FOLDER = "multi30k"
SOURCE = "https://github.com/multi30k/dataset"
TRAIN, TEST = "train", "val"  # held out is what the authors of DP-KFAC evaluate on: 1,014 pairs

_COMMIT = "a3d2e0d26b56f3846f66a952536ffed4e401d05a"
_RAW = f"https://raw.githubusercontent.com/multi30k/dataset/{_COMMIT}/data/task1/raw"
# SHA-256 of what lies there; nobody publishes sums.
_SUMS = {
    "train.cs": "a65adb8b32e3bc664f21ecba7a6e7f6950fd1f405e135f7c312faabdb6255077",
    "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "train.fr": "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c",
    "val.cs": "b63226e05c4bd5dd6a42897d74b86a1b9d2c31498252c572b1ea7f7996927fcc",
    "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "val.fr": "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9",
}
PUBLISHED = tuple(Published(f"{_RAW}/{name}.gz", digest, "sha256") for name, digest in _SUMS.items())


class Files(NamedTuple):
    """The two files of a part."""

    source: Path
    target: Path


def find_files(options: Mapping[str, Any]) -> tuple[Files, Files]:
    """The files of training and held-out pairs, downloaded if that is allowed and none are there.

    Raises:
        DataError: one is missing, or could not be downloaded.
    """
    root, source, target = data_folder(options["data"]), options["source"], options["target"]
    wanted = [f"{part}.{side}" for part in (TRAIN, TEST) for side in (source, target)]
    folders = [folder for folder in (root / FOLDER, root) if any(_named(folder, name) for name in wanted)]
    if not folders and options["download"]:
        download_files(PUBLISHED, root, FOLDER)
        folders = [root / FOLDER]
    if not folders:
        raise DataError(
            f"{root / FOLDER} is not there; multi30k reads {', '.join(wanted)}, also gzipped: get them from "
            f"{SOURCE}, set workload.options.download: true, {how_to_point(options['data'])}"
        )
    found = [_named(folders[0], name) for name in wanted]
    for name, path in zip(wanted, found, strict=True):
        if path is None:
            raise DataError(
                f"{folders[0] / name} is not there, nor {name}.gz; both languages of both parts are needed: "
                f"get it from {SOURCE}, or choose others in workload.options.source and target"
            )
    train_source, train_target, test_source, test_target = (path for path in found if path is not None)
    return Files(train_source, train_target), Files(test_source, test_target)


def read_part(files: Files) -> tuple[list[str], list[str]]:
    """Lines of both sides, stripped.

    Raises:
        DataError: a file is damaged or empty or no text, a line is empty, or the sides differ in length.
    """
    source, target = (_lines(path) for path in files)
    if len(source) != len(target):
        raise DataError(
            f"{files.source} has {len(source)} lines, {files.target.name} {len(target)}; each line has its "
            f"translation in the same line of the other file: get both from one place"
        )
    return source, target


def _named(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _lines(path: Path) -> list[str]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cut short or damaged: {error}; get it again") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}: no UTF-8 text: {error.reason} in line {line}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not text.strip():
        raise DataError(f"{path}: has no text in it; put one line of text or more there")
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")]
    if "" in lines:
        raise DataError(
            f"{path}: line {lines.index('') + 1} is empty; leave that line out, in the other language too"
        )
    return lines
