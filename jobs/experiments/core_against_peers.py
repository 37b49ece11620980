"""Our core and two public K-FAC packages in one process: an iteration and its phases beside plain SGD.

    python jobs/experiments/core_against_peers.py results/peers/speed.csv \
        --gpauloski <checkout of gpauloski/kfac-pytorch> --lzhangbv <checkout of lzhangbv/kfac_pytorch>

Every repetition runs plain forward + backward of a replica without hooks, then of each implementation one
iteration with all work, one that renews factors only, and one that only preconditions, all from a barrier on.
Figures are medians over repetitions of the slowest rank, over plain SGD's of the same run. The peers are
plain checkouts, timed by wrapping their own methods; nothing of theirs is installed or copied.

`memory` rows are from processes of their own: growth of the largest resident set over two full iterations
after two of plain training.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import logging
import resource
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from harness.bench.core import INTERVALS, amortised
from harness.bench.subject import FACTOR_STEPS, INVERSE_STEPS, KINDS, MODELS, Preconditioned, Training
from kfac_core import KFACConfig

DAMPING, LR, KL_CLIP = 0.003, 0.1, 0.001
PHASES = ("factor", "factor_comm", "inverse", "inverse_comm", "precondition", "precondition_comm", "scale")
OURS = {
    "factor_compute": "factor", "factor_comm": "factor_comm", "inverse_compute": "inverse",
    "inverse_comm": "inverse_comm", "precondition": "precondition",
    "precondition_comm": "precondition_comm", "scale": "scale",
}  # fmt: skip
FIELDS = ("model", "ranks", "implementation", "variant", "quantity", "value", "low", "high", "repeats")
Arms = list[tuple[str, str]]
CONFIGURATIONS: Mapping[str, tuple[str, int, Arms]] = {
    "eigen": (
        "resnet32", 1, [("ours", "comm_opt eigen"), ("gpauloski", "comm eigen"), ("lzhangbv", "eigen")],
    ),
    "inverse": (
        "resnet32", 1,
        [("ours", "comm_opt inverse"), ("gpauloski", "comm inverse"), ("lzhangbv", "inverse")],
    ),
    "comm": ("resnet32", 2, [("ours", "comm_opt eigen"), ("gpauloski", "comm eigen"), ("lzhangbv", "eigen")]),
    "mem": ("resnet32", 2, [("ours", "mem_opt eigen"), ("gpauloski", "mem eigen")]),
    "dp": ("resnet32", 2, [("ours", "dp_kfac eigen"), ("lzhangbv", "eigen_dp")]),
    "large-inverse": (
        "resnet50", 1,
        [("ours", "comm_opt inverse"), ("gpauloski", "comm inverse"), ("lzhangbv", "inverse")],
    ),
    "large-dp": ("resnet50", 2, [("ours", "dp_kfac inverse"), ("lzhangbv", "inverse_dp")]),
    "large-mem": ("resnet50", 2, [("ours", "mem_opt inverse"), ("gpauloski", "mem inverse")]),
    "large-eigen": ("resnet50", 1, [("ours", "comm_opt eigen"), ("gpauloski", "comm eigen")]),
}  # fmt: skip
Step = Callable[[str], dict[str, float]]
Row = dict[str, Any]


class Clock:
    """Exclusive seconds by phase of the methods that it wraps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    @contextmanager
    def _open(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - began
            self.seconds[phase] += whole - self._inner.pop()
            if self._inner:
                self._inner[-1] += whole

    def wrap(self, owner: type, phase: str, *names: str) -> None:
        """Book calls of these methods on `phase`, where `owner` itself defines them."""
        for name in names:
            if name in owner.__dict__ and name not in getattr(owner, "_wrapped", ()):
                setattr(owner, name, self.timed(phase, owner.__dict__[name]))

    def wrap_future(self, owner: type, phase: str, *names: str) -> None:
        """Book what these properties wait for."""
        for name in names:
            found = owner.__dict__[name]
            setattr(owner, name, property(self.timed(phase, found.fget), found.fset))

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with its calls booked on `phase`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._open(phase):
                return function(*args, **kwargs)

        return timed


def make_ours(training: Training, variant: str, _: Path) -> Step:
    strategy, solver = variant.split()
    config = KFACConfig(strategy=strategy, solver=solver, damping=DAMPING, kl_clip=KL_CLIP)
    subject = Preconditioned(training, config)

    def step(kind: str) -> dict[str, float]:
        seconds = subject.step(kind)
        return {"total": seconds["total"], **{OURS[p]: s for p, s in seconds.items() if p in OURS}}

    return step


def make_gpauloski(training: Training, variant: str, checkout: Path) -> Step:
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name == "kfac-pytorch" else version(name)
    with alone(checkout):
        import kfac  # noqa: PLC0415  the peer's, whose place on disk is known only now
        import kfac.preconditioner  # noqa: PLC0415
    clock, (strategy, method) = Clock(), variant.split()
    base, eigen, inverse = (
        kfac.layers.base.KFACBaseLayer, kfac.layers.eigen.KFACEigenLayer, kfac.layers.inverse.KFACInverseLayer
    )  # fmt: skip
    clock.wrap(
        base, "factor", "save_layer_input", "save_layer_grad_output", "update_a_factor", "update_g_factor"
    )
    clock.wrap(base, "factor_comm", "reduce_a_factor", "reduce_g_factor")
    clock.wrap(kfac.distributed.TorchDistributedCommunicator, "factor_comm", "flush_allreduce_buckets")
    clock.wrap_future(base, "factor_comm", "a_factor", "g_factor")
    clock.wrap_future(base, "precondition_comm", "grad")
    clock.wrap(base, "precondition_comm", "broadcast_grad")
    clock.wrap(base, "scale", "update_grad")
    for kind, held in ((eigen, ("qa", "qg", "da", "dg", "dgda")), (inverse, ("a_inv", "g_inv"))):
        clock.wrap_future(kind, "inverse_comm", *held)
        clock.wrap(kind, "inverse", "compute_a_inv", "compute_g_inv")
        clock.wrap(kind, "inverse_comm", "broadcast_a_inv", "broadcast_g_inv")
        clock.wrap(kind, "precondition", "preconditioned_grad")
    clock.wrap(kfac.base_preconditioner.BaseKFACPreconditioner, "scale", "_compute_grad_scale")
    enums = kfac.enums
    theirs = kfac.preconditioner.KFACPreconditioner(
        training.model, factor_update_steps=FACTOR_STEPS, inv_update_steps=INVERSE_STEPS, damping=DAMPING,
        factor_decay=0.95, kl_clip=KL_CLIP, lr=LR,
        grad_worker_fraction={
            "comm": enums.DistributedStrategy.COMM_OPT, "mem": enums.DistributedStrategy.MEM_OPT
        }[strategy],
        compute_method={"eigen": enums.ComputeMethod.EIGEN, "inverse": enums.ComputeMethod.INVERSE}[method],
    )  # fmt: skip

    def prepare(kind: str) -> None:
        theirs._steps = KINDS[kind]

    return stepper(training, theirs, prepare, clock)


def make_lzhangbv(training: Training, variant: str, checkout: Path) -> Step:
    horovod, horovod_torch = types.ModuleType("horovod"), types.ModuleType("horovod.torch")
    horovod_torch.synchronize = lambda _: None  # type: ignore[attr-defined]
    horovod.torch = horovod_torch  # type: ignore[attr-defined]
    sys.modules.update({"horovod": horovod, "horovod.torch": horovod_torch})
    with alone(checkout):
        import kfac  # noqa: PLC0415  the peer's, whose place on disk is known only now
        import kfac.backend  # noqa: PLC0415
        import kfac.kfac_preconditioner_inv as computing  # noqa: PLC0415
    kfac.backend.init("Torch")
    clock, kind = Clock(), kfac.get_kfac_module(variant)
    for owner in kind.__mro__:
        clock.wrap(owner, "factor", "_compute_factors", "_forward_hook_event", "_backward_hook_event")
        clock.wrap(owner, "factor_comm", "_communicate_factors")
        clock.wrap(owner, "inverse", "_compute_inverse")
        clock.wrap(owner, "inverse_comm", "_communicate_inverse")
        clock.wrap(owner, "precondition", "_compute_pred")
        clock.wrap(owner, "precondition_comm", "_communicate_pred")
        clock.wrap(owner, "scale", "_update_grad_in_place")
    for name in ("ComputeA", "ComputeG"):
        compute = getattr(computing, name)()
        setattr(computing, name, partial(_given, clock.timed("factor", compute)))
    theirs = kind(
        training.model, lr=LR, damping=DAMPING, fac_update_freq=FACTOR_STEPS, kfac_update_freq=INVERSE_STEPS,
        kl_clip=KL_CLIP, factor_decay=0.05,
    )  # fmt: skip
    first = [True]

    def prepare(kind: str) -> None:
        theirs.steps = 0 if first[0] else {**KINDS, "full": INVERSE_STEPS}[kind]  # step 0 makes their buffers
        first[0] = False

    return stepper(training, theirs, prepare, clock)


def _given(value: Any) -> Any:
    return value


MAKERS = {"ours": make_ours, "gpauloski": make_gpauloski, "lzhangbv": make_lzhangbv}


@contextmanager
def alone(checkout: Path) -> Iterator[None]:
    """Import from `checkout`, and leave no module called `kfac` behind: both peers' packages are."""
    sys.path.insert(0, str(checkout))
    try:
        yield
    finally:
        sys.path.remove(str(checkout))
        for name in [name for name in sys.modules if name.split(".")[0] == "kfac"]:
            del sys.modules[name]


def stepper(training: Training, theirs: Any, prepare: Callable[[str], None], clock: Clock) -> Step:
    """Times an iteration as `Preconditioned.step` does."""

    def step(kind: str) -> dict[str, float]:
        prepare(kind)
        training.meet()
        clock.seconds.clear()
        began = time.perf_counter()
        training.loss().backward()
        theirs.step()
        return {"total": time.perf_counter() - began, **clock.seconds}

    return step


def plain_seconds(training: Training) -> float:
    training.meet()
    began = time.perf_counter()
    training.loss().backward()
    return time.perf_counter() - began


def compare(rank: int, ranks: int, model: str, arms: list[tuple[str, str]], checkouts: dict[str, Path],
            folder: str, repeats: int) -> None:  # fmt: skip
    """One rank: every arm beside plain SGD; rank 0 leaves the figures of all."""
    enter(rank, ranks, folder)
    spec = MODELS[model]
    plain = Training(spec, spec.batch, rank, ranks)
    steps = [
        MAKERS[name](Training(spec, spec.batch, rank, ranks), variant, checkouts.get(name, Path()))
        for name, variant in arms
    ]
    plain_seconds(plain)
    for step in steps:
        for kind in KINDS:
            step(kind)
    sgd, found = [], [{kind: [] for kind in KINDS} for _ in arms]
    for _ in range(repeats):
        sgd.append(plain_seconds(plain))
        for step, times in zip(steps, found, strict=True):
            for kind in KINDS:
                times[kind].append(step(kind))
        sgd.append(plain_seconds(plain))
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, (sgd, found))
    if rank == 0:
        torch.save(gathered, f"{folder}/figures")
    dist.barrier()
    dist.destroy_process_group()


