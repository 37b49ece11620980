"""One ValueError child per kind of user mistake; the command line prints it alone and exits with 2."""


class UserError(ValueError):
    """A mistake in what the user wrote or asked for: says what, got, allowed, where."""


class SweepError(UserError):
    """A sweep file that cannot be read as a list of cells."""


class SiteError(UserError):
    """A site profile that cannot be read, or cannot run what is asked of it."""


class SchedulerError(UserError):
    """A cluster's scheduler that does not answer."""


class BudgetError(UserError):
    """What is asked for could cost more than allowed; the command line exits with 4."""


class StoreError(UserError):
    """A run folder that is missing, unreadable or of another schema."""


class FilterError(UserError):
    """A `--where` expression that cannot be read."""


class DataError(UserError):
    """Training data that is missing, damaged, of another kind, or that cannot be brought here."""
