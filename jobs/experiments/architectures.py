"""Compares K-FAC behind SGD with tuned SGD and tuned AdamW on architectures that nobody here wrote.

    python -m jobs.experiments.architectures results/core/architectures.csv

Training on four fixed batches of 16. Every method tries the same number of learning rates with TUNING_SEED,
and its best one then starts from the weights of each of SEEDS. The loss is the mean over the last pass
through the batches. The target is what tuned SGD has at the end from the same weights; `steps` is when a
method first has it, empty where it never does. Cost is CPU seconds of this process on one thread, without
the first two steps. The table of medians over SEEDS goes to stdout.
"""

from __future__ import annotations

import csv
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from kfac_core import KFAC, KFACConfig
from tests.kfac_core.architectures import ARCHITECTURES, BATCHES, made

STEPS, SKIPPED = 40, 2
TUNING_SEED, SEEDS = 100, (1, 2, 3)
SGD_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
METHODS: Mapping[str, tuple[float, ...]] = {
    "sgd": SGD_RATES,
    "adamw": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "kfac 0.001": SGD_RATES,
    "kfac 0.01": SGD_RATES,
}
COLUMNS = (
    "architecture", "share", "method", "seed", "lr", "place_of_rate", "loss", "steps", "cpu_seconds_per_step",
)  # fmt: skip
Trial = tuple[list[float], float]


def main(path: Path) -> None:
    """Write one row a trial of SEEDS and of TUNING_SEED, and print the table."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name in ARCHITECTURES:
            for row in _trials(name):
                writer.writerow(row)
                file.flush()
                rows.append(row)
            print(_line(name, [row for row in rows if row["architecture"] == name]), flush=True)


def _trials(name: str) -> Iterator[dict[str, object]]:
    share = KFAC(made(name), lr=0.1).summary().share
    best = {}
    for method, rates in METHODS.items():
        trials = {lr: _run(name, method, lr, TUNING_SEED) for lr in rates}
        best[method] = min(rates, key=lambda lr, trials=trials: trials[lr][0][-1])  # type: ignore[misc]
        for lr, trial in trials.items():
            yield _row(name, share, method, TUNING_SEED, lr, None, trial)
    for seed in SEEDS:
        final = {method: _run(name, method, lr, seed) for method, lr in best.items()}
        for method, trial in final.items():
            yield _row(name, share, method, seed, best[method], final["sgd"][0][-1], trial)


def _row(
    name: str, share: float, method: str, seed: int, lr: float, target: float | None, trial: Trial
) -> dict[str, object]:
    means, seconds = trial
    reached = [] if target is None else [step + BATCHES for step, mean in enumerate(means) if mean <= target]
    return {
        "architecture": name, "share": f"{share:.3f}", "method": method, "seed": seed, "lr": lr,
        "place_of_rate": f"{1 + METHODS[method].index(lr)} of {len(METHODS[method])}",
        "loss": f"{means[-1]:.4f}", "steps": reached[0] if reached else "",
        "cpu_seconds_per_step": f"{seconds:.5f}",
    }  # fmt: skip


def _line(name: str, rows: list[dict[str, object]]) -> str:
    """A row of the table: share; median loss and rate by method; median steps; cost over SGD's."""
    final = {m: [row for row in rows if row["method"] == m and row["seed"] in SEEDS] for m in METHODS}

    def median(method: str, value: Callable[[dict[str, object]], float]) -> float:
        return statistics.median(value(row) for row in final[method])

    losses = [f"{median(m, lambda row: float(str(row['loss']))):.4f} ({final[m][0]['lr']})" for m in METHODS]
    steps = [median(m, lambda row: float(str(row["steps"] or "inf"))) for m in METHODS if m != "sgd"]
    seconds = {m: median(m, lambda row: float(str(row["cpu_seconds_per_step"]))) for m in METHODS}
    cells = [
        name, str(rows[0]["share"]), *losses,
        *("-" if step == float("inf") else f"{step:.0f}" for step in steps),
        f"{seconds['kfac 0.01'] / seconds['sgd']:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _run(name: str, method: str, lr: float, seed: int) -> Trial:
    """Mean loss over the last pass, at every step from the first whole pass on; CPU seconds a step."""
    model, architecture = made(name, seed), ARCHITECTURES[name]
    batches = architecture.batches()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr, momentum=0.9)
    if method == "adamw":
        optimizer = torch.optim.AdamW(trained, lr)
    kfac = None
    if method.startswith("kfac"):
        kl_clip = float(method.removeprefix("kfac "))
        config = KFACConfig(kl_clip=kl_clip, factor_update_steps=1, inverse_update_steps=5)
        kfac = KFAC(model, config, lr=optimizer)
    losses, begun = [], 0.0
    for step in range(STEPS):
        if step == SKIPPED:
            begun = time.process_time()
        optimizer.zero_grad()
        loss = architecture.loss(model, batches[step % BATCHES])
        loss.backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
        losses.append(float(loss.detach()))
    seconds = (time.process_time() - begun) / (STEPS - SKIPPED)
    means = [sum(losses[end - BATCHES : end]) / BATCHES for end in range(BATCHES, STEPS + 1)]
    return [mean if mean == mean else float("inf") for mean in means], seconds  # noqa: PLR0124  NaN


if __name__ == "__main__":
    main(Path(sys.argv[1]))
