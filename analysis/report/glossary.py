"""Words of the report that a reader would have to guess: their meanings, and links to them in the page."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markupsafe import Markup, escape


@dataclass(frozen=True)
class Word:
    """A word of the report.

    Attributes:
        pattern: of its forms in running text; empty for a word of table headings only.
        meaning: a sentence.
        page: of the documentation, which says more.
    """

    pattern: str
    meaning: str
    page: str = "docs/methods.md, Statistics"


WORDS: dict[str, Word] = {
    "arm": Word(
        "",
        "One way to train that the study compares: runs that differ in world size and seed only.",
        "docs/terms.md",
    ),
    "rank": Word(
        "",
        "One process of a run: on GPUs one for each, on CPUs one for each core or a few. How many there "
        "are is the world size.",
        "docs/terms.md",
    ),
    "target": Word(
        "",
        "The value of the metric at which a run counts as trained.",
        "docs/methods.md, The clock",
    ),
    "first-order arm": Word(
        "first-order arm",
        "The arm without K-FAC, such as SGD, that others are compared with.",
    ),
    "claim": Word(
        "claims?",
        "A difference that is called real: its interval and its corrected p value agree at 5 %. It "
        "needs at least four runs of each arm, and more where a study compares many arms.",
    ),
    "block": Word(
        "blocks?",
        "Runs that shared an allocation, or ran next to each other on one host, and so shared its load.",
    ),
    "Holm": Word(
        "Holm",
        "Correction of p values for the number of comparisons (Holm 1979): of many, one looks "
        "significant by chance.",
    ),
    "p": Word(
        "",
        "How often chance alone would make so large a difference between equal arms.",
    ),
    "interval": Word(
        "",
        "Brackets: a range that covers the true value in 95 % of studies; given only where there are "
        "runs enough.",
    ),
    "speed-up": Word(
        "speed-ups?",
        "Seconds of the first-order arm over those of the arm: above 1 the arm is faster.",
    ),
    "not judged": Word(
        "[Nn]ot judged",
        "Seconds that cannot be compared: too few CPUs, arms that ran one after the other, or runs "
        "that broke off.",
    ),
    "oversubscribed": Word(
        "more ranks than CPUs|oversubscribed",
        "Ranks took turns on the CPUs, so their seconds say nothing about scaling.",
        "docs/methods.md, The clock",
    ),
    "left out": Word(
        "left out",
        "A run without numbers here: it did not complete, or its files are damaged or do not agree.",
        "results/README.md",
    ),
    "drift": Word(
        "[Dd]rift",
        "Runs become slower or faster over a study whatever they train, as when a machine warms up.",
    ),
    "Mann-Kendall": Word(
        "Mann-Kendall",
        "A test of whether values rise or fall over time that assumes no shape.",
    ),
    "equal work": Word(
        "[Ee]qual work",
        "Forward and backward, the same for all arms: where their times differ, the machine differed.",
    ),
    "disturbed": Word(
        "[Dd]isturbed",
        "Others used the CPUs or GPUs of a run, or its equal work took unusually long.",
    ),
    "window": Word(
        "windows?",
        "The steps that one record covers: a whole period between two inverses.",
        "docs/terms.md",
    ),
    "closure": Word(
        "closure",
        "Whether the phases of a window add up to its time on the wall clock; the residual is what is "
        "missing.",
        "docs/terms.md",
    ),
    "imbalance": Word(
        "[Ii]mbalance",
        "Work of the slowest rank over the mean of all ranks, which wait for it.",
        "docs/methods.md, Strategies",
    ),
    "factor": Word(
        "",
        "Of each layer two matrices, of its inputs and of its output gradients, from which K-FAC "
        "computes its step.",
        "docs/methods.md, The approximation",
    ),
    "inverse": Word(
        "",
        "What K-FAC makes of the factors every E steps: their inverses or eigendecompositions.",
        "docs/methods.md, Solvers",
    ),
    "precondition": Word(
        "",
        "Multiplying the gradients by the inverses of the factors.",
        "docs/methods.md, The approximation",
    ),
    "peak": Word(
        "",
        "Largest memory of the process, on the rank that needs most.",
        "results/README.md",
    ),
    "MLPerf style": Word(
        "MLPerf style",
        "Mean time on the wall clock without the fastest and the slowest run; not MLPerf's own rule.",
    ),
    "AlgoPerf style": Word(
        "AlgoPerf style",
        "Median over seeds of a method's best arm; not AlgoPerf's own rule.",
    ),
    "regret": Word(
        "[Rr]egret",
        "How many times longer than its best a method's median trial took; small is easy to tune.",
        "docs/fair-comparison.md",
    ),
}
"""In the order of the page."""

_CODE = r"`(?P<code>[^`]+)`"
_FORMS = re.compile(
    "|".join(
        [_CODE]
        + [rf"(?P<w{n}>\b(?:{word.pattern})\b)" for n, word in enumerate(WORDS.values()) if word.pattern]
    )
)
_NAMES = list(WORDS)


def anchor(name: str) -> str:
    """The id of a word's entry."""
    return "word-" + re.sub(r"[^a-z]+", "-", name.lower())


def term(name: str, shown: str = "") -> Markup:
    """A word with its meaning as a tooltip, linked to its entry."""
    link = Markup('<a class="word" href="#{}"><abbr title="{}">{}</abbr></a>')
    return link.format(anchor(name), WORDS[name].meaning, shown or name)


class Explained:
    """A filter for text: every word is linked where a page uses it first, so that the rest reads easily."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, text: str) -> Markup:
        """`text`, escaped, with links; what stands in backticks is code."""
        parts: list[Markup] = []
        end = 0
        for found in _FORMS.finditer(text):
            if found["code"]:
                code = Markup("<code>{}</code>").format(found["code"])
                parts += [escape(text[end : found.start()]), code]
                end = found.end()
                continue
            name = _NAMES[int((found.lastgroup or "w0")[1:])]
            if name in self._seen:
                continue
            self._seen.add(name)
            parts += [escape(text[end : found.start()]), term(name, found[0])]
            end = found.end()
        return Markup("").join([*parts, escape(text[end:])])
