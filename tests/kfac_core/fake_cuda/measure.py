"""Counts what K-FAC's steps would do on a GPU: `python -m tests.kfac_core.fake_cuda.measure < cases.json`.

K-FAC's launches are those of a training step with it minus those without it. Needs g++, or a CUDA build.
"""

from __future__ import annotations

from tests.kfac_core.fake_cuda.device import Watch, pretend_cuda  # isort: skip  first: before torch

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kfac_core import KFAC, KFACConfig, Phase
from kfac_core import packing as packing_tables
from kfac_core.collectives import connect
from kfac_core.timing import PhaseTimer
from tests.kfac_core.nets import ConvNet, Transformer, resnet50
from tests.kfac_core.worlds import fake_world

STEPS = ("all", "plain", "factors", "plain again", "refined")  # with F = 2 and E = 4
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
    """The counts of steps with all updates, with none, with a factor update, and with a refined basis."""
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
    """Launches, products and a copy of all counters of each step."""
    made = packing_tables._make_table
    packing_tables._make_table = cache(
        made
    )  # a process makes each table once, but keeps none of fake tensors
    try:
        return _counted(case, with_kfac=with_kfac)
    finally:
        packing_tables._make_table = made


def _counted(case: Case, *, with_kfac: bool) -> list[tuple[int, int, dict[str, Any]]]:
    with fake_world(case.world_size, case.rank), FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("cuda"):
            model, inputs = _made(case)
        watch = Watch()
        timer = PhaseTimer(observer=watch.enter)
        scaler = _scaler() if case.scaler else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        kfac = None
        if with_kfac:
            config = KFACConfig.sc20(factor_update_steps=2, inverse_update_steps=4, **case.config)
            with watch:  # ranks compare their configs: the watch answers what the host reads
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
    models = {"resnet50": resnet50, "conv": ConvNet, "transformer": Transformer}
    model = models[case.model]()
    if case.model == "transformer":
        return model, torch.zeros(case.batch, 16, dtype=torch.long)
    side = {"resnet50": 224, "conv": 64}[case.model]
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


def main() -> None:
    """Read a JSON list of cases from standard input and print their counts as JSON."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    pretend_cuda()
    cases = json.load(sys.stdin)
    json.dump([[asdict(step) for step in measure(Case(**case))] for case in cases], sys.stdout)


if __name__ == "__main__":
    main()
