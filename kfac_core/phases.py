"""The phases of a training step, for timers, records, figures and the cost model."""

from enum import StrEnum


class Phase(StrEnum):
    """A part of a step. Phases are exclusive: time belongs to the innermost open one."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT_COMM = "gradient_comm"
    FACTOR_COMPUTE = "factor_compute"
    FACTOR_COMM = "factor_comm"
    INVERSE_COMPUTE = "inverse_compute"
    INVERSE_COMM = "inverse_comm"
    PRECONDITION = "precondition"
    PRECONDITION_COMM = "precondition_comm"
    SCALE = "scale"
    UPDATE = "update"


KFAC_PHASES = (
    Phase.FACTOR_COMPUTE,
    Phase.FACTOR_COMM,
    Phase.INVERSE_COMPUTE,
    Phase.INVERSE_COMM,
    Phase.PRECONDITION,
    Phase.PRECONDITION_COMM,
    Phase.SCALE,
)
"""The phases that K-FAC adds to a step of plain SGD."""

COMM_PHASES = (Phase.GRADIENT_COMM, Phase.FACTOR_COMM, Phase.INVERSE_COMM, Phase.PRECONDITION_COMM)
"""The phases that move bytes between ranks."""
