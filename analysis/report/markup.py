"""Tables as Markdown and LaTeX; every table cell is already text."""

from __future__ import annotations

import re

import pandas as pd

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "×": r"$\times$", "∞": r"$\infty$",
    "–": "--", "≥": r"$\geq$", "≤": r"$\leq$", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def to_markdown(table: pd.DataFrame) -> str:
    """A pipe table."""
    rows = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(_cell(value) for value in row) + " |" for row in rows) + "\n"


def to_latex(table: pd.DataFrame, caption: str, label: str) -> str:
    """A booktabs table."""
    lines = [" & ".join(_escaped(value) for value in row) + r" \\" for row in table.to_numpy().tolist()]
    head = " & ".join(_escaped(str(name).replace("_", " ")) for name in table.columns) + r" \\"
    return "\n".join(
        [
            r"\begin{table}", r"\centering", rf"\caption{{{_escaped(caption)}}}", rf"\label{{tab:{label}}}",
            rf"\begin{{tabular}}{{{'l' * len(table.columns)}}}", r"\toprule", head, r"\midrule", *lines,
            r"\bottomrule", r"\end{tabular}", r"\end{table}", "",
        ]
    )  # fmt: skip


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _escaped(value: object) -> str:
    return re.sub("|".join(map(re.escape, _LATEX)), lambda found: _LATEX[found[0]], str(value))
