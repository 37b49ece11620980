"""Errors in a user's request for a prediction; the command line prints only the message."""


class CostModelError(ValueError):
    """A model, calibration or setting that the cost model does not support."""
