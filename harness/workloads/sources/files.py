"""Images, texts, subsets of examples and optional libraries (no torch)."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from harness.errors import DataError

Labels = np.ndarray[Any, np.dtype[np.int64]]


def read_image(path: str, source: str) -> Image.Image:
    """The image in red, green and blue.

    Args:
        path: the file.
        source: where to get it again, for the error message.

    Raises:
        DataError: the file is missing, truncated or not an image.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    # What Pillow raises for damaged files, depending on format and place of the damage.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a readable image ({reason}); copy it again from {source}") from None


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text in UTF-8, plain, `.gz` or `.xz`, stripped; streamed.

    Raises:
        DataError: it cannot be read, is damaged, or is not UTF-8.
    """
    opened: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                number += 1
                yield line.strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be UTF-8 text: {error.reason} some lines after line {number}") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}; get another copy") from None


def balanced_subset(labels: Labels, count: int) -> Labels:
    """Indices, ascending, of `count` examples: the first of every class, the second of every class, ..."""
    by_class = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    rank_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    round_robin: Labels = by_class[np.lexsort((labels[by_class], rank_in_class))]
    return np.sort(round_robin[:count])


def check_enough(where: object, examples: str, got: int, option: str, wanted: int) -> None:
    """Raise DataError if an option asks for more examples than there are."""
    if got < wanted:
        raise DataError(
            f"{where} must have {wanted} {examples}, got {got}; complete them, or set "
            f"workload.options.{option}: {got} to use this part"
        )


def import_extra(module: str, needed_by: str, extra: str, alternative: str = "") -> ModuleType:
    """Import an optional library.

    Args:
        module: its name.
        needed_by: the option or workload that needs it, for the error message.
        extra: the extra that installs it.
        alternative: end of the error message: what else the user can do.

    Raises:
        ModuleNotFoundError: it is missing, or (torchvision) built for another version of torch.
    """
    try:
        return import_module(module)
    except (ImportError, RuntimeError) as error:  # torchvision for another torch lacks operators
        reason = " ".join(str(error).split())
        raise ModuleNotFoundError(
            f"{needed_by} needs {module.partition('.')[0]}: pip install 'kronscale[{extra}]'{alternative} "
            f"({reason})"
        ) from None
