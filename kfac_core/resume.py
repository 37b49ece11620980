"""Saving and resuming a KFAC: the methods around `state`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kfac_core import state as states


class Resumable(ABC):
    """A preconditioner whose state can be saved, and resumed in another world."""

    steps: int
    skipped_steps: int
    _must_solve: bool
    _owes_factors: bool

    @abstractmethod
    def discard(self) -> None:
        """Discard the statistics of the last backward pass."""

    @abstractmethod
    def _snapshot(self) -> states.Snapshot:
        """What there is to save, with all steps decided."""

    def state_dict(self) -> dict[str, Any]:
        """The whole state on the CPU, the same on all ranks, to resume bitwise; every rank must call it."""
        return states.gather_state(self._snapshot())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, also on another world size, strategy or solver.

        Factors move to their new owners. With another solver the second-order data is solved again. With
        `overlap_factors` every rank must call this, as it receives what is in flight (`discard`).

        Raises:
            ConfigError: the state is of other layers.
        """
        states.check_state(self._snapshot(), state)
        self._restore(partial(states.restore_state, state=state))

    def state_shard(self) -> dict[str, Any]:
        """This rank's part of the state, on the CPU; no communication.

        A factor is in one rank's part, unless several ranks keep it (d_kfac, small ones of spd_kfac).
        """
        return states.state_shard(self._snapshot())

    def load_state_shard(self, shard: Mapping[str, Any]) -> None:
        """Resume bitwise in the world, strategy and solver of `shard`; every rank must call it.

        With others: `load_state_dict(kfac_core.state.merge_shards(shards))`.

        Raises:
            ConfigError: the shard is not this rank's.
        """
        states.check_shard(self._snapshot(), shard)
        self._restore(partial(states.restore_shard, shard=shard))

    def _restore(self, restored: Callable[[states.Snapshot], states.Counters]) -> None:
        self.discard()
        progress = restored(self._snapshot())
        self.steps, self.skipped_steps = progress.steps, progress.skipped_steps
        self._must_solve, self._owes_factors = progress.must_solve, progress.owes_factors
