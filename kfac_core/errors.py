"""Errors: one ValueError child per kind of user mistake; messages say what, got, allowed and where."""


class ConfigError(ValueError):
    """A hyperparameter has a value that K-FAC cannot use."""


class PlacementError(ValueError):
    """A strategy cannot place these layers on a world of this size."""