def grow(
    rank: int, ranks: int, model: str, arm: tuple[str, str], checkouts: dict[str, Path], folder: str
) -> None:
    """Growth of the largest resident set, MiB, over two full iterations: all that K-FAC keeps and needs."""
    enter(rank, ranks, folder)
    spec = MODELS[model]
    training = Training(spec, spec.batch, rank, ranks)
    for _ in range(2):
        plain_seconds(training)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = MAKERS[arm[0]](training, arm[1], checkouts.get(arm[0], Path()))
    for _ in range(2):
        step("full")
    if rank == 0:
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        torch.save(grown, f"{folder}/figures")
    dist.barrier()
    dist.destroy_process_group()


def enter(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def spawned(function: Callable[..., None], ranks: int, *arguments: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        args = (*arguments[:-1], folder, arguments[-1]) if function is compare else (*arguments, folder)
        mp.spawn(function, (ranks, *args), nprocs=ranks)
        return torch.load(f"{folder}/figures", weights_only=False)  # written by our own rank 0 just now


def rows_of(
    model: str, ranks: int, arms: list[tuple[str, str]], gathered: list[Any], repeats: int
) -> list[Row]:
    sgd = statistics.median(max(times) for times in zip(*(own[0] for own in gathered), strict=True))
    place = {"model": model, "ranks": ranks, "repeats": repeats}
    rows = [{**place, "implementation": "sgd", "variant": "", "quantity": "milliseconds", "value": 1e3 * sgd}]
    for index, (name, variant) in enumerate(arms):
        by_rank = [own[1][index] for own in gathered]

        def times(kind: str, phase: str, by_rank: list[Any] = by_rank) -> list[float]:
            per_rank = [[step.get(phase, 0.0) for step in own[kind]] for own in by_rank]
            return [max(steps) / sgd for steps in zip(*per_rank, strict=True)]

        arm = {**place, "implementation": name, "variant": variant}
        totals = {kind: statistics.median(times(kind, "total")) for kind in KINDS}
        for f, e in INTERVALS:
            rows.append({**arm, "quantity": f"iteration {f}/{e}", "value": amortised(totals, f, e)})
        rows.append(spread(arm, "iteration without updates", times("plain", "total")))
        rows += [spread(arm, f"{phase} phase", times("full", phase)) for phase in PHASES]
    return rows


def spread(arm: Row, quantity: str, values: list[float]) -> Row:
    low, _, high = statistics.quantiles(values, n=4)
    return {**arm, "quantity": quantity, "value": statistics.median(values), "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpauloski", type=Path)
    parser.add_argument("--lzhangbv", type=Path)
    parser.add_argument("--only", nargs="*", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    checkouts = {name: getattr(given, name) for name in ("gpauloski", "lzhangbv") if getattr(given, name)}
    for group in given.only:
        model, ranks, wanted = CONFIGURATIONS[group]
        arms = [arm for arm in wanted if arm[0] == "ours" or arm[0] in checkouts]
        repeats = given.repeats if model == "resnet32" else max(2, given.repeats // 2)
        rows = rows_of(model, ranks, arms, spawned(compare, ranks, model, arms, checkouts, repeats), repeats)
        for name, variant in arms if ranks == 1 else ():
            rows.append({
                "model": model, "ranks": ranks, "implementation": name, "variant": variant, "repeats": 1,
                "quantity": "memory, MiB", "value": spawned(grow, ranks, model, (name, variant), checkouts),
            })  # fmt: skip
        for row in rows:
            print(*(row.get(field, "") for field in FIELDS[:6]), flush=True)
        replace(given.out, group, rows)


def replace(table: Path, group: str, rows: list[Row]) -> None:
    """Put one configuration's rows into the table, in the place of those from an earlier run."""
    kept: list[Row] = []
    if table.exists():
        with table.open() as file:
            kept = [row for row in csv.DictReader(file) if row["group"] != group]
    table.parent.mkdir(parents=True, exist_ok=True)
    order = list(CONFIGURATIONS)
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, ("group", *FIELDS), lineterminator="\n")
        writer.writeheader()
        for row in sorted(
            (*kept, *({"group": group, **row} for row in rows)), key=lambda r: order.index(r["group"])
        ):
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    main()
