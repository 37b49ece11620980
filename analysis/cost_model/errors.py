"""The mistakes of a user who asks for a prediction; the command line prints them alone."""


class CostModelError(ValueError):
    """A model, a calibration or a question that the cost model cannot answer."""
