"""Image files (no torch)."""

from __future__ import annotations

from PIL import Image

from harness.errors import DataError


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
