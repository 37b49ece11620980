"""Compares NLCG, alone or with K-FAC, with momentum SGD on digits when the batch is most of the data.

    python jobs/experiments/nlcg_large_batch.py results/nlcg_large_batch.csv

Every method has the same budget: five learning rates, two seeds each, and the same number of steps at a
constant rate; a tuning run ends at the target. The rate with the fewest median steps to the target (then the
highest last accuracy) is run on five other seeds. Steps are compared, not seconds: two studies run at a time,
on one thread each. The table goes to standard output.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from multiprocessing import Pool
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from harness.workloads.digits import Digits, build
from harness.workloads.workload import Share
from kfac_core import KFAC, KFACConfig
from kfac_core.optimizers import NLCG

TARGET_ACCURACY = 0.95
STEPS = 100
WIDTH = 8  # channels of the first convolution
# (global batch size, method) in the order of the table; the two ablations at the smaller batch alone.
STUDIES = (
    *(
        (512, name)
        for name in ("momentum", "nlcg_bfgs", "nlcg_plain", "nlcg_free", "kfac_momentum", "nlcg_kfac")
    ),
    *((1024, name) for name in ("momentum", "nlcg_bfgs", "kfac_momentum", "nlcg_kfac")),
)
TUNING_SEEDS, EVALUATION_SEEDS = (100, 101), (0, 1, 2, 3, 4)
# Factors every step and inverses every ten; the damping is a round number, tuned for neither K-FAC method.
KFAC_OPTIONS = {"damping": 0.03, "factor_update_steps": 1, "inverse_update_steps": 10}

Step = Callable[[Tensor], None]


@dataclass(frozen=True)
class Run:
    """One row of the table; `steps_to_target` is infinite if the target was not reached."""

    purpose: str
    method: str
    global_batch_size: int
    lr: float
    seed: int
    steps_to_target: float
    final_accuracy: float
    final_train_loss: float
    final_scale: float


def momentum(model: nn.Module, lr: float) -> tuple[Step, NLCG | None]:
    """SGD with momentum 0.9."""
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    return lambda loss: optimizer.step(), None


def kfac_momentum(model: nn.Module, lr: float) -> tuple[Step, NLCG | None]:
    """K-FAC with its kl-clip in front of momentum SGD: the baseline of NLCG with K-FAC."""
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    kfac = KFAC(model, KFACConfig(**KFAC_OPTIONS), lr=optimizer)

    def step(loss: Tensor) -> None:
        kfac.step()
        optimizer.step()

    return step, None


def nlcg_bfgs(model: nn.Module, lr: float) -> tuple[Step, NLCG | None]:
    """The release's defaults: Fletcher-Reeves, diagonal BFGS, step control."""
    return _nlcg(NLCG(model.parameters(), lr))


def nlcg_plain(model: nn.Module, lr: float) -> tuple[Step, NLCG | None]:
    """Ablation: without a preconditioner."""
    return _nlcg(NLCG(model.parameters(), lr, precondition="none"))


def nlcg_free(model: nn.Module, lr: float) -> tuple[Step, NLCG | None]:
    """Ablation: without step control."""
    return _nlcg(NLCG(model.parameters(), lr, step_control=False))


def nlcg_kfac(model: nn.Module, lr: float) -> tuple[Step, NLCG | None]:
    """Fletcher-Reeves and step control, with K-FAC instead of BFGS."""
    kfac = KFAC(model, KFACConfig(kl_clip=None, **KFAC_OPTIONS), lr=lr)
    return _nlcg(NLCG(model.parameters(), lr, kfac=kfac))


def _nlcg(optimizer: NLCG) -> tuple[Step, NLCG | None]:
    return optimizer.step, optimizer


# The factor between rates is about 1.5, and 2 with kl-clip, which makes the rate matter less. The grids were
# chosen from single runs of seed 200, which is not used elsewhere.
METHODS: dict[str, tuple[Callable[[nn.Module, float], tuple[Step, NLCG | None]], tuple[float, ...]]] = {
    "momentum": (momentum, (0.03, 0.05, 0.08, 0.12, 0.18)),
    "nlcg_bfgs": (nlcg_bfgs, (0.05, 0.08, 0.12, 0.18, 0.27)),
    "nlcg_plain": (nlcg_plain, (0.05, 0.08, 0.12, 0.18, 0.27)),
    "nlcg_free": (nlcg_free, (0.05, 0.08, 0.12, 0.18, 0.27)),
    "kfac_momentum": (kfac_momentum, (0.1, 0.2, 0.4, 0.8, 1.6)),
    "nlcg_kfac": (nlcg_kfac, (0.03, 0.05, 0.08, 0.12, 0.18)),
}


