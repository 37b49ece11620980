"""What K-FAC says: warnings, and log records of its logger."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class Messages(logging.Handler):
    """Keeps the records of `kfac_core`, and warnings that name K-FAC.

    Attributes:
        logged: levels and texts.
        warned: texts.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.logged: list[tuple[str, str]] = []
        self.warned: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.logged.append((record.levelname, record.getMessage()))

    def said(self) -> str:
        """The start of the first warning, logged or raised; `no word` without any."""
        loud = self.warned + [text for level, text in self.logged if level != "INFO"]
        return f"says: {loud[0][:130]}" if loud else "no word"


@contextmanager
def messages() -> Iterator[Messages]:
    """A context whose messages are kept."""
    kept, logger = Messages(), logging.getLogger("kfac_core")
    before, logger.propagate = logger.level, False
    logger.setLevel(logging.INFO)
    logger.addHandler(kept)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield kept
        finally:
            kept.warned += [str(each.message) for each in caught if "K-FAC" in str(each.message)]
            logger.removeHandler(kept)
            logger.setLevel(before)
            logger.propagate = True
