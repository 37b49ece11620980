"""A drawing as PDF, PNG and CSV, byte-identical whenever it is drawn from the same records."""

from __future__ import annotations

from pathlib import Path

from analysis.figures.drawing import Drawing


def save(drawing: Drawing, folder: Path, name: str) -> list[Path]:
    """Write `<name>.pdf`, `.png` and `.csv` (the plotted numbers) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "pdf": drawing.image("pdf"),
        "png": drawing.image("png"),
        "csv": drawing.numbers.to_csv(index=False, lineterminator="\n").encode(),
    }
    paths = [folder / f"{name}.{kind}" for kind in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_bytes(content)
    return paths
