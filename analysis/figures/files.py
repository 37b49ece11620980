"""A drawing as PDF, PNG and CSV, byte-identical whenever it is drawn from the same records."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Literal

import matplotlib as mpl
from matplotlib.figure import Figure

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
        _lay_out(drawing.figure)
        drawing.figure.savefig(buffer, format=kind, metadata=_NO_METADATA[kind])
    return buffer.getvalue()


def _lay_out(figure: Figure) -> None:
    """Place panels, titles and legends once for all formats; `savefig` would do so twice for each.

    Which ticks a panel has depends on its size, and its size on their labels, hence two passes. Widths of
    text depend on the resolution, by several per cent at a low one, so they are measured at the files'.
    """
    engine = figure.get_layout_engine()
    if engine is None:
        return
    screen = figure.dpi
    figure.dpi = mpl.rcParams["savefig.dpi"]
    for _ in range(2):
        engine.execute(figure)
    figure.dpi = screen
    figure.set_layout_engine(None)
