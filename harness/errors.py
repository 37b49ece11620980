"""Errors of users, one class per kind; the command line prints the message only and exits with 2."""

from __future__ import annotations

from pathlib import Path


class UserError(ValueError):
    """A mistake of the user; the message names what, got, allowed and where."""


class SweepError(UserError):
    """A sweep file that cannot be read as a list of cells."""


class SiteError(UserError):
    """A site profile that cannot be read, or a site that cannot run a cell."""


class NoSiteError(SiteError):
    """There is no site profile of this name."""


class SchedulerError(UserError):
    """A scheduler that does not answer."""


class BudgetError(UserError):
    """Cells that could cost more than the budget; the command line exits with 4."""


class CostlyError(BudgetError):
    """Cells that could cost so much that somebody has to agree first.

    Args:
        message: for the user.
        hours: the cost, in the unit of a budget.
    """

    def __init__(self, message: str, hours: float) -> None:
        super().__init__(message)
        self.hours = hours


class StoreError(UserError):
    """A run folder that is missing, unreadable or of another schema."""


class ForeignError(StoreError):
    """Stored files that another user may have written, and so decide nothing that is executed."""


class MembershipError(UserError):
    """A process that is not of a run acts as one of its ranks, or as their store."""


class StoredFileError(StoreError):
    """A stored file that is refused; the message names file, field, what it holds and what is allowed.

    Args:
        path: the file.
        sentence: `value must be a number, got '0.99'`.
        place: in the file, such as `line 3`.
    """

    def __init__(self, path: Path, sentence: str, place: str = "") -> None:
        super().__init__(f"{path}{', ' if place else ''}{place}: {sentence}")
        self.path, self.place, self.sentence = path, place, sentence

    def __reduce__(self) -> tuple[type[StoredFileError], tuple[Path, str, str]]:
        """For pickling: processes of a pool return errors to each other."""
        return type(self), (self.path, self.sentence, self.place)


class TrainingError(UserError):
    """Settings of a run that do not fit its model, which only training shows."""


class FilterError(UserError):
    """A `--where` expression that cannot be read."""


class DataError(UserError):
    """Training data that is missing, damaged, of another kind, or cannot be downloaded."""
