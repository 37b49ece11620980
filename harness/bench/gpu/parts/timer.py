"""The phase timer: whether phases add up to the wall time, and what it costs.

The phases' times are the device's, the wall time the host's; they are measured apart from each other.
"""

from __future__ import annotations

from statistics import median

from harness.bench.gpu.setting import Setting, spread
from harness.bench.gpu.subjects import subject
from harness.bench.gpu.training_steps import KINDS, Steps
from kfac_core.timing import WindowTotals, seconds_per_entry

_CLOSURE_LIMIT = 0.01
_COST_LIMIT = 0.05
_WINDOW_STEPS = 10


def run(setting: Setting) -> None:
    """Windows of steps of every kind; then steps with and without the timer in turn."""
    steps = Steps(setting, subject("resnet32", setting.device, small=setting.small), {})
    for kind in KINDS:
        steps.timed(kind)  # warm-up
    count = 2 if setting.small else _WINDOW_STEPS
    for kind in KINDS:
        _closure(setting, f"{kind} steps", steps.timed(kind, count), count)
    steps.step("factor")  # work of before, which the device still has to do when the clock starts
    _closure(setting, "plain steps, started while the device is busy", steps.timed("plain", count), count)
    _overhead(setting, steps, count)


def _closure(setting: Setting, name: str, totals: WindowTotals, steps: int) -> None:
    phases = sum(totals.seconds.values())
    ratio = phases / totals.wall_seconds
    setting.findings.row(
        "closure", window=name, steps=steps, wall_seconds=totals.wall_seconds, phases_seconds=phases,
        ratio=ratio,
    )  # fmt: skip
    setting.findings.check(
        f"phases of {name} add up to the wall time",
        f"{ratio:.4f} of it, allowed within {_CLOSURE_LIMIT:.0%}",
        passed=abs(ratio - 1) <= _CLOSURE_LIMIT,
    )


def _overhead(setting: Setting, steps: Steps, count: int) -> None:
    """Windows with the timer, and the same without: its phases are then switched off."""

    def without() -> None:
        for _ in range(count):
            steps.step("factor")

    on, off = [], []
    for _ in range(2 if setting.small else 10):
        on.append(steps.timed("factor", count).wall_seconds)
        off += setting.seconds_of(without, least=1, most=1, warm=False)
    entries = steps.timed("factor").entries
    entry = seconds_per_entry(setting.device)
    step = median(off) / count
    paired, computed = median(on) / median(off) - 1, entries * entry / step
    setting.findings.row(
        "overhead", step_seconds=step, entries_per_step=entries, seconds_per_entry=entry, paired=paired,
        computed=computed, **{f"off_{name}": value for name, value in spread(off).items()},
    )  # fmt: skip
    if not setting.small:  # a rehearsal's steps are too short to compare
        setting.findings.check(
            "the timer costs little", f"{paired:.2%} of a factor step of ResNet-32, {computed:.2%} computed",
            passed=paired <= _COST_LIMIT,
        )  # fmt: skip
