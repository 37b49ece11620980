"""Our core and two public K-FAC packages in one process: an iteration and its phases beside plain SGD.

    python jobs/experiments/core_against_peers.py results/peers/speed.csv \
        --gpauloski <checkout of gpauloski/kfac-pytorch> --lzhangbv <checkout of lzhangbv/kfac_pytorch>

Every repetition runs plain forward + backward of a replica without hooks, then of each implementation one
iteration with all work, one that only updates factors, and one that only preconditions, each after a barrier.
Figures are medians over repetitions of the slowest rank, over plain SGD's of the same run. The peers are
plain checkouts, timed by wrapping their own methods; nothing of theirs is installed or copied.

`exchanges in it`: time that the rank with the longest wait spends sending and waiting, over all exchanges.
`eigh inside the inverse phase`: LAPACK's part of it, timed around `torch.linalg.eigh`, which all call.
`the same factors solved, ms`: the inverse phase alone; each implementation gets copies of our factors.
`... exchange alone`: one exchange after a barrier, packing included (also the part in our hooks), so that no
rank waits for another's work.
Arms named `measured` assign layers to ranks by this machine's costs of inverses (`KFACConfig.costs`), our
other arms by n^3, and dp_kfac round robin, as published, unless it is named `balanced`.
`memory` rows come from separate processes: growth of the largest resident set over two full iterations after
two of plain training.
"""

from __future__ import annotations

import argparse
import csv
import logging
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peer_arms import MAKERS, Arm, Clock

from harness.bench.core import INTERVALS, amortised
from harness.bench.replica import KINDS, MODELS, Training
from harness.training.malloc import keep_freed_memory

EXCHANGES = ("factor_comm", "inverse_comm", "precondition_comm")
PHASES = ("factor", "factor_comm", "inverse", "inverse_comm", "precondition", "precondition_comm", "scale")
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
    "comm": (
        "resnet32", 2,
        [
            ("ours", "comm_opt eigen"), ("ours", "comm_opt eigen overlap"),
            ("ours", "comm_opt eigen measured"), ("gpauloski", "comm eigen"), ("lzhangbv", "eigen"),
        ],
    ),
    "mem": (
        "resnet32", 2,
        [
            ("ours", "mem_opt eigen"), ("ours", "mem_opt eigen overlap"), ("ours", "mem_opt eigen measured"),
            ("gpauloski", "mem eigen"),
        ],
    ),
    "dp": (
        "resnet32", 2,
        [("ours", "dp_kfac eigen"), ("ours", "dp_kfac eigen balanced"), ("lzhangbv", "eigen_dp")],
    ),
    "large-inverse": (
        "resnet50", 1,
        [("ours", "comm_opt inverse"), ("gpauloski", "comm inverse"), ("lzhangbv", "inverse")],
    ),
    "large-dp": (
        "resnet50", 2,
        [("ours", "dp_kfac inverse"), ("ours", "dp_kfac inverse balanced"), ("lzhangbv", "inverse_dp")],
    ),
    "large-mem": (
        "resnet50", 2,
        [
            ("ours", "mem_opt inverse"), ("ours", "mem_opt inverse overlap"),
            ("ours", "mem_opt inverse measured"), ("gpauloski", "mem inverse"),
        ],
    ),
    "large-eigen": ("resnet50", 1, [("ours", "comm_opt eigen"), ("gpauloski", "comm eigen")]),
}  # fmt: skip
Row = dict[str, Any]


def plain_seconds(training: Training) -> float:
    training.synchronize()
    began = time.perf_counter()
    training.loss().backward()
    return time.perf_counter() - began


