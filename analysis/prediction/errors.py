"""Error of the predictions."""


class PredictionError(ValueError):
    """A network, exchange or batch is unknown or does not fit; the message names it and what is allowed."""
