"""Reads the lists of a JSON file entry by entry, and where each entry stands, in little memory (no torch)."""

from __future__ import annotations

import errno
import json
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

WINDOW_BYTES = 1 << 20
LARGEST_ENTRY_BYTES = 64 << 20  # a mask of millions of runs; else the rest of a damaged file would be decoded

_SPACE = re.compile(r"[ \t\n\r]*")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Buffer(Protocol):
    """The bytes of a file in UTF-8."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> bytes: ...


class FileBuffer:
    """A file whose parts are read when they are asked for, also in a forked process.

    Not a memory map: access to what was cut off since would end the process.

    Raises:
        OSError: it cannot be opened or read.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._size = os.fstat(self._descriptor).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(self._size)
        content = os.pread(self._descriptor, max(0, stop - start), start)
        if len(content) < stop - start:
            raise OSError(errno.EIO, f"it was cut off at byte {start + len(content)} while it was read")
        return content


class Entry(NamedTuple):
    """An entry of a list, `buffer[start:stop]`.

    Attributes:
        value: decoded as Latin-1, so that a character is a byte: text beyond ASCII is read again by `parse`.
    """

    value: Any
    start: int
    stop: int


def lists(buffer: Buffer) -> Iterator[tuple[str, Iterator[Entry]]]:
    """Every list that the file's object holds, by its key, in order; other values are skipped.

    The entries of a list must be read before the next list; those that are left are skipped.

    Raises:
        ValueError: it is not JSON, or has an entry of more than `LARGEST_ENTRY_BYTES`.
        OSError: it cannot be read.
    """
    text = _Text(buffer)
    if text.peek() == "{":
        for _ in text.members("{", "}"):
            key = text.value()
            text.take(":")
            if text.peek() == "[" and isinstance(key, str):
                found = _entries(text)
                yield key, found
                for _ in found:
                    pass
            else:
                text.value()
    else:
        text.value()
    if text.peek():
        raise ValueError(f"extra data at byte {text.place}")


def parse(buffer: Buffer, start: int, stop: int) -> Any:
    """An entry again, with its text as UTF-8.

    Raises:
        ValueError: it is not JSON, as after a change of the file.
        OSError: it cannot be read.
    """
    return json.loads(buffer[start:stop])


def _entries(text: _Text) -> Iterator[Entry]:
    for start in text.members("[", "]"):
        value = text.value()
        yield Entry(value, start, text.place)


class _Text:
    """A place in the file, and a window of it as text.

    Attributes:
        place: in bytes.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer, self._decoder = buffer, json.JSONDecoder()
        self.place = len(_BYTE_ORDER_MARK) if buffer[:3] == _BYTE_ORDER_MARK else 0
        self._load(WINDOW_BYTES)

    def members(self, opens: str, closes: str) -> Iterator[int]:
        """The place of each member of a list or object; the caller reads it before it asks for the next."""
        self.take(opens)
        more = self.peek() != closes
        while more:
            self.peek()
            yield self.place
            more = self.peek() == ","
            if more:
                self.take(",")
        self.take(closes)

    def peek(self) -> str:
        """The next character that is not white space, at which `place` is then; empty at the end."""
        while True:
            space = _SPACE.match(self._window, self.place - self._start)
            at = space.end() if space is not None else len(self._window)
            self.place = self._start + at
            if at < len(self._window):
                return self._window[at]
            if self.place >= len(self._buffer):
                return ""
            self._load(WINDOW_BYTES)

    def take(self, wanted: str) -> None:
        """Pass over this character, and white space before it."""
        if (got := self.peek()) != wanted:
            raise ValueError(f"expected {wanted!r} at byte {self.place}, got {got!r}")
        self.place += 1

    def value(self) -> Any:
        """The value that comes next."""
        self.peek()
        size = WINDOW_BYTES
        while True:
            ends_file = self._start + len(self._window) >= len(self._buffer)
            try:
                value, stop = self._decoder.raw_decode(self._window, self.place - self._start)
            except json.JSONDecodeError as error:
                if ends_file or size > LARGEST_ENTRY_BYTES:
                    raise ValueError(f"{error.msg} at byte {self._start + error.pos}") from None
            else:
                if ends_file or stop < len(self._window):  # else a number may go on behind the window
                    self.place = self._start + stop
                    return value
            self._load(size)
            size *= 4

    def _load(self, size: int) -> None:
        """Make the window start at this place."""
        self._start = self.place
        self._window = self._buffer[self.place : self.place + size].decode("latin-1")
