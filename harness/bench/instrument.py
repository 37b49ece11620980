"""The cost of the phase timer: steps with and without it, in pairs, in one process."""

from __future__ import annotations

import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from harness.bench.median import median_interval
from harness.bench.replica import FACTOR_STEPS, MODELS, Training
from harness.runs.heartbeat import HeartbeatWriter
from harness.training.malloc import keep_freed_memory
from kfac_core import KFAC, KFACConfig, Phase
from kfac_core.timing.timer import PhaseTimer, seconds_per_entry

WARMUP_STEPS = 3


class SwitchedTimer(PhaseTimer):
    """A timer that can be switched off: no clock, no heartbeat, no generator."""

    on = True

    def phase(self, phase: Phase) -> AbstractContextManager[None]:  # type: ignore[override]  # off: no generator
        """Book the block on `phase`, or do nothing at all."""
        return super().phase(phase) if self.on else nullcontext()


def measure(model: str, batch: int, pairs: int, threads: int) -> dict[str, Any]:
    """Time steps with factor updates, the kind with most phases, with and without the timer.

    The order within every second pair is reversed, so that a machine that slows down favours neither. Each
    step starts, stops and drains the timer, which a run does once per window.

    Returns:
        `on_seconds` and `off_seconds` of every pair; `overhead`: the median of their ratios less one, with
        95 % limits; `entries_per_step`, `seconds_per_entry` and `computed_overhead`,
        their product over the median step without timer.
    """
    torch.set_num_threads(threads)
    keep_freed_memory()
    training = Training(MODELS[model], batch, 0, 1)
    with tempfile.TemporaryDirectory(prefix="kronscale-bench-") as folder:
        heartbeat = HeartbeatWriter(Path(folder) / "heartbeat")
        timer = SwitchedTimer(observer=heartbeat.write)
        config = KFACConfig(factor_update_steps=FACTOR_STEPS, inverse_update_steps=10**9)
        kfac = KFAC(training.model, config, lr=0.1, timer=timer)
        entries = 0
        for _ in range(WARMUP_STEPS):
            _, entries = _step(training, kfac, timer)
        on: list[float] = []
        off: list[float] = []
        for pair in range(pairs):
            for state in (True, False) if pair % 2 else (False, True):
                timer.on = state
                (on if state else off).append(_step(training, kfac, timer)[0])
        cost = seconds_per_entry(observer=heartbeat.write)
    ratios = [one / other - 1 for one, other in zip(on, off, strict=True)]
    settings = {"model": model, "batch": batch, "pairs": pairs, "threads": threads}
    return settings | {
        "on_seconds": on,
        "off_seconds": off,
        "overhead": median_interval(ratios),
        "entries_per_step": entries,
        "seconds_per_entry": cost,
        "computed_overhead": entries * cost / median(off),
    }


def _step(training: Training, kfac: KFAC, timer: SwitchedTimer) -> tuple[float, int]:
    """Seconds of one step, and how many phases it entered; the first step also solves the factors."""
    training.synchronize()
    kfac.steps = FACTOR_STEPS if kfac.steps else 0
    began = time.perf_counter()
    if timer.on:
        timer.start()
    with timer.phase(Phase.FORWARD):
        loss = training.loss()
    with timer.phase(Phase.BACKWARD):
        loss.backward()
    kfac.step()
    entries = 0
    if timer.on:
        timer.stop()
        entries = timer.drain().entries
    return time.perf_counter() - began, entries
