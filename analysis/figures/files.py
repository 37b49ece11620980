"""A drawing as PDF, PNG and CSV, byte-identical whenever it is drawn from the same records."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Literal

import matplotlib as mpl

from analysis.figures.drawing import STYLE, Drawing

# Dates and program versions in the metadata would change the bytes of an unchanged figure.
_NO_METADATA: dict[str, dict[str, None]] = {
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "png": {"Software": None},
}


def save(drawing: Drawing, folder: Path, name: str) -> list[Path]:
    """Write `<name>.pdf`, `.png` and `.csv` (the plotted numbers) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "pdf": image(drawing, "pdf"),
        "png": image(drawing, "png"),
        "csv": drawing.numbers.to_csv(index=False, lineterminator="\n").encode(),
    }
    paths = [folder / f"{name}.{kind}" for kind in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_bytes(content)
    return paths


def image(drawing: Drawing, kind: Literal["pdf", "png"]) -> bytes:
    """The drawing in one format."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        drawing.figure.draw_without_rendering()  # tick labels get their widths in a first pass
        drawing.figure.savefig(buffer, format=kind, metadata=_NO_METADATA[kind])
    return buffer.getvalue()
