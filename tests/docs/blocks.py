"""Fenced blocks of the README and the documentation, with the words that limit how they are tested."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "kfac_core/README.md",
    "results/README.md",
    "harness/launchers/slurm/README.md",
    "harness/workloads/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "reference").glob("*.md")),
]
WORDS = {"slow", "slurm", "site", "ranks", "mpi", "recipe"}
_BLOCK = re.compile(r"^```(?P<info>[a-z ]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        words: those after the language.
    """

    page: str
    line: int
    language: str
    words: frozenset[str]
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """Arguments of every `kronscale` command in it."""
        return [words[1:] for words in self._lines("kronscale ")]

    @property
    def targets(self) -> list[str]:
        """Targets of every `make` command in it."""
        return [word for words in self._lines("make ") for word in words[1:] if "=" not in word]

    def _lines(self, start: str) -> list[list[str]]:
        lines = self.text.splitlines() if self.language == "sh" else []
        return [shlex.split(line, comments=True) for line in lines if line.startswith(start)]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    content = (ROOT / page).read_text()
    found = []
    for match in _BLOCK.finditer(content):
        language, *words = match["info"].split()
        line = content.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, frozenset(words), match["text"]))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
