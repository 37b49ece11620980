"""Floor 3: turns records into tables, figures and a report. Runs on a laptop; imports no torch.

    import analysis

    study = analysis.load("results/runs/demo")
    study.cells
    analysis.figures.FIGURES["scaling"].draw(study).figure

Everything is loaded on first use: importing the package costs nothing on a login node.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis import figures
    from analysis.tables import Study, load

__all__ = ["Study", "figures", "load"]


def __getattr__(name: str) -> Any:
    if name in {"Study", "load"}:
        return getattr(import_module("analysis.tables"), name)
    if name == "figures":
        return import_module("analysis.figures")
    raise AttributeError(f"module 'analysis' has no attribute {name!r}")
