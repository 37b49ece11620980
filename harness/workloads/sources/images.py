"""Image files, and subsets of them in which every class is represented (no torch)."""

from __future__ import annotations

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


def balanced_subset(labels: Labels, count: int) -> Labels:
    """Indices, ascending, of `count` examples: the first of every class, the second of every class, ..."""
    by_class = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    rank_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    round_robin: Labels = by_class[np.lexsort((labels[by_class], rank_in_class))]
    return np.sort(round_robin[:count])
