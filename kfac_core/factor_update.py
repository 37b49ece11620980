"""How the statistics of a backward pass become factors: packed, exchanged, and averaged into the old ones."""

from __future__ import annotations

from torch import Tensor

from kfac_core.capture.hooks import Capture
from kfac_core.collectives import Communicator
from kfac_core.factors import Factors
from kfac_core.timing.phases import Phase
from kfac_core.timing.timer import PhaseTimer


class FactorUpdate:
    """The factor phases of a step.

    Ranks exchange bucket after bucket in the same order, and a rank that fails has to send its share all the
    same, or the others wait for it forever.
    """

    def __init__(
        self, factors: Factors, capture: Capture, communicator: Communicator, timer: PhaseTimer
    ) -> None:
        self._factors, self._capture = factors, capture
        self._communicator, self._timer = communicator, timer

    def on_gradient(self, layer: int, complete: bool) -> None:
        """Send what a layer's backward pass completed, while that of the layers before it goes on."""
        with self._timer.phase(Phase.FACTOR_COMPUTE):
            packed = self._factors.on_gradient(layer, self._capture.statistics, complete=complete)
        if packed:
            with self._timer.phase(Phase.FACTOR_COMM):
                self._factors.send()

    def run(self, decay: float, like: Tensor) -> None:
        """Exchange the statistics, and average them into the factors.

        Args:
            decay: weight of the old factors.
            like: dtype and device of the gradients.
        """
        self._factors.decay = decay
        try:
            with self._timer.phase(Phase.FACTOR_COMM):
                self._capture.join_ties(like, self._communicator.all_reduce)
            self.send()
            self._average()
        finally:
            self.discard()

    def send(self) -> None:
        """Send all buckets; after an error the remaining ones without this rank's statistics."""
        try:
            self._pack_and_send()
        except BaseException:
            self._capture.clear()
            self._pack_and_send()
            raise

    def discard(self) -> None:
        """Leave no statistics to the next step; after an error, also receive and drop what others sent."""
        self._capture.clear()
        with self._timer.phase(Phase.FACTOR_COMM):
            self._factors.discard()

    def _pack_and_send(self) -> None:
        packed_all = False
        while not packed_all:
            with self._timer.phase(Phase.FACTOR_COMPUTE):
                packed_all = self._factors.pack(self._capture.statistics)
            with self._timer.phase(Phase.FACTOR_COMM):
                self._factors.send()

    def _average(self) -> None:
        with self._timer.phase(Phase.FACTOR_COMPUTE):
            self._factors.accumulate_local(self._capture.statistics)
        received_all = False
        while not received_all:
            with self._timer.phase(Phase.FACTOR_COMM):
                received_all = self._factors.receive()
            with self._timer.phase(Phase.FACTOR_COMPUTE):
                self._factors.accumulate_received(self._capture.statistics)
