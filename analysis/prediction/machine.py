"""Rates of a machine that was measured, for networks that nobody ran on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from analysis.prediction.arms import Arm, Measured
from analysis.prediction.bounds import PRIOR_COUNT, PRIOR_ERROR, Errors, Repeatability
from analysis.prediction.errors import PredictionError
from analysis.prediction.fitted import FittedArm
from analysis.prediction.laws import Law
from analysis.prediction.links import OPERATIONS, Links, link_law
from analysis.prediction.networks import Network
from analysis.prediction.prediction import StudyModel
from analysis.prediction.work import ITEM
from harness.cell import Training
from kfac_core.config import STRATEGIES, KFACConfig
from kfac_core.phases import Phase

FRACTION = 0.5  # of hybrid_opt; at each world size the nearest that divides it


@dataclass(frozen=True)
class Passes:
    """Measured seconds of one example: of the forward and backward pass, and of all factors on one rank."""

    forward_backward: float
    factors: float


@dataclass(frozen=True)
class Machine:
    """Rates of a machine.

    Attributes:
        about: where it was measured.
        links: laws of exchanges.
        seconds_per_flop: of forward and backward passes, factors and products.
        inverse: by solver, the law of decompositions and the sum of n^3.
        bytes_per_second: of elementwise operations.
        passes: by network, where they were measured; they replace the seconds per FLOP.
        error: root mean square of the logs of predicted over measured steps, of so many (`errors`).
        unmeasured_error: the same for a network without measured passes; 0.25 is assumed.
    """

    name: str
    about: str
    links: Links
    seconds_per_flop: float
    inverse: Mapping[str, Law]
    bytes_per_second: float
    passes: Mapping[str, Passes]
    error: float
    errors: int
    unmeasured_error: float

    def model(self, network: Network, config: KFACConfig, local_batch_size: int) -> StudyModel:
        """SGD and all strategies of K-FAC for a network, with `config`'s other settings.

        Raises:
            PredictionError: the solver was not measured here.
        """
        training = Training(local_batch_size=local_batch_size, epochs=1, gradient_averaging="flat")
        fractions = {"hybrid_opt": FRACTION}
        configs = {"sgd": None} | {
            name: replace(config, strategy=name, grad_worker_fraction=fractions.get(name))
            for name in STRATEGIES
        }
        arms = tuple(Arm(name, network, own, training, {}, {}) for name, own in configs.items())
        spread = self.error if network.name in self.passes else self.unmeasured_error
        known = {self.links.known: Repeatability(spread, self.errors, of_windows=False)}
        notes = (f"rates: {self.name}: {self.about}",)
        return StudyModel(
            Measured(network.name, self.links.algorithm, 0.0, arms, False, notes),
            self.links,
            {arm.name: self._laws(arm) for arm in arms},
            Errors(known, PRIOR_ERROR, PRIOR_COUNT, ()),
        )

    def _laws(self, arm: Arm) -> FittedArm:
        network, batch = arm.network, arm.local_batch_size(1)
        own = self.passes.get(network.name)
        elements = sum(
            rows * (shape.a.elements + shape.g.elements)
            for rows, shape in zip(network.positions, network.shapes, strict=True)
        )
        training = 3 * network.forward_flops * self.seconds_per_flop if own is None else own.forward_backward
        factors = 2 * self.seconds_per_flop if own is None else own.factors / elements
        laws = {
            Phase.FORWARD: Law((0.0, training / 3)),  # the backward pass has two products for its one
            Phase.BACKWARD: Law((0.0, 2 * training / 3)),
        }
        constants = {str(Phase.UPDATE): self._seconds(5 * network.parameters)}  # momentum: 3 reads, 2 writes
        if arm.config is not None:
            solver = "eigen" if arm.config.solver == "eigen" else "inverse"  # pi changes the damping alone
            if solver not in self.inverse:
                has = ", ".join(self.inverse)
                raise PredictionError(f"solver={solver} was not measured on {self.name}; it has {has}")
            gradients = network.parameters - network.other_parameters
            laws |= {
                Phase.FACTOR_COMPUTE: Law((0.0, factors)),
                Phase.INVERSE_COMPUTE: self.inverse[solver],
                Phase.PRECONDITION: Law((0.0, self.seconds_per_flop)),
            }
            # Packing and unpacking; a dot, a scaling, writing back
            constants |= {str(Phase.SCALE): self._seconds(9 * gradients)}
        # Weights, gradients, momentum; outputs of layers, and about as many of what is between them
        memory = ITEM * (3 * network.parameters + 2 * batch * network.activations)
        return FittedArm(
            arm, self.links, (self.links.known,), laws, constants, {self.links.known: float(memory)}, {}
        )

    def _seconds(self, items: int) -> float:
        return ITEM * items / self.bytes_per_second


_RELEASED = {
    operation: link_law("nccl", operation, 64, 0.929e-3, 1.4335e-9 / ITEM) for operation in OPERATIONS
}

RTX_2080_TI = Machine(
    "64 RTX 2080 Ti",
    "NVIDIA RTX 2080 Ti, 100 Gb/s InfiniBand, published with SPD-KFAC (arXiv:2107.06533); inverses follow "
    "ResNet-50's two published phases",
    Links(MappingProxyType(_RELEASED), "nccl", 64, "the all-reduce of SPD-KFAC's release"),
    1 / (0.6 * 13.4e12),  # 60 % of the data sheet's float32: assumed, not measured
    MappingProxyType({"inverse": Law((0.00038057928184945244, 5.147926758035925e-13))}),
    0.6 * 616e9,
    MappingProxyType({
        "resnet50": Passes(0.132 / 32, 0.2115 / 32), "resnet152": Passes(0.114 / 8, 0.1927 / 8),
        "densenet201": Passes(0.178 / 16, 0.3163 / 16),
    }),
    error=0.04, errors=6, unmeasured_error=0.25,
)  # fmt: skip
"""`results/prediction/spd_kfac.md` says how the law of inverses was found, and how far its steps are off."""
