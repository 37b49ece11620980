"""Keys at the top of a sweep file, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "sweep": "Name of the study and of its folder of runs: at most 64 letters, digits, `_`, `.`, `-`.",
        "about": "The study's question, as reports show it.",
        "workload": "What is trained: a name, or `name` and `options`.",
        "target": "The metric and value at which a run has succeeded.",
        "training": "Length, batch and precision of every run.",
        "optimizer": "The first-order optimizer and its learning rate.",
        "kfac": "K-FAC's hyperparameters, for the methods that have a `kfac` section of their own.",
        "world_size": "Number of ranks of every run; usually an axis of `grid` instead.",
        "methods": "The methods to compare. Each has a `name` and any of the sections above, whose fields "
        "override the shared ones; one without a `kfac` section (`kfac: {}` is enough) trains without K-FAC.",
        "grid": "Axes: a field by its dotted path, or `method`, with a list of values. Every combination is "
        "a cell. Methods without K-FAC ignore axes of `kfac`.",
        "zip": "More axes, each a mapping of fields to lists of equal length that vary together.",
        "include": "Single cells beside the grid: `method` and the fields that differ.",
        "exclude": "Drops every cell that matches all fields of an entry; one that matches none is an error.",
        "repeats": "Number of runs of every cell, with seeds 0 to n - 1; default 6, the smallest number with "
        "a 95 % interval of the median.",
        "seeds": "The seeds themselves, in place of `repeats`.",
        "tuning": "Search space of each method, and the number of trials of all; see [Tuning](#tuning).",
        "tuned": "Which sweep tuned the methods, with how many trials and which seeds; written by "
        "`kronscale choose`. A seed of the trials cannot be one of the study.",
    }
)
