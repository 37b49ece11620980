"""Reads files of the run folder back, strictly: typed, finite, in range and of bounded size.

Every reader of stored files goes through here, so that a damaged, foreign or hostile file is always the same
error, `StoredFileError`, and never a number that was guessed. A key twice, text for a number, `true` for 1,
NaN where a clock is meant, a negative count, an unknown or a missing key: all are refused.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from harness.errors import StoredFileError

T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""For the attribute `__pydantic_config__` of a dataclass that is read back."""

_LARGEST = 2**63 - 1  # what a column of a frame holds
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Positive = Annotated[int, Field(ge=1, le=_LARGEST)]
Seconds = Annotated[float, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Measured = Annotated[float, Field(allow_inf_nan=True)]
"""A number that training computes: NaN and infinity if it diverged."""

SMALL_BYTES = 16 << 20  # an outcome of 100,000 ranks
DEEPEST = 32  # levels of lists and mappings
_TOO_DEEP = f"is nested too deep, must have at most {DEEPEST} levels of lists and mappings"
_NOT_REGULAR = "is a folder, pipe, socket or device, must be a regular file"
_CHECKSUM = re.compile(rb'(?:(,)|\{)\n "crc32": ([0-9]{1,10})\n\}\n\Z')
_SHOWN = 60  # characters of a damaged file in an error message


def read_bytes(path: Path, limit: int = SMALL_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        FileNotFoundError: there is none.
        StoredFileError: it is larger, or a folder, a pipe or a device, which could block.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise StoredFileError(path, f"has {size} bytes, must have at most {limit}")
        return file.readall()


def open_regular(path: Path) -> FileIO:
    """Open a regular file, unbuffered, for reading.

    Raises:
        FileNotFoundError: there is none.
        StoredFileError: it is a folder, a pipe or a device, which could block.
        OSError: it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block without
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket, or a device that is not there
            raise
        raise StoredFileError(path, _NOT_REGULAR) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StoredFileError(path, _NOT_REGULAR)
    return FileIO(descriptor, "rb")


def read_object(path: Path, limit: int = SMALL_BYTES) -> dict[str, Any]:
    """The JSON object that a file holds, of no particular type.

    Raises:
        FileNotFoundError: there is none.
        StoredFileError: it is not one JSON object.
        OSError: it cannot be read.
    """
    return parse_object(read_bytes(path, limit), path)


def read_as(kind: type[T], path: Path, limit: int = SMALL_BYTES) -> T:
    """The content of a JSON file as a dataclass or model.

    Raises:
        FileNotFoundError: there is none.
        StoredFileError: it is not one JSON object, or not of this kind.
        OSError: it cannot be read.
    """
    return parse_as(kind, read_bytes(path, limit), path)


def parse_as(kind: type[T], text: bytes, path: Path, place: str = "") -> T:
    """A JSON object as a dataclass or model.

    Args:
        kind: if a dataclass, its `__pydantic_config__` must be `STRICT`.
        text: the object.
        path: its file, for the error message.
        place: where in the file, such as `line 3`.

    Raises:
        StoredFileError: it is not an object of this kind.
    """
    text = _checked(text, path)
    _loaded(text, path, place)  # pydantic takes the last of two equal keys
    try:
        adapter: TypeAdapter[T] = _adapter(kind)
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        raise StoredFileError(path, _refused(error.errors(include_url=False)[0]), place) from None


def parse_object(text: bytes, path: Path, place: str = "") -> dict[str, Any]:
    """A JSON object, of no particular type.

    Raises:
        StoredFileError: it is not one, has a key twice, is nested too deep or a number is not finite.
    """
    loaded = _loaded(_checked(text, path), path, place)
    _check_values(loaded, path, place, 1)
    return loaded


def with_checksum(content: Mapping[str, Any]) -> str:
    """Indented JSON whose last key is the checksum of all before it; readers verify and remove it."""
    text = json.dumps(content, indent=1).removesuffix("}").removesuffix("\n")
    comma = "," if content else ""
    return f'{text}{comma}\n "crc32": {zlib.crc32(text.encode())}\n}}\n'


def has_checksum(text: bytes) -> bool:
    """Whether it was written by `with_checksum`, which older versions did not have."""
    return _CHECKSUM.match(text, max(text.rfind(b'\n "crc32": ') - 1, 0)) is not None


def _checked(text: bytes, path: Path) -> bytes:
    start = max(text.rfind(b'\n "crc32": ') - 1, 0)
    found = _CHECKSUM.match(text, start)
    if found is None:
        return text
    content = text[:start] if found[1] else text[: start + 1]
    if zlib.crc32(content) != int(found[2]):
        raise StoredFileError(path, f"crc32={int(found[2])} does not match: the file was changed")
    return content + b"\n}\n"


def _loaded(text: bytes, path: Path, place: str) -> dict[str, Any]:
    try:
        loaded = json.loads(text, object_pairs_hook=_no_key_twice)
    except RecursionError:
        raise StoredFileError(path, _TOO_DEEP, place) from None
    except ValueError as error:
        got = repr(text[:_SHOWN].decode(errors="replace")) if text.strip() else "nothing"
        raise StoredFileError(path, f"holds {got}, must hold one JSON object ({error})", place) from None
    if not isinstance(loaded, dict):
        raise StoredFileError(path, f"holds {repr(loaded)[:_SHOWN]}, must hold a JSON object", place)
    return loaded


def _check_values(value: Any, path: Path, place: str, depth: int) -> None:
    if depth > DEEPEST:
        raise StoredFileError(path, _TOO_DEEP, place)
    if isinstance(value, float) and not math.isfinite(value):
        raise StoredFileError(path, f"holds {value}, numbers must be finite", place)
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_values(item, path, place, depth + 1)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} twice")
    return found


def _refused(error: ErrorDetails) -> str:
    """`value must be a valid number, got '0.99'`."""
    field, kind = ".".join(map(str, error["loc"])), error["type"]
    if kind == "value_error":
        return f"{field} {error['ctx']['error']}"
    if kind == "missing":
        return f"{field} is missing"
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{field[:_SHOWN]} is not a known key"
    allowed = error["msg"].removeprefix("Input should be ").removeprefix("Input should ")
    return f"{field} must be {allowed}, got {repr(error['input'])[:_SHOWN]}"


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]