def compare(rank: int, ranks: int, model: str, arms: list[tuple[str, str]], checkouts: dict[str, Path],
            folder: str, repeats: int) -> None:  # fmt: skip
    """One rank: every arm beside plain SGD; rank 0 saves the figures of all."""
    enter(rank, ranks, folder)
    spec = MODELS[model]
    plain = Training(spec, spec.batch, rank, ranks)
    made = [
        MAKERS[name](Training(spec, spec.batch, rank, ranks), variant, checkouts.get(name, Path()))
        for name, variant in arms
    ]
    plain_seconds(plain)
    library = Clock()  # all call the same routine on factors of the same sizes; only the matrices differ
    torch.linalg.eigh = library.timed("eigh", torch.linalg.eigh)
    for arm in made:
        for kind in KINDS:
            arm.step(kind)
    sgd, found = [], [{kind: [] for kind in KINDS} for _ in arms]
    for _ in range(repeats):
        sgd.append(plain_seconds(plain))
        for arm, times in zip(made, found, strict=True):
            for kind in KINDS:
                library.seconds.clear()
                times[kind].append({**arm.step(kind), **library.seconds})
        sgd.append(plain_seconds(plain))
    if ranks > 1:
        by_name = [arm.exchanges() for arm in made]
        parts = [{f"{name} exchange alone, ms": f for name, f in one.items()} for one in by_name]
        alone = timed_alone(parts, 2 * repeats + 1)
    else:
        alone = timed_alone(solved_alike(made), repeats)
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, (sgd, found, alone))
    if rank == 0:
        torch.save(gathered, f"{folder}/figures")
    dist.barrier()
    dist.destroy_process_group()


def solved_alike(arms: list[Arm]) -> list[dict[str, Callable[[], None]]]:
    """The inverse phase of every arm on copies of the factors of the first arm, which is ours."""
    factors = arms[0].factors()
    return [
        {"the same factors solved, ms": arm.solving([(a.clone(), g.clone()) for a, g in factors])}
        for arm in arms
    ]


def timed_alone(arms: list[dict[str, Callable[[], None]]], repeats: int) -> list[dict[str, list[float]]]:
    """Seconds of each part alone, after a barrier, so that no rank waits for another's work."""
    times: list[dict[str, list[float]]] = [{name: [] for name in arm} for arm in arms]
    for repeat in range(repeats + 1):
        for arm, found in zip(arms, times, strict=True):
            for name, part in arm.items():
                dist.barrier()
                began = time.perf_counter()
                part()
                if repeat:  # the first is a warm-up
                    found[name].append(time.perf_counter() - began)
    return times


def grow(
    rank: int, ranks: int, model: str, arm: tuple[str, str], checkouts: dict[str, Path], folder: str
) -> None:
    """Growth of the largest resident set, MiB, over two full iterations: K-FAC's state and workspaces."""
    enter(rank, ranks, folder)
    spec = MODELS[model]
    training = Training(spec, spec.batch, rank, ranks)
    for _ in range(2):
        plain_seconds(training)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = MAKERS[arm[0]](training, arm[1], checkouts.get(arm[0], Path())).step
    for _ in range(2):
        step("full")
    if rank == 0:
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        torch.save(grown, f"{folder}/figures")
    dist.barrier()
    dist.destroy_process_group()


def enter(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
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

        def times(kind: str, *phases: str, by_rank: list[Any] = by_rank) -> list[float]:
            per_rank = [[sum(step.get(p, 0.0) for p in phases) for step in own[kind]] for own in by_rank]
            return [max(steps) / sgd for steps in zip(*per_rank, strict=True)]

        arm = {**place, "implementation": name, "variant": variant}
        totals = {kind: statistics.median(times(kind, "total")) for kind in KINDS}
        exchanged = {kind: statistics.median(times(kind, *EXCHANGES)) for kind in KINDS}
        for f, e in INTERVALS:
            rows.append({**arm, "quantity": f"iteration {f}/{e}", "value": amortised(totals, f, e)})
            rows.append({**arm, "quantity": f"exchanges in it, {f}/{e}", "value": amortised(exchanged, f, e)})
        rows.append(spread(arm, "iteration without updates", times("plain", "total")))
        rows += [spread(arm, f"{phase} phase", times("full", phase)) for phase in PHASES]
        alone = [own[2][index] for own in gathered]
        for part in alone[0]:
            slowest = [1e3 * max(seconds) for seconds in zip(*(own[part] for own in alone), strict=True)]
            rows.append(spread(arm, part, slowest))
        if any(times("full", "eigh")):
            rows.append(spread(arm, "eigh inside the inverse phase", times("full", "eigh")))
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
    """Write one configuration's rows into the table, instead of those of an earlier run."""
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
