"""Counts what K-FAC's steps would do on a GPU: `python -m tests.kfac_core.fake_cuda.measure --help`.

K-FAC's launches are those of a training step with it minus those without it. Needs g++, or a CUDA build.
"""

from __future__ import annotations

from tests.kfac_core.fake_cuda.device import Watch, pretend_cuda  # isort: skip  first: before torch

import argparse
import csv
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.bench.gpu.nets import ConvNet, Transformer
from harness.workloads.models.vision import resnet32, resnet50
from kfac_core import KFAC, KFACConfig, Phase
from kfac_core import packing as packing_tables
from kfac_core.collectives import connect
from kfac_core.timing import PhaseTimer

STEPS = ("all", "plain", "factors")  # with F = 2 and E = 4
_MODEL_PHASES = ("forward", "backward", "update")


@dataclass
class Case:
    """One configuration of a model, a world and K-FAC."""

    model: str
    batch: int
    config: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    rank: int = 0
    channels_last: bool = False
    scaler: bool = False
    autocast: str = ""
    tf32: bool = False


@dataclass
class Counts:
    """What one step does beyond plain training.

    Attributes:
        launches, gemms: of K-FAC.
        waits: of the whole step, by reason and place.
        transient_mb: largest rise of the allocated memory within a phase of K-FAC, in 10^6 bytes.
        tf32: products of K-FAC on TF32 units, if they are allowed.
        by_phase: launches of the whole step.
    """

    step: str
    launches: int
    gemms: int
    waits: dict[str, int]
    transient_mb: float
    tf32: int
    by_phase: dict[str, int]


def measure(case: Case) -> list[Counts]:
    """The counts of a step with all updates, a plain one, and one with a factor update."""
    plain, plain_gemms = _train(case, with_kfac=False)[1][:2]
    found = []
    for name, (launches, gemms, watch) in zip(STEPS, _train(case, with_kfac=True), strict=True):
        by_phase: Counter[str] = Counter()
        for (phase, _), count in watch["launches"].items():
            by_phase[phase] += count
        transient = [size for phase, size in watch["transient"].items() if phase not in _MODEL_PHASES]
        tf32 = sum(count for phase, count in watch["tf32"].items() if phase not in _MODEL_PHASES)
        waits: Counter[str] = Counter()
        for (phase, reason, place), count in watch["waits"].items():
            waits[f"{phase}: {reason} at {place}"] += count
        found.append(
            Counts(
                step=name,
                launches=launches - plain,
                gemms=gemms - plain_gemms,
                waits=dict(waits),
                transient_mb=max(transient, default=0) / 1e6,
                tf32=tf32,
                by_phase=dict(by_phase),
            )
        )
    return found


def _train(case: Case, *, with_kfac: bool) -> list[tuple[int, int, dict[str, Any]]]:
    """Launches, products and a copy of all counters of three training steps."""
    made = packing_tables._make_table
    packing_tables._make_table = cache(
        made
    )  # a process makes each table once, but keeps none of fake tensors
    try:
        return _counted(case, with_kfac=with_kfac)
    finally:
        packing_tables._make_table = made


def _counted(case: Case, *, with_kfac: bool) -> list[tuple[int, int, dict[str, Any]]]:
    with _fake_world(case), FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("cuda"):
            model, inputs = _made(case)
        watch = Watch()
        timer = PhaseTimer(observer=watch.enter)
        scaler = _scaler() if case.scaler else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        kfac = None
        if with_kfac:
            config = KFACConfig(factor_update_steps=2, inverse_update_steps=4, **case.config)
            kfac = KFAC(model, config, lr=0.1, timer=timer, grad_scaler=scaler, communicator=connect())
        found = []
        for _ in STEPS:
            watch.clear()
            with watch, _tf32(case.tf32):
                timer.start()
                with timer.phase(Phase.FORWARD), _autocast(case):
                    loss = model(inputs).float().sum()
                with timer.phase(Phase.BACKWARD):
                    (scaler.scale(loss) if scaler else loss).backward()
                if scaler:
                    with timer.phase(Phase.UPDATE):
                        scaler.unscale_(optimizer)
                if kfac is not None:
                    kfac.step()
                timer.stop()
            if scaler:
                scaler._per_optimizer_states.clear()
            found.append((
                sum(watch.launches.values()), sum(watch.gemms.values()),
                {"launches": Counter(watch.launches), "waits": Counter(watch.waits), "tf32":
                Counter(watch.tf32),
                 "transient": dict(watch.transient)},
            ))  # fmt: skip
            optimizer.zero_grad()
            del loss
        if kfac is not None:
            kfac.remove()
    return found


