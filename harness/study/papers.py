"""Papers: the sweeps that reproduce a paper at a size, and the figures drawn from them.

`jobs/papers/<paper>/<size>.yaml` lists the figures; its sweeps are in `<size>/`.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from harness.cell import Spec
from harness.errors import UserError
from harness.shipped import find, find_all
from harness.yaml_files.document import read_document
from harness.yaml_files.validation_messages import did_you_mean, explain, not_allowed

FOLDER = Path("jobs/papers")


class PaperError(UserError):
    """An unknown paper or size, or a mistake in a list of figures."""


class PaperFigure(Spec):
    """One figure or table of the paper.

    Attributes:
        shows: what it shows in the paper.
        figure: a key of `analysis.figures.FIGURES`.
        sweep: name, without `.yaml`, of the sweep that it is drawn from.
    """

    shows: str
    figure: str
    sweep: str


class Paper(Spec):
    """A paper at one size.

    Attributes:
        paper: short name, as its folder.
        title: its citation.
        about: data and scale of the reproduction.
        summary: the sweep of the first table.
        figures: in the paper's order.
    """

    paper: str
    title: str
    about: str
    summary: str
    figures: tuple[PaperFigure, ...]

    @property
    def sweeps(self) -> list[str]:
        """The sweeps to run, each once, the summary's first."""
        return list(dict.fromkeys([self.summary, *(figure.sweep for figure in self.figures)]))


def read_paper(name: str, size: str, folder: Path = FOLDER) -> tuple[Paper, dict[str, Path]]:
    """A paper's list of figures, and the path of every sweep in it.

    Raises:
        PaperError: the paper, the size or a sweep does not exist, or the file has a mistake.
    """
    path = find(folder / name / f"{size}.yaml")
    if not path.is_file() or name not in _names(folder) or "/" in size:  # names, and no paths elsewhere
        known = sorted(f"{found.parent.name} --size {found.stem}" for found in find_all(folder, "*/*.yaml"))
        there = f"available: {', '.join(known)}" if known else f"{folder} has none"
        if name in _names(folder):
            sizes = [found.stem for found in find_all(folder / name, "*.yaml")]
            raise PaperError(f"{path}: {name} has no size {size!r}{not_allowed(size, sizes)}")
        raise PaperError(f"{path}: no such paper; {there}{did_you_mean(name, _names(folder))}")
    document = read_document(path, PaperError)
    try:
        paper = Paper.model_validate_json(json.dumps(document.content), strict=True)
    except ValidationError as error:
        place, sentence = explain(error, Paper)
        raise document.error(place, sentence) from None
    files = {sweep: find(folder / name / size / f"{sweep}.yaml") for sweep in paper.sweeps}
    for sweep, file in files.items():
        if not file.is_file():
            raise PaperError(f"{path}: names sweep {sweep!r}, but {file} does not exist")
    return paper, files


def _names(folder: Path) -> list[str]:
    return sorted({found.parent.name for found in find_all(folder, "*/*.yaml")})
