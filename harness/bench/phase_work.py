"""Runs a trainer's steps without the work of one phase, or with that work done twice.

Both replace methods of the trainer and its K-FAC; these need no code for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from harness.training.train import Trainer
from kfac_core import KFAC
from kfac_core.timing.phases import Phase


class PhaseWork:
    """The methods that do the work of each phase.

    Args:
        full_step: trains one step with factor and inverse updates.
    """

    def __init__(self, trainer: Trainer, kfac: KFAC, full_step: Callable[[], None]) -> None:
        self._full_step = full_step
        self._capture, self._factors, self._gradients = kfac._capture, kfac._factors, kfac._gradients
        second_order = kfac._second_order
        self._methods: dict[Phase, list[tuple[Any, ...]]] = {
            Phase.GRADIENT_COMM: [(trainer.gradients, "average")],
            Phase.INVERSE_COMPUTE: [(second_order, "solve")],
            Phase.INVERSE_COMM: [(second_order, "exchange_means", "exchange")],
            Phase.PRECONDITION: [(self._gradients, "read")],
            Phase.PRECONDITION_COMM: [(self._gradients, "exchange")],
            Phase.SCALE: [(self._gradients, "clip", "write")],
        }

    @contextmanager
    def left_out(self, phase: Phase) -> Iterator[None]:
        """Do nothing in place of the phase's work; its results stay those of an earlier step."""
        with ExitStack() as stack:
            if phase == Phase.FACTOR_COMPUTE:
                stack.enter_context(self._recorded_statistics())
            if phase == Phase.FACTOR_COMM:
                stack.enter_context(self._recorded_buckets())
            nothing = _no_counts if phase == Phase.INVERSE_COMPUTE else _nothing
            for owner, *names in self._methods.get(phase, []):
                for name in names:
                    stack.enter_context(patch.object(owner, name, nothing))
            if phase == Phase.PRECONDITION:
                stack.enter_context(patch.object(self._gradients, "own", []))
            yield

    @contextmanager
    def doubled(self, phase: Phase) -> Iterator[None]:
        """Do a computing phase's work twice; the second result is used."""
        methods = self._methods.get(phase, [])
        if phase == Phase.FACTOR_COMPUTE:
            methods = [(self._capture, "_gram"), (self._factors, "accumulate_local", "_pack")]
        with ExitStack() as stack:
            for owner, *names in methods:
                for name in names:
                    stack.enter_context(patch.object(owner, name, partial(_twice, getattr(owner, name))))
            if phase == Phase.FACTOR_COMPUTE:
                twice = self._accumulate_received_twice()
                stack.enter_context(patch.object(self._factors, "accumulate_received", twice))
            if phase == Phase.PRECONDITION:
                stack.enter_context(patch.object(self._gradients, "own", self._gradients.own * 2))
            yield

    def _accumulate_received_twice(self) -> Callable[[Any], None]:
        """The method clears what was received, so the second call is given it again."""
        factors = self._factors
        accumulate: Callable[[Any], None] = factors.accumulate_received

        def accumulate_twice(statistics: Any) -> None:
            received = factors._received
            accumulate(statistics)
            factors._received = received
            accumulate(statistics)

        return accumulate_twice

    @contextmanager
    def _recorded_statistics(self) -> Iterator[None]:
        """Hooks and packing run, but return what they computed in one step before the clock runs."""
        results: dict[Any, Any] = {}  # by all arguments but the last, the data

        def recorded(work: Callable[..., Any], *args: Any) -> Any:
            results[args[:-1]] = work(*args)
            return results[args[:-1]]

        def replayed(*args: Any) -> Any:
            return results[args[:-1]]

        with (
            patch.object(self._capture, "_gram", partial(recorded, self._capture._gram)),
            patch.object(self._factors, "_pack", partial(recorded, self._factors._pack)),
        ):
            self._full_step()
        with (
            patch.object(self._capture, "_gram", replayed),
            patch.object(self._factors, "_pack", replayed),
            patch.object(self._factors, "accumulate_local", _nothing),
            patch.object(self._factors, "accumulate_received", _nothing),
        ):
            yield

    @contextmanager
    def _recorded_buckets(self) -> Iterator[None]:
        """Nothing is sent, and the buckets received are those of one step before the clock runs."""
        factors = self._factors
        receive: Callable[[], bool] = factors.receive
        received: list[Any] = []

        def record() -> bool:
            is_last = receive()
            received.extend(factors._received)
            return is_last

        def replay() -> bool:
            factors._packed, factors._received = [], list(received)  # `send` has not emptied `_packed`
            return receive()

        with patch.object(factors, "receive", record):
            self._full_step()
        with patch.object(factors, "receive", replay), patch.object(factors, "send", _nothing):
            yield


def _twice(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    work(*args, **kwargs)
    return work(*args, **kwargs)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for the work of a phase that is left out."""


def _no_counts(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Stands for `SecondOrder.solve`, which returns the factors' update counts."""
    return {}