def train(purpose: str, method: str, global_batch_size: int, lr: float, seed: int) -> Run:
    """One run, evaluated after every step on the held-out images."""
    torch.manual_seed(seed)
    workload = build({"width": WIDTH}, Share(0, 1, global_batch_size, seed, torch.device("cpu")))
    model = workload.model()
    step, nlcg = METHODS[method][0](model, lr)
    reached, accuracy, loss = math.inf, 0.0, math.nan
    for count, batch in zip(range(1, STEPS + 1), _batches(workload), strict=False):
        model.zero_grad()
        value = workload.loss(model, batch)
        loss = value.item()
        if not math.isfinite(loss):
            break
        value.backward()
        step(value)
        accuracy = _accuracy(workload, model)
        if accuracy >= TARGET_ACCURACY:
            reached = min(reached, count)
            if purpose == "tuning":
                break
    scale = 1.0 if nlcg is None else nlcg.scale
    return Run(purpose, method, global_batch_size, lr, seed, reached, accuracy, loss, scale)


def study(global_batch_size: int, method: str) -> list[Run]:
    """All runs of one method at one batch size: the tuning, then the evaluation of the rate it chose."""
    tuning = {
        lr: [train("tuning", method, global_batch_size, lr, seed) for seed in TUNING_SEEDS]
        for lr in METHODS[method][1]
    }
    best = min(tuning, key=lambda lr: (_median_steps(tuning[lr]), -_median_accuracy(tuning[lr])))
    evaluation = [train("evaluation", method, global_batch_size, best, seed) for seed in EVALUATION_SEEDS]
    return [*(run for runs in tuning.values() for run in runs), *evaluation]


def summary(runs: list[Run]) -> str:
    """The evaluation runs of one method at one batch size, as a line of a Markdown table."""
    chosen = [run for run in runs if run.purpose == "evaluation"]
    first, rates = chosen[0], METHODS[chosen[0].method][1]
    edge = " (edge)" if first.lr in {rates[0], rates[-1]} else ""
    steps = ", ".join(_whole(run.steps_to_target) for run in chosen)
    accuracies = ", ".join(f"{100 * run.final_accuracy:.1f}" for run in chosen)
    return (
        f"| {first.global_batch_size} | {first.method} | {first.lr}{edge} | {_whole(_median_steps(chosen))} "
        f"| {steps} | {100 * _median_accuracy(chosen):.1f} | {accuracies} |"
    )


def main(path: Path) -> None:
    """Run everything, write one line a run, print one line a study."""
    print("| batch | method | lr | steps to 95 % | by seed | final accuracy % | by seed |")
    print("|---|---|---|---|---|---|---|")
    with path.open("w", newline="") as file, Pool(2, torch.set_num_threads, (1,)) as pool:
        writer = csv.DictWriter(file, [field.name for field in fields(Run)], lineterminator="\n")
        writer.writeheader()
        for ahead in [pool.apply_async(study, arguments) for arguments in STUDIES]:
            runs = ahead.get()
            writer.writerows(asdict(run) for run in runs)
            print(summary(runs), flush=True)


def _batches(workload: Digits) -> Iterator[tuple[Tensor, Tensor]]:
    epoch = 0
    while True:
        yield from workload.batches(epoch)
        epoch += 1


@torch.no_grad()
def _accuracy(workload: Digits, model: nn.Module) -> float:
    sums, examples = workload.evaluate(model)
    return sums["accuracy"] / examples


def _median_steps(runs: list[Run]) -> float:
    return median(run.steps_to_target for run in runs)


def _median_accuracy(runs: list[Run]) -> float:
    return median(run.final_accuracy for run in runs)


def _whole(steps: float) -> str:
    return f"{steps:g}" if math.isfinite(steps) else "not reached"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
