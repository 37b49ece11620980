"""Turns records into tables, figures and a report. Runs on a laptop; imports no torch.

    import analysis

    study = analysis.load("results/runs/demo")
    study.cells
    analysis.figures.FIGURES["scaling"].draw(study).figure

Everything is loaded on first use, so importing the package is cheap on a login node.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis import figures
    from analysis.records.loading import load
    from analysis.records.study import Study

__all__ = ["Study", "figures", "load"]


def __getattr__(name: str) -> Any:
    if name == "figures":
        return import_module("analysis.figures")
    if name in __all__:
        return getattr(import_module(f"analysis.records.{'study' if name == 'Study' else 'loading'}"), name)
    raise AttributeError(f"module 'analysis' has no attribute {name!r}")
