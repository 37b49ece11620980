"""One rank of `harness.bench core`: `python -m harness.bench.core_rank OPTIONS.json --rank R`."""

from __future__ import annotations

import resource
import time
from typing import Any

from harness.bench.core import CoreBench
from harness.bench.rank import Rank
from harness.bench.replica import KINDS, MODELS, Preconditioned, Training
from kfac_core import KFACConfig

Times = list[dict[str, float]]


def measure(options: CoreBench, rank: int) -> dict[str, Any]:
    """All figures of this rank.

    Returns:
        `sgd`: seconds of each plain forward and backward pass; `kinds`: by kind of step, seconds by phase of
        each repetition; `calls`: collectives by phase of a full step; `memory`: bytes, with `peak_extra`, the
        growth of the largest resident set under K-FAC.
    """
    model = MODELS[options.model]
    plain = Training(model, options.batch, rank, options.ranks)
    training = Training(model, options.batch, rank, options.ranks)
    for _ in range(options.warmup):
        _plain_seconds(plain)
        _plain_seconds(training)  # both replicas have allocated all that plain training needs
    before = _peak_bytes()
    preconditioned = Preconditioned(training, KFACConfig(**options.kfac))
    for _ in range(options.warmup):
        for kind in KINDS:
            preconditioned.step(kind)
    sgd: list[float] = []
    kinds: dict[str, Times] = {kind: [] for kind in KINDS}
    for _ in range(options.repeats):
        sgd.append(_plain_seconds(plain))
        for kind, times in kinds.items():
            times.append(preconditioned.step(kind))
        sgd.append(_plain_seconds(plain))
    peak = _peak_bytes()
    return {
        "rank": rank,
        "sgd": sgd,
        "kinds": kinds,
        "calls": preconditioned.calls,
        "memory": {**preconditioned.kfac.memory(), "peak_extra": peak - before},
    }


def _plain_seconds(training: Training) -> float:
    training.synchronize()
    began = time.perf_counter()
    training.loss().backward()
    return time.perf_counter() - began


def _peak_bytes() -> int:
    """Largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    joined = Rank.join(__doc__)
    joined.finish(measure(CoreBench(**joined.options), joined.number))
