"""The text of a language workload: one file or many, read line by line (no torch).

Files are UTF-8, plain or compressed as `.gz` or `.xz`. A line is a sentence, as in BERT's published
pre-processing, or a paragraph. Documents are separated by empty lines, or begin with a title as in WikiText.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from harness.errors import DataError
from harness.workloads.cards.card import EMBEDDED
from harness.workloads.cards.language import EMPTY_LINES, TITLES
from harness.workloads.sources.cache import file_stamp
from harness.workloads.sources.data_folder import EMBEDDED_FOLDER, data_folder, how_to_point

_TITLE = re.compile(r"= (?!= ).* =")  # WikiText's ` = Homarus gammarus = `; sections have more signs
_PATTERN = re.compile(r"[*?\[]")


class Line(NamedTuple):
    """A line that is not blank, stripped, with a line end; and whether it is its document's first."""

    text: str
    begins_document: bool


@dataclass(frozen=True)
class Text:
    """Text files, one after another; each begins a new document.

    Attributes:
        documents: how documents are told apart, `empty_lines` or `titles`.
    """

    paths: tuple[Path, ...]
    documents: str

    @property
    def name(self) -> str:
        """The files, for messages."""
        first = str(self.paths[0])
        return first if len(self.paths) == 1 else f"{first} and {len(self.paths) - 1} more"

    @property
    def stamp(self) -> str:
        """Changes with the content of a file, and with how documents are told apart."""
        return "\n".join([self.documents, *map(_stamp, self.paths)])

    def lines(self) -> Iterator[Line]:
        """All lines, streamed.

        Raises:
            DataError: a file is not text, damaged, or has no line.
        """
        for path in self.paths:
            empty = True
            for line in self._lines_of(path):
                empty = False
                yield line
            if empty:
                raise DataError(f"{path} must have at least one line of text")

    def _lines_of(self, path: Path) -> Iterator[Line]:
        begins = True
        try:
            with _opened(path) as file:
                for line in file:
                    if stripped := line.strip():
                        begins |= self.documents == TITLES and _TITLE.fullmatch(stripped) is not None
                        yield Line(stripped + "\n", begins)
                        begins = False
                    else:
                        begins |= self.documents == EMPTY_LINES
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} must be UTF-8 text: {error.reason} at byte {error.start} of a block"
            ) from None
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{path} cannot be read: {reason}") from None


def find_text(options: Mapping[str, Any], option: str) -> Text:
    """The files that the option `train_text` or `test_text` names, in their order; patterns are sorted.

    Raises:
        DataError: a file is missing or named twice, or no file matches a pattern.
    """
    if options["data"] == EMBEDDED:
        name = f"{option.removesuffix('_text')}.txt.xz"
        return Text((EMBEDDED_FOLDER / "wikitext-2" / name,), TITLES)
    folder, found = data_folder(options["data"]), list[Path]()
    for name in filter(None, map(str.strip, options[option].split(","))):
        paths = sorted(folder.glob(name)) if _PATTERN.search(name) else [folder / name]
        files = [path for path in paths if path.is_file()]
        if not files:
            raise DataError(
                f"{folder / name} does not exist; put a text file there, name it in "
                f"workload.options.{option}, {how_to_point(options['data'])}"
            )
        found += files
    twice = next((path for number, path in enumerate(found) if path in found[:number]), None)
    if twice is not None:
        raise DataError(
            f"{twice} is named twice in workload.options.{option}={options[option]!r}; name it once"
        )
    if not found:
        raise DataError(f"workload.options.{option}={options[option]!r} names no file; name one or more")
    return Text(tuple(found), options.get("documents", EMPTY_LINES))


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _stamp(path: Path) -> str:
    """Of an embedded file the content: an installation may give it any time."""
    if path.is_relative_to(EMBEDDED_FOLDER):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return file_stamp(path)
