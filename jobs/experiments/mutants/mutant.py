"""A mutant: one place to break, and the tests that should notice."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]


class Mutant(NamedTuple):
    """One place to break: `text` in `<package>/<path>`, found exactly once, becomes `broken`.

    Attributes:
        tests: files, or tests by their node ids, that should notice; a few, so that a mutant costs seconds.
        survives: why no test can notice, for a mutant that changes no behaviour; such a mutant must survive.
    """

    name: str
    path: str
    text: str
    broken: str
    tests: tuple[str, ...] = ()
    survives: str = ""


class Package(NamedTuple):
    """The mutants of a package.

    Attributes:
        select: of the named tests, those that pytest's `-k` keeps.
        about: for the table.
    """

    name: str
    mutants: tuple[Mutant, ...]
    select: str = ""
    about: str = ""

    def source(self, mutant: Mutant, root: Path = ROOT) -> Path:
        """The file that the mutant breaks."""
        return root / self.name / mutant.path

    def check(self, mutant: Mutant) -> None:
        """End with an error if the mutant's text is not found exactly once: then the list is not true."""
        found = self.source(mutant).read_text().count(mutant.text)
        if found != 1:
            place = f"{found} times in {self.name}/{mutant.path}, needed once"
            sys.exit(f"mutant {mutant.name!r}: its text is {place}: {mutant.text}")

    def key(self, mutant: Mutant) -> str:
        """Hash of the mutant, of the file that it breaks, and of its tests: what its result depends on."""
        files = {test.partition("::")[0] for test in mutant.tests}
        parts = [self.name, self.select, *map(str, mutant)]
        parts += [_digest(path) for path in (self.source(mutant), *(ROOT / name for name in sorted(files)))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
