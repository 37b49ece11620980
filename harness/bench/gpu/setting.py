"""The process of one part: `python -m harness.bench.gpu.setting PART OPTIONS`, started by `acceptance`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from harness.bench.gpu.findings import Findings
from harness.bench.gpu.parts import PARTS


@dataclass
class Setting:
    """What a part gets.

    Attributes:
        part: its name; one module may run several.
        device: where it runs.
        ends: `time.monotonic()` at which it should have ended.
        findings: where it puts what it finds.
        small: sizes of a rehearsal.
        data, gpauloski, lzhangbv: see `acceptance.Acceptance`.
        complete: False once work was left out for lack of time.
    """

    part: str
    device: torch.device
    ends: float
    findings: Findings
    small: bool = False
    data: str | None = None
    gpauloski: str | None = None
    lzhangbv: str | None = None
    complete: bool = field(default=True, init=False)

    @property
    def on_gpu(self) -> bool:
        """Whether there are the counts that only a GPU has."""
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        """Of this part's time."""
        return self.ends - time.monotonic()

    def has_time(self, left_out: str, seconds: float = 0.0) -> bool:
        """Whether so many seconds are left; if not, the report says what was left out."""
        if self.seconds_left > seconds:
            return True
        self.complete = False
        self.findings.note(f"left out for lack of time: {left_out}")
        return False

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds_of(
        self,
        work: Callable[[], object],
        *,
        least: int = 3,
        most: int = 20,
        seconds: float = 2.0,
        warm: bool = True,
    ) -> list[float]:
        """Seconds of each run of `work`; at least `least` runs, at most `most`, and new ones for `seconds`.

        Each run begins when the device is idle and ends when it is again. With `warm` one is not counted.
        """
        if warm:
            work()
        found: list[float] = []
        until = time.monotonic() + (seconds / 10 if self.small else seconds)
        least, most = (1, 1) if self.small else (least, most)
        while len(found) < least or (len(found) < most and time.monotonic() < until):
            self.synchronize()
            began = time.perf_counter()
            work()
            self.synchronize()
            found.append(time.perf_counter() - began)
        return found


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, least and most, with their number."""
    return {
        "seconds": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "runs": len(seconds),
    }


def without_tf32() -> None:
    """Convolutions and products in float32 are exact from now on; cuDNN rounds to TF32 by default."""
    conv: Any = getattr(torch.backends.cudnn, "conv", None)
    if hasattr(conv, "fp32_precision"):  # torch 2.9; older and newer names must not be mixed
        conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def main() -> None:
    """Run the part that the command line names."""
    name, options = sys.argv[1], json.loads(sys.argv[2])
    device = torch.device(options["device"], 0) if options["device"] == "cuda" else torch.device("cpu")
    findings = Findings(Path(options["folder"]) / f"{name}.json", options["about"])
    others: dict[str, Any] = {key: options[key] for key in ("data", "gpauloski", "lzhangbv")}
    ends = time.monotonic() + options["seconds"]
    setting = Setting(name, device, ends, findings, small=device.type == "cpu", **others)
    torch.manual_seed(0)
    import_module(f"harness.bench.gpu.parts.{PARTS[name].module}").run(setting)
    findings.finish(complete=setting.complete)


if __name__ == "__main__":
    main()
