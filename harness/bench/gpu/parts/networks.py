"""One network: steps with K-FAC beside plain training, by phase, with launches, waits and memory.

Each arm has a replica of its own, and plain training is measured again beside each arm, because a GPU's
clocks drift. Memory is torch's: the peak of two full steps above what was allocated before the replica.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from harness.bench.gpu import peers
from harness.bench.gpu.setting import Setting, spread
from harness.bench.gpu.subjects import Subject, subject
from harness.bench.gpu.training_steps import FACTOR_STEPS, INVERSE_STEPS, KINDS, Steps
from kfac_core.phases import KFAC_PHASES

_PLAIN_LAUNCHES = 150
"""Of K-FAC in a step without updates: the target that was set for ResNet-50 at one rank."""

Arm = tuple[str, dict[str, Any] | None, torch.dtype | None]


def arms(part: str) -> list[Arm]:
    """Name, settings of K-FAC or None, and autocast's dtype."""
    half = torch.bfloat16
    found: list[Arm] = [
        ("inverse", {"solver": "inverse"}, None),
        ("inverse, bfloat16 autocast", {"solver": "inverse"}, half),
        (
            "inverse, bfloat16 autocast and grams",
            {"solver": "inverse", "gram_precision": "bfloat16"},
            half,
        ),
    ]
    if part == "resnet32":
        found.append(("eigen, warm", {"solver": "eigen", "eigen_start": "warm"}, None))
    return [*found, ("eigen", {"solver": "eigen"}, None)]  # the longest last, if time should end


def run(setting: Setting) -> None:
    """Plain training, then every arm, then the peers whose checkouts are given."""
    setting.findings.note(_subject(setting).about)
    setting.findings.note(f"TF32 in convolutions: {_tf32(setting)}; in matrix products: {_tf32_matmul()}")
    for half in (None, torch.bfloat16):
        _plain(setting, half)
    for name, config, half in arms(setting.part):
        if config is not None and "gram_precision" in config and not setting.on_gpu:
            continue  # refused on a CPU
        if setting.has_time(name, 0.0 if setting.small else 5.0):
            _kfac(setting, name, config or {}, half)
    for name, checkout in (("gpauloski", setting.gpauloski), ("lzhangbv", setting.lzhangbv)):
        for solver in ("eigen", "inverse") if checkout else ():
            if setting.has_time(f"{name} {solver}", 5.0):
                _peer(setting, name, str(checkout), solver)


def _plain(setting: Setting, half: torch.dtype | None) -> None:
    """Plain training: its seconds, launches and memory."""
    base = _memory_base(setting)
    steps = Steps(setting, _subject(setting), None, half=half)
    arm = _plain_name(half)
    steps.step()
    _record_memory(setting, arm, base)
    setting.findings.row("steps", arm=arm, kind="plain", **spread(setting.seconds_of(steps.step)))
    if setting.on_gpu:
        _record_activity(setting, arm, "plain", steps)


def _kfac(setting: Setting, name: str, config: Mapping[str, Any], half: torch.dtype | None) -> None:
    base = _memory_base(setting)
    steps = Steps(setting, _subject(setting), config, half=half)
    steps.step("full")
    steps.step("full")
    _record_memory(setting, name, base)
    seconds = {}
    for kind in KINDS:
        found = setting.seconds_of(partial(steps.step, kind), least=2, seconds=5.0)
        seconds[kind] = median(found)
        setting.findings.row("steps", arm=name, kind=kind, **spread(found))
        _phases(setting, name, kind, steps)
        if setting.on_gpu:
            _record_activity(setting, name, kind, steps)
    _amortised(setting, name, half, seconds)
    kfac = steps.kfac
    assert kfac is not None  # noqa: S101  `Steps` was given settings for it
    for what, size in kfac.memory().items():
        setting.findings.row("kfac_memory", arm=name, kind=what, bytes=size)
    failures = "; ".join(f"{each.layer} {each.kind}: {each.reason}" for each in kfac.failures)
    setting.findings.check(
        f"{name}: every factor is decomposed", failures or "no failure", passed=not failures
    )
    steps.close()


