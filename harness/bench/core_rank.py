"""One rank of `kronscale bench core`: `python -m harness.bench.core_rank OPTIONS.json --rank R`."""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.bench.rates import measure_rates
from harness.bench.replica import KINDS, MODELS, Preconditioned, Training
from harness.bench.roofline import layer_rooflines, rooflines
from harness.training.malloc import keep_freed_memory
from kfac_core import KFACConfig

Times = list[dict[str, float]]


@dataclass(frozen=True)
class Options:
    """What to measure; the same for every rank.

    Attributes:
        model: key of `harness.bench.replica.MODELS`.
        batch: examples of each rank.
        kfac: settings of `KFACConfig` beside the intervals.
        repeats: measured rounds; each has two plain iterations and one of every kind.
        warmup: rounds before them.
        store: file of the rendezvous.
    """

    model: str
    batch: int
    ranks: int
    threads: int
    kfac: dict[str, Any]
    repeats: int
    warmup: int
    store: str

    @classmethod
    def read(cls, path: Path) -> Options:
        """Read the file that `CoreBench` wrote."""
        raw = json.loads(path.read_text())
        return cls(**{field.name: raw[field.name] for field in fields(cls)})


def measure(options: Options, rank: int) -> dict[str, Any]:
    """All figures of this rank.

    Returns:
        `sgd`: seconds of each plain forward and backward pass; `kinds`: by kind of step, seconds by phase of
        each repetition; `calls`: collectives by phase of a full step; `memory`: bytes, with `peak_extra`, the
        growth of the largest resident set under K-FAC; `rates`; `floors`: rooflines of a full step's phases;
        `layers`: for each repetition, seconds by layer and phase; `layer_floors`; `shapes`: rows and
        columns of each layer's gradient.
    """
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    if options.ranks > 1:
        store = FileStore(options.store, options.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
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
    layers = [preconditioned.layers() for _ in range(options.repeats)]
    rates, calls = measure_rates(), training.calls()
    return {
        "rank": rank,
        "sgd": sgd,
        "kinds": kinds,
        "calls": preconditioned.calls,
        "memory": {**preconditioned.kfac.memory(), "peak_extra": peak - before},
        "rates": asdict(rates),
        "floors": rooflines(preconditioned.kfac, rank, calls, rates),
        "layers": layers,
        "layer_floors": layer_rooflines(preconditioned.kfac, calls, rates),
        "shapes": {shape.name: [shape.g.dim, shape.a.dim] for shape in preconditioned.kfac.shapes},
    }


def _plain_seconds(training: Training) -> float:
    training.synchronize()
    began = time.perf_counter()
    training.loss().backward()
    return time.perf_counter() - began


def _peak_bytes() -> int:
    """Largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure, and write the figures beside the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    given = parser.parse_args()
    figures = measure(Options.read(given.options), given.rank)
    (given.options.parent / f"rank-{given.rank}.json").write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
