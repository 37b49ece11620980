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
    _solved_at: tuple[int, float] | None

    @abstractmethod
    def discard(self) -> None:
        """Discard the statistics of the last backward pass."""

    @abstractmethod
    def _snapshot(self) -> states.Snapshot:
        """What there is to save, with all steps decided."""

    def state_dict(self) -> dict[str, Any]:
        """The whole state on the CPU, the same on all ranks, to resume bitwise; every rank must call it."""
        return states.gather_state(self._snapshot())

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> states.IncompatibleKeys:
        """Resume from a saved state, also on another world size, strategy or solver.

        Factors move to their new owners. With another solver, or inverses of another damping, the next step
        solves the second-order data again. With
        `overlap_factors` every rank must call this, as it receives what is in flight (`discard`).

        Args:
            state: of `state_dict` or `merge_shards`.
            strict: whether all layers have to be the same. False loads the factors of the same name and
                shape; others stay as they are, and the next step solves all second-order data again.

        Returns:
            What did not match; nothing if `strict`.

        Raises:
            ConfigError: the state is of other layers, and `strict`; or of another version.
        """
        found = states.check_state(self._snapshot(), state, strict=strict)
        self._restore(partial(states.restore_known if any(found) else states.restore_state, state=state))
        return found

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
        self._solved_at = progress.solved_at
