"""Multi30k (Elliott et al. 2016), or any text in two languages, from its files (no torch).

A split is two files, `train.de` and `train.en`, plain or gzipped; each line of one is the translation of the
same line of the other. The text is not in the package: its terms allow non-commercial research only.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import DataError
from harness.workloads.sources.data_folder import data_folder, how_to_point
from harness.workloads.sources.download import Published, download_files

FOLDER = "multi30k"
SOURCE = "https://github.com/multi30k/dataset"
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
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged: {error}; get it again") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path} must be UTF-8 text: {error.reason} in line {line}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if not text.strip():
        raise DataError(f"{path} must have at least one line of text")
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")]
    if "" in lines:
        raise DataError(
            f"{path}: line {lines.index('') + 1} is empty; remove it, also from the other language"
        )
    return lines