def _made(case: Case) -> tuple[nn.Module, Tensor]:
    models = {"resnet50": resnet50, "resnet32": resnet32, "conv": ConvNet, "transformer": Transformer}
    model = models[case.model]()
    if case.model == "transformer":
        return model, torch.zeros(case.batch, 16, dtype=torch.long)
    side = {"resnet50": 224, "resnet32": 32, "conv": 64}[case.model]
    inputs = torch.randn(case.batch, 3, side, side)
    if case.channels_last:
        for module in model.modules():  # not Module.to(), which cannot swap fake tensors
            if isinstance(module, nn.Conv2d):
                weight = module.weight.detach().contiguous(memory_format=torch.channels_last)
                module.weight = nn.Parameter(weight)
        return model, inputs.contiguous(memory_format=torch.channels_last)
    return model, inputs


def _scaler() -> torch.amp.GradScaler:
    available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        return torch.amp.GradScaler("cuda")
    finally:
        torch.cuda.is_available = available


def _autocast(case: Case) -> Any:
    return torch.autocast("cuda", getattr(torch, case.autocast)) if case.autocast else nullcontext()


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def _fake_world(case: Case) -> Iterator[None]:
    if case.world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


NETWORKS = [
    Case("resnet50", 32),
    Case("resnet50", 32, channels_last=True),
    Case("resnet50", 32, {"solver": "inverse"}),
    Case("resnet50", 32, world_size=8, rank=3),
    Case("resnet50", 32, scaler=True, autocast="float16"),
    Case("resnet32", 128),
]
"""The cases of `results/core/gpu_counts.csv`."""

_COLUMNS = (
    "when", "model", "batch", "layout", "solver", "ranks", "scaler", "step", "launches", "gemms", "waits",
    "transient_mb",
)  # fmt: skip


def rows(when: str, case: Case) -> list[dict[str, Any]]:
    """One row of the table for each kind of step."""
    about = {
        "when": when, "model": case.model, "batch": case.batch,
        "layout": "nhwc" if case.channels_last else "nchw",
        "solver": case.config.get("solver", "eigen"), "ranks": case.world_size, "scaler": int(case.scaler),
    }  # fmt: skip
    return [
        {**about, "step": each.step, "launches": each.launches, "gemms": each.gemms,
         "waits": sum(each.waits.values()), "transient_mb": round(each.transient_mb, 1)}
        for each in measure(case)
    ]  # fmt: skip


def main() -> None:
    """Print the counts of cases as JSON, or add a table of the networks to a CSV file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--csv", type=Path, help="append the networks' counts to this file")
    parser.add_argument("--when", default="now", help="first column of the table")
    parser.add_argument("--cases", help="JSON list of cases; by default read from standard input")
    arguments = parser.parse_args()
    pretend_cuda()
    if arguments.csv is None:
        cases = json.loads(arguments.cases or sys.stdin.read())
        json.dump([[asdict(step) for step in measure(Case(**case))] for case in cases], sys.stdout)
        return
    new = not arguments.csv.exists()
    with arguments.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for case in NETWORKS:
            writer.writerows(rows(arguments.when, case))
            file.flush()


if __name__ == "__main__":
    main()
