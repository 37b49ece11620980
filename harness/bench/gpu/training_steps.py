"""Training steps of one subject, plain or with K-FAC, of each kind: all work, factors only, plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from harness.bench.gpu.activity import Activity, activity
from harness.bench.gpu.setting import Setting
from harness.bench.gpu.subjects import Subject
from kfac_core import KFAC, KFACConfig, Phase
from kfac_core.timing import PhaseTimer, WindowTotals

FACTOR_STEPS, INVERSE_STEPS = 10, 100
KINDS: Mapping[str, int] = {"full": 0, "factor": FACTOR_STEPS, "plain": 1}
"""Kinds of step, each with a step number at which it is due."""


Other = tuple[Callable[[str], None], Callable[[], None]]


class Steps:
    """A replica that takes training steps with SGD, and K-FAC if `config` is given.

    Args:
        half: the dtype of autocast, or None for float32.
        make: what preconditions instead of our K-FAC: given the model, a function that is told the kind of
            the step that begins, and one that is called after its backward pass.

    Attributes:
        half: see above.
        timer: runs in every step.
        kfac: None without `config`.
    """

    def __init__(
        self,
        setting: Setting,
        subject: Subject,
        config: Mapping[str, Any] | None = None,
        *,
        half: torch.dtype | None = None,
        make: Callable[[torch.nn.Module], Other] | None = None,
    ) -> None:
        self._subject, self.half, self._device = subject, half, setting.device
        self.timer: PhaseTimer = PhaseTimer(setting.device, ranges=True)
        fused = {"fused": True} if setting.on_gpu else {}
        self._optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-6, momentum=0.9, **fused)
        self.kfac: KFAC | None = None
        if config is not None:
            chosen = KFACConfig.sc20(
                **{"damping": 0.003, "factor_update_steps": FACTOR_STEPS}
                | {"inverse_update_steps": INVERSE_STEPS, **subject.kfac, **config}
            )
            self.kfac = KFAC(subject.model, chosen, lr=0.1, timer=self.timer)
        self._other = make(subject.model) if make is not None else None

    def step(self, kind: str = "plain") -> None:
        """Issue one step of a kind; does not wait for the device."""
        if self.kfac is not None:
            self.kfac.steps = KINDS[kind]
        if self._other is not None:
            self._other[0](kind)
        self._optimizer.zero_grad()
        with self.timer.phase(Phase.FORWARD), self._autocast():
            loss = self._subject.loss()
        with self.timer.phase(Phase.BACKWARD):
            loss.backward()
        if self.kfac is not None:
            self.kfac.step()
        if self._other is not None:
            self._other[1]()
        with self.timer.phase(Phase.UPDATE):
            self._optimizer.step()

    def timed(self, kind: str, steps: int = 1) -> WindowTotals:
        """The phase timer's totals of so many steps."""
        self.timer.start()
        for _ in range(steps):
            self.step(kind)
        self.timer.stop()
        return self.timer.drain()

    def activity(self, kind: str) -> Activity:
        """What one step does on the GPU; waits of starting and stopping the clock are not the step's."""
        self.timer.start()
        found = activity(partial(self.step, kind))
        self.timer.stop()
        self.timer.drain()
        return found

    def close(self) -> None:
        """Free what the replica holds."""
        if self.kfac is not None:
            self.kfac.remove()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.half is None:
            return nullcontext()
        return torch.autocast(self._device.type, self.half)
