"""Compares K-FAC behind SGD with tuned SGD and tuned AdamW on architectures that nobody here wrote.

    python -m jobs.experiments.architectures results/core/architectures.csv

Each method has three learning rates and one seed, on four fixed batches of 16. The loss is the mean over the
last pass through them. The target is what tuned SGD has at the end; `steps` is when a method first has it,
empty where it never does. K-FAC runs with every kl-clip of KL_CLIPS. Cost is CPU seconds of this process on
one thread, without the first two steps.
"""

from __future__ import annotations

import csv
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from kfac_core import KFAC, KFACConfig
from tests.kfac_core.architectures import ARCHITECTURES, BATCHES, made

STEPS, SKIPPED = 40, 2
RATES = {"sgd": (0.03, 0.1, 0.3), "adamw": (0.001, 0.003, 0.01), "kfac": (0.03, 0.1, 0.3)}
KL_CLIPS = (0.001, 0.01, 0.03, 0.1, None)
KFAC_OPTIONS = {"factor_update_steps": 1, "inverse_update_steps": 5}
COLUMNS = (
    "architecture", "share", "method", "kl_clip", "lr", "loss", "steps", "cpu_seconds_per_step",
)  # fmt: skip


def main(path: Path) -> None:
    """Write one row a trial."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name in ARCHITECTURES:
            for row in _trials(name):
                writer.writerow(row)
                file.flush()


def _trials(name: str) -> Iterator[dict[str, object]]:
    share = KFAC(made(name), lr=0.1).summary().share
    methods = [("sgd", None), ("adamw", None), *(("kfac", kl_clip) for kl_clip in KL_CLIPS)]
    target = 0.0
    for method, kl_clip in methods:
        trials = [(lr, *_run(name, method, kl_clip, lr)) for lr in RATES[method]]
        if method == "sgd":
            target = min(means[-1] for _, means, _ in trials)
        for lr, means, seconds in trials:
            reached = next((step + BATCHES for step, mean in enumerate(means) if mean <= target), "")
            clip = "" if method != "kfac" else "none" if kl_clip is None else kl_clip
            yield {
                "architecture": name, "share": f"{share:.3f}", "method": method, "kl_clip": clip, "lr": lr,
                "loss": f"{means[-1]:.4f}", "steps": reached, "cpu_seconds_per_step": f"{seconds:.5f}",
            }  # fmt: skip


def _run(name: str, method: str, kl_clip: float | None, lr: float) -> tuple[list[float], float]:
    """Mean loss over the last pass, at every step from the first whole pass on; CPU seconds a step."""
    model, architecture = made(name), ARCHITECTURES[name]
    batches = architecture.batches()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr, momentum=0.9)
    if method == "adamw":
        optimizer = torch.optim.AdamW(trained, lr)
    kfac = (
        KFAC(model, KFACConfig(kl_clip=kl_clip, **KFAC_OPTIONS), lr=optimizer) if method == "kfac" else None
    )
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
