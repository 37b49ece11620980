"""One ValueError child per kind of user mistake; each message says what, got, allowed, where."""


class ConfigError(ValueError):
    """A hyperparameter has a value that no K-FAC run could use."""


class PlacementError(ValueError):
    """A strategy cannot place these layers on a world of this size."""
