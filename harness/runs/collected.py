"""`collected.json`: the mark of an attempt that was copied from another folder of runs.

It says from where, and which files with which checksums. Without an outcome, such an attempt is a copy of one
that ran elsewhere when it was copied: nothing here starts it, ends it or decides how it ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from harness.runs.store import Attempt
from harness.runs.stored_files import STRICT, Count, Seconds, with_checksum

NAME = "collected.json"


@dataclass(frozen=True)
class CopiedFile:
    """A file of an attempt when it was copied.

    Attributes:
        bytes: its size.
        mtime_ns: when it was last written, Unix time in nanoseconds; the copy has the same.
        sha256: of its content.
    """

    __pydantic_config__ = STRICT
    bytes: Count
    mtime_ns: Count
    sha256: str


@dataclass(frozen=True)
class Collected:
    """Where an attempt was copied from.

    Attributes:
        source: the folder of runs or of the sweep, as `host:path` if on another host.
        collected_at: Unix time, seconds.
        identity: of the attempt; see `harness.runs.collection.attempts`.
        ended: whether it had an outcome; if not, the next collection refreshes it.
        files: by their path in the attempt's folder.
    """

    __pydantic_config__ = STRICT
    source: str
    collected_at: Seconds
    identity: str
    ended: bool
    files: Mapping[str, CopiedFile]

    @classmethod
    def read(cls, attempt: Attempt) -> Self | None:
        """The attempt's mark; None if it was not collected.

        Raises:
            StoredFileError: `collected.json` is damaged.
        """
        return attempt.read_as(cls, NAME)

    def to_json(self) -> str:
        """For `collected.json`, with a checksum."""
        return with_checksum(asdict(self))


def is_collected(attempt: Attempt) -> bool:
    """Whether the attempt was copied from another folder of runs."""
    return (attempt.path / NAME).exists()
