"""Writes and reads the files of the run folder.

- A file is written beside its place, synced and renamed, so that readers see all of it or none.
- A JSON file ends with a checksum of all before it. Whoever reads the file checks it.
- A reader accepts what is typed, finite and in range. Anything else is a `StoredFileError`,
  never a number that was guessed.
- Folders may be entered by their owner alone, or also by the group. What decides what is executed has to
  belong to this user, whatever the folders allow.
"""

from __future__ import annotations

import errno
import json
import math
import os
import pwd
import re
import stat
import tempfile
import zlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from harness.errors import ForeignError, StoredFileError, StoreError

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

_CHECKSUM = re.compile(rb',?\n "crc32": ([0-9]{1,10})\n\}\n\Z')
_SHOWN = 60  # characters of a damaged file in an error message
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file so that readers see the old or the new content, even after a crash.

    Args:
        path: of the file.
        text: its content.
        private: whether only its owner may read it, even where the group may read the folder.

    Raises:
        OSError: the disk is full, for example; with the path, and the old content is unchanged.
    """
    _write_beside(path, text, private=private).replace(path)


def write_once(path: Path, text: str) -> bool:
    """Write a file unless it exists; returns whether this call wrote it.

    Raises:
        OSError: the disk is full, for example; with the path, which does not exist then.
        StoreError: the file system has no hard links.
    """
    if path.exists():
        return False
    temporary = _write_beside(path, text)
    try:
        os.link(temporary, path)  # unlike a rename, a link fails if the file exists
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise StoreError(
            f"{path}: its file system refuses hard links ({error.strerror}), by which the first of two "
            f"writers wins; keep runs on another file system (--runs; kronscale doctor --runs checks one)"
        ) from None
    finally:
        temporary.unlink()
    return True


def make_inside(folder: Path) -> None:
    """Make a folder that is open to its owner, and to its group if its parent is, whatever the umask."""
    folder.mkdir(mode=0o700)
    folder.chmod(folder.parent.stat().st_mode & 0o2750)


def with_checksum(content: Mapping[str, Any]) -> str:
    """Indented JSON whose last key is the checksum of all before it; readers check and remove it."""
    text = json.dumps(content, indent=1).removesuffix("}").removesuffix("\n")
    comma = "," if content else ""
    return f'{text}{comma}\n "crc32": {zlib.crc32(text.encode())}\n}}\n'


def has_checksum(text: bytes) -> bool:
    """Whether a file ends as `with_checksum` writes it; files of schema 3 and older do not."""
    return _checksum(text) is not None


def without_checksum(text: bytes, path: Path, *, checked: bool = False) -> bytes:
    """The bytes of a JSON file without its checksum; arguments as of `read_as`.

    Raises:
        StoredFileError: it does not match its checksum, or has none and must.
    """
    found = _checksum(text)
    if found is None:
        if checked:
            raise StoredFileError(path, "has no checksum at its end: the file was changed or cut")
        return text
    content = text[: found.start()]
    if zlib.crc32(content) != int(found[1]):
        raise StoredFileError(path, f"crc32={int(found[1])} does not match: the file was changed")
    return content + b"\n}\n"


def read_object(path: Path, *, checked: bool = False) -> dict[str, Any]:
    """The JSON object that a file holds, of no particular type; arguments and errors as of `read_as`."""
    return parse_object(without_checksum(read_bytes(path), path, checked=checked), path)


def read_as(kind: type[T], path: Path, *, checked: bool = False) -> T:
    """The content of a JSON file as a dataclass or model.

    Args:
        kind: if a dataclass, its `__pydantic_config__` must be `STRICT`.
        path: of the file.
        checked: whether it must have a checksum; files of schema 3 and older have none. One that is there is
            checked in any case.

    Raises:
        FileNotFoundError: there is none.
        StoredFileError: it is not one JSON object of this kind, or does not match its checksum.
        OSError: it cannot be read.
    """
    return file_as(kind, read_bytes(path), path, checked=checked)


def file_as(kind: type[T], text: bytes, path: Path, *, checked: bool = False) -> T:
    """The content of a JSON file from its bytes; arguments and errors as of `read_as`."""
    return parse_as(kind, without_checksum(text, path, checked=checked), path)


def parse_as(kind: type[T], text: bytes, path: Path, place: str = "") -> T:
    """A JSON object as a dataclass or model.

    Args:
        kind: as of `read_as`.
        text: the object.
        path: its file, for the error message.
        place: where in the file, such as `line 3`.

    Raises:
        StoredFileError: it is not an object of this kind.
    """
    _loaded(text, path, place)  # pydantic takes the last of two equal keys
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    try:
        adapter: TypeAdapter[T] = _ADAPTERS[kind]
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        raise StoredFileError(path, _refused(error.errors(include_url=False)[0]), place) from None


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def parse_object(text: bytes, path: Path, place: str = "") -> dict[str, Any]:
    """A JSON object, of no particular type.

    Raises:
        StoredFileError: it is not one, has a key twice, or a number is not finite.
    """
    return _loaded(text, path, place, parse_float=_finite, parse_constant=_not_finite)


def read_bytes(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        FileNotFoundError: there is none.
        StoredFileError: it is a folder, a pipe or a device, which could block.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        return file.readall()


def read_own(path: Path, sweep: Path) -> bytes:
    """The content of a file that decides what is executed: a launch, or a submission manifest.

    Raises:
        ForeignError: another user may have written it; see `foreign`.
        FileNotFoundError: there is none.
        StoredFileError: as of `read_bytes`.
    """
    refuse_foreign(path, sweep)
    with open_regular(path) as file:
        if reason := _not_own(path, os.fstat(file.fileno())):  # whoever renames sweeps was quicker
            raise ForeignError(f"{reason}; {_REMEDY}")
        return file.readall()


def refuse_foreign(path: Path, sweep: Path) -> None:
    """Raise a ForeignError if another user may have written the file or folder; see `foreign`."""
    if reason := foreign(path, sweep):
        raise ForeignError(f"{reason}; {_REMEDY}")


def foreign(path: Path, sweep: Path) -> str:
    """Why another user may have written a file or folder, one sentence; empty if nobody can have.

    It and every folder from its sweep's down to it must belong to this user or root, must not be writable by
    a group or others, and must be no symbolic link. What does not exist is nobody's.
    """
    inside = path.relative_to(sweep)
    for part in (sweep, *(sweep / one for one in reversed(inside.parents)), path):
        try:
            reason = _not_own(part, part.lstat())
        except FileNotFoundError:
            return ""
        if reason:
            return reason
    return ""


def user_name(uid: int | None = None) -> str:
    """Name of a user, by default of this process's; without an entry, as in some containers, the number.

    Environment variables are not used, because they can be wrong and Slurm's jobs are looked up by this name.
    """
    number = os.getuid() if uid is None else uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def open_regular(path: Path) -> FileIO:
    """Open a regular file, unbuffered, for reading; errors as of `read_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block without
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StoredFileError(path, "is a folder, pipe or device, must be a regular file")
    return FileIO(descriptor, "rb")


_REMEDY = (
    "what others may have written is shown, but not executed: look through it, then chmod -R go-w and remove "
    "what is not yours, or set shared_runs: true in the site profile"
)


def _not_own(path: Path, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {user_name(status.st_uid)}, not to {user_name(os.geteuid())}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # the widest right of an access control list is here
        return f"{path} may be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _write_beside(path: Path, text: str, *, private: bool = False) -> Path:
    """A new file of that content beside `path`, on the disk."""
    mode = stat.S_IRUSR | stat.S_IWUSR
    if not private:
        mode |= path.parent.stat().st_mode & stat.S_IRGRP  # readable by the group if the folder is
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fchmod(descriptor, mode)
                os.fsync(descriptor)
        except BaseException:
            Path(name).unlink()
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return Path(name)


def _checksum(text: bytes) -> re.Match[bytes] | None:
    return _CHECKSUM.search(text, max(len(text) - 40, 0))


def _loaded(text: bytes, path: Path, place: str, **hooks: Any) -> dict[str, Any]:
    try:
        loaded = json.loads(text, object_pairs_hook=_no_key_twice, **hooks)
    except RecursionError:
        raise StoredFileError(path, "is nested too deep", place) from None
    except ValueError as error:
        got = repr(text[:_SHOWN].decode(errors="replace")) if text.strip() else "nothing"
        raise StoredFileError(path, f"holds {got}, must hold one JSON object ({error})", place) from None
    if not isinstance(loaded, dict):
        raise StoredFileError(path, f"holds {repr(loaded)[:_SHOWN]}, must hold a JSON object", place)
    return loaded


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _not_finite(text)


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is not finite")


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
