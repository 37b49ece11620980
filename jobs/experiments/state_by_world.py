"""K-FAC state of the rank with most, against world size, by strategy.

    python jobs/experiments/state_by_world.py results/state_by_world

Factors and second-order data, in float32, counted from the placement. Tests check that executed worlds of 1
to 8 ranks and emulated ones of up to 4,096 have the same numbers (tests/harness/test_emulate.py). Shares are
of the state of one rank alone; 1/P would be perfect sharding.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.cost_model.models import read_model
from analysis.cost_model.work import Setup, Work
from kfac_core.config import KFACConfig

MODELS = ("resnet32", "resnet50")
WORLD_SIZES = (1, 2, 4, 8, 64)
STRATEGIES: dict[str, dict[str, Any]] = {
    "comm_opt": {"strategy": "comm_opt"},
    "hybrid_opt, half": {"strategy": "hybrid_opt", "grad_worker_fraction": 0.5},
    "mem_opt": {"strategy": "mem_opt"},
    "dp_kfac": {"strategy": "dp_kfac"},
}
KINDS = ("factors", "second_order")


def held(model: str, strategy: str, world_size: int) -> list[int]:
    """Bytes of state by rank."""
    config = KFACConfig(**STRATEGIES[strategy])
    state = Work(Setup(read_model(model), config, world_size, local_batch_size=1)).state_bytes
    return [sum(of_rank) for of_rank in zip(*(state[kind] for kind in KINDS), strict=True)]


def rows() -> Iterator[dict[str, Any]]:
    """Of every model, strategy and world size."""
    for model in MODELS:
        (whole,) = held(model, "comm_opt", 1)
        for strategy in STRATEGIES:
            for world_size in WORLD_SIZES:
                if world_size == 1 and strategy.startswith("hybrid"):
                    continue  # half of one rank is not a gradient worker
                ranks = held(model, strategy, world_size)
                yield {
                    "model": model, "strategy": strategy, "world_size": world_size,
                    "largest_bytes": max(ranks), "mean_bytes": round(sum(ranks) / world_size),
                    "largest_share": round(max(ranks) / whole, 4), "one_over_p": round(1 / world_size, 4),
                }  # fmt: skip


def main() -> None:
    """Write the table as CSV and as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", type=Path, help="path of the table without its suffix")
    table = parser.parse_args().table
    found = list(rows())
    with table.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    lines = [
        "# K-FAC state of the fullest rank", "",
        f"`python jobs/experiments/state_by_world.py {table}`. Factors and second-order data (eigen,",
        "float32) of the rank that holds most, as a share of what one rank alone holds; MiB in brackets.",
        "Counted from the placement; executed worlds of 1 to 8 ranks hold exactly this",
        "(`tests/harness/test_emulate.py`). Where a share stays above 1/P, one factor is larger than a fair",
        "share: ResNet-50 has three of 81 MiB. Written by the program named above.",
        "", f"| model | strategy | {' | '.join(f'P = {size}' for size in WORLD_SIZES)} |",
        f"|---|---|{'---|' * len(WORLD_SIZES)}",
    ]  # fmt: skip
    for model in MODELS:
        for strategy in STRATEGIES:
            of = {row["world_size"]: row for row in found
                  if (row["model"], row["strategy"]) == (model, strategy)}  # fmt: skip
            cells = [
                f"{of[size]['largest_share']:.1%} ({of[size]['largest_bytes'] / 2**20:.1f})"
                if size in of
                else ""
                for size in WORLD_SIZES
            ]
            lines.append(f"| {model} | {strategy} | {' | '.join(cells)} |")
    table.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