def _peer(setting: Setting, name: str, checkout: str, solver: str) -> None:
    """Another package's steps, of the same kinds and settings."""
    base = _memory_base(setting)
    arm = f"{name} {solver}"
    try:
        chosen = _subject(setting)
        skip = chosen.kfac.get("skip", ())
        steps = Steps(
            setting, chosen, None, make=lambda model: peers.make(name, checkout, solver, model, skip)
        )
        steps.step("full")
        _record_memory(setting, arm, base)
        seconds = {}
        for kind in KINDS:
            found = setting.seconds_of(partial(steps.step, kind), least=2, seconds=5.0)
            seconds[kind] = median(found)
            setting.findings.row("steps", arm=arm, kind=kind, **spread(found))
            if setting.on_gpu:
                _record_activity(setting, arm, kind, steps)
        _amortised(setting, arm, None, seconds)
    except Exception as error:
        setting.findings.note(f"{arm} cannot run: {type(error).__name__}: {error}")


def _subject(setting: Setting) -> Subject:
    return subject(setting.part, setting.device, small=setting.small)


def _phases(setting: Setting, arm: str, kind: str, steps: Steps) -> None:
    """Seconds by phase: the median of each over windows of one step."""
    windows = [steps.timed(kind) for _ in range(1 if kind == "full" or setting.small else 5)]
    names = {name for window in windows for name in window.seconds}
    for name in sorted(names):
        seconds = median(window.seconds.get(name, 0.0) for window in windows)
        setting.findings.row(
            "phases", arm=arm, kind=kind, phase=name, of_kfac=name in {str(p) for p in KFAC_PHASES},
            seconds=seconds,
        )  # fmt: skip


def _amortised(setting: Setting, arm: str, half: torch.dtype | None, seconds: Mapping[str, float]) -> None:
    """A step at two pairs of intervals, over plain training measured just now."""
    plain = Steps(setting, _subject(setting), None, half=half)
    base = median(setting.seconds_of(plain.step))
    for factors, inverses in ((1, 1), (1, 10), (FACTOR_STEPS, INVERSE_STEPS)):
        updates = inverses // factors
        period = seconds["full"] + (updates - 1) * seconds["factor"] + (inverses - updates) * seconds["plain"]
        setting.findings.row(
            "of_plain", arm=arm, factor_update_steps=factors, inverse_update_steps=inverses,
            plain_seconds=base, step_seconds=period / inverses, ratio=period / inverses / base,
        )  # fmt: skip


def _record_activity(setting: Setting, arm: str, kind: str, steps: Steps) -> None:
    found = steps.activity(kind)
    setting.findings.row(
        "activity", arm=arm, kind=kind, launches=found.launches, copies=found.copies,
        kernel_seconds=found.kernel_seconds, waits=sum(found.waits.values()), waits_torch_knows=found.warned,
        where="; ".join(f"{place} x{count}" for place, count in sorted(found.waits.items())),
    )  # fmt: skip
    if steps.kfac is None:
        return
    waits, allowed = max(sum(found.waits.values()), found.warned), int(kind == "full")
    if kind == "full" and steps.kfac.config.solver == "eigen":
        waits = found.warned  # not those inside cuSOLVER, which are in the table
    setting.findings.check(
        f"{arm}: waits of a {kind} step", f"{waits}, allowed {allowed}", passed=waits <= allowed
    )
    if kind == "plain":
        rows = setting.findings.content["tables"]["activity"]
        (alone,) = (row for row in rows if row["arm"] == _plain_name(steps.half))
        own, most = found.launches - alone["launches"], _PLAIN_LAUNCHES
        setting.findings.check(
            f"{arm}: launches of K-FAC in a plain step", f"{own}, allowed {most}", passed=own <= most
        )


def _plain_name(half: torch.dtype | None) -> str:
    return "plain" if half is None else "plain, bfloat16 autocast"


def _memory_base(setting: Setting) -> int:
    """Allocated bytes before a replica is made, with what earlier ones held given back."""
    gc.collect()
    if not setting.on_gpu:
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _record_memory(setting: Setting, arm: str, base: int) -> None:
    if setting.on_gpu:
        setting.findings.row(
            "memory", arm=arm, allocated_bytes=torch.cuda.memory_allocated() - base,
            peak_bytes=torch.cuda.max_memory_allocated() - base,
            reserved_bytes=torch.cuda.max_memory_reserved(),
        )  # fmt: skip


def _tf32(setting: Setting) -> object:
    conv = getattr(torch.backends.cudnn, "conv", None)
    return getattr(conv, "fp32_precision", None) or torch.backends.cudnn.allow_tf32


def _tf32_matmul() -> object:
    settings = torch.backends.cuda.matmul
    return getattr(settings, "fp32_precision", None) or settings.allow_tf32
