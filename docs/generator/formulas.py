"""Formulas as inline SVG, drawn by Matplotlib's mathtext, so that a page needs no script and no network.

A formula is a paragraph between lines of `$$`, in the part of LaTeX that mathtext knows, one line each.
"""

from __future__ import annotations

import html
import io
import re
from typing import Any

import matplotlib as mpl
from matplotlib.mathtext import math_to_image

_BLOCK = re.compile(r"^\$\$\n(?P<body>.+?)\n\$\$$", re.DOTALL | re.MULTILINE)
_STYLE: Any = {"svg.fonttype": "path", "svg.hashsalt": "formula", "mathtext.fontset": "stix"}
_POINTS_PER_EM = 8.0  # of the text around: Matplotlib draws at 10 points


class FormulaError(ValueError):
    """A formula that mathtext cannot draw."""


def with_formulas(markdown: str, page: str) -> str:
    """The text with every formula drawn, a line of it below the other.

    Raises:
        FormulaError: one cannot be drawn; names the page.
    """

    def drawn(match: re.Match[str]) -> str:
        lines = [line.strip() for line in match["body"].splitlines() if line.strip()]
        return "\n".join(['<div class="formula">', *(_svg(line, page) for line in lines), "</div>"])

    return _BLOCK.sub(drawn, markdown)


def _svg(latex: str, page: str) -> str:
    buffer = io.StringIO()
    with mpl.rc_context(_STYLE):
        try:
            math_to_image(f"${latex}$", buffer, format="svg", dpi=72, color="black")
        except ValueError as error:
            raise FormulaError(f"{page}: {latex}: {error}") from None
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<\?.*?\?>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"#000000|\bblack\b", "currentColor", text)
    width, height = (float(size) for size in re.findall(r'(?:width|height)="([\d.]+)pt"', text)[:2])
    size = f'width="{width / _POINTS_PER_EM:.2f}em" height="{height / _POINTS_PER_EM:.2f}em"'
    text = re.sub(r'width="[\d.]+pt"', size, text, count=1)
    text = re.sub(r'height="[\d.]+pt"', "", text, count=1)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(latex, quote=True)}" ', 1)
    return " ".join(text.split())
