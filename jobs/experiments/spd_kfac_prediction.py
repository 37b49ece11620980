"""Compares SPD-KFAC's published step times on 64 GPUs with predictions from the constants of its release.

    python jobs/experiments/spd_kfac_prediction.py results/prediction

Writes the two calibrations `spd_kfac_64_release` and `spd_kfac_64` and the table, the figure and the page
`spd_kfac`. The first takes every constant as released. The second replaces one of them: the release fits the
time to invert an n by n factor as 3.64 ms * exp(4.77e-4 n), which is 3.64 ms for the smallest factor, while
D-KFAC's published inverse phase is 1.2 to 2.5 ms a factor. A law c + k n^3 has two constants; the two
published inverse phases of ResNet-50 determine them, and the other three models are held out.

Inputs that no constant of the release predicts, and that one GPU can measure, are taken as published: forward
and backward pass, and factor computation.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.cost_model.calibration import FOLDER, Calibration
from analysis.cost_model.calibration_file import parse_calibration
from analysis.cost_model.models import Model, read_model
from analysis.cost_model.prediction import predict
from analysis.cost_model.work import Setup
from analysis.figures import files
from analysis.figures.prediction import breakdown
from kfac_core.config import KFACConfig
from kfac_core.timing.phases import Phase

PUBLISHED = Path("results/published/spd_kfac_breakdown.csv")
GPUS, GOAL = 64, 0.15
LATENCY, PER_ELEMENT = 0.929e-3, 1.4335e-9  # of an all-reduce; the release's only ones for 64 GPUs
MODELS = {
    "ResNet-50": "resnet50", "ResNet-152": "resnet152",
    "DenseNet-201": "densenet201", "Inception-v4": "inception_v4",
}  # fmt: skip
STRATEGIES = {"D-KFAC": "d_kfac", "MPD-KFAC": "mpd_kfac"}
PHASES = {
    "forward_backward": (Phase.FORWARD, Phase.BACKWARD), "gradient_comm": (Phase.GRADIENT_COMM,),
    "factor_compute": (Phase.FACTOR_COMPUTE,), "factor_comm": (Phase.FACTOR_COMM,),
    "inverse_compute": (Phase.INVERSE_COMPUTE,), "inverse_comm": (Phase.INVERSE_COMM,),
}  # fmt: skip


def main(folder: Path) -> None:
    """Calibrate, predict, compare, write."""
    with PUBLISHED.open() as lines:
        published = [row for row in csv.DictReader(lines) if row["algorithm"] in STRATEGIES]
    release = {"formula": "exponential", "constant": 3.64e-3, "coefficient": 4.77e-4}
    calibrations = {
        "spd_kfac_64_release": _calibration("spd_kfac_64_release", published, release),
        "spd_kfac_64": _calibration("spd_kfac_64", published, _cubic(published)),
    }
    rows = [
        {"calibration": name, **row}
        for name, calibration in calibrations.items()
        for row in _compare(published, calibration)
    ]
    frame = pd.DataFrame(rows)
    folder.mkdir(parents=True, exist_ok=True)
    shown = frame[(frame["calibration"] == "spd_kfac_64") & (frame["phase"] != "total")]
    caption = (
        "Published (filled) and predicted (hollow) phases of a step on 64 GPUs, the largest world measured."
    )
    files.save(breakdown(shown.drop(columns="calibration"), caption), folder, "spd_kfac")
    frame.to_csv(folder / "spd_kfac.csv", index=False, float_format="%.4g")
    (folder / "spd_kfac.md").write_text(_page(frame))


def _cubic(published: list[dict[str, str]]) -> dict[str, Any]:
    """C and k of c + k n^3 from ResNet-50's two inverse phases: all factors, and the slowest rank's two."""
    model = read_model("resnet50")
    dims = [factor.dim for shape in model.shapes for factor in (shape.a, shape.g)]
    # 54 layers on 64 ranks, round robin: one layer a rank
    slowest = max(model.shapes, key=lambda shape: shape.a.dim**3 + shape.g.dim**3)
    pair = slowest.a.dim**3 + slowest.g.dim**3
    seconds = {
        row["algorithm"]: float(row["inverse_compute_ms"]) / 1e3
        for row in published
        if row["model"] == "ResNet-50"
    }
    everything, cubes = seconds["D-KFAC"], sum(dim**3 for dim in dims)
    # len(dims) c + cubes k = everything;  2 c + pair k = slowest
    k = (everything - len(dims) / 2 * seconds["MPD-KFAC"]) / (cubes - len(dims) / 2 * pair)
    c = (seconds["MPD-KFAC"] - pair * k) / 2
    return {"formula": "power", "constant": c, "coefficient": k, "power": 3.0}


def _calibration(name: str, published: list[dict[str, str]], inverse: dict[str, Any]) -> Calibration:
    """As a file in `results/calibrations`, then read back."""
    link = {"world_size": GPUS, "latency_seconds": LATENCY, "seconds_per_byte": PER_ELEMENT / 4}
    facts = {
        MODELS[row["model"]]: {
            "local_batch_size": int(row["local_batch_size"]),
            "forward_backward_seconds": float(row["forward_backward_ms"]) / 1e3,
            "factor_seconds": float(row["factor_compute_ms"]) / 1e3,
        }
        for row in published
    }
    # NVIDIA's data sheet: 13.4 TFLOP/s in float32 and 616 GB/s; 60 % of either is assumed, not measured.
    rate = {"formula": "power", "constant": 2e-5, "coefficient": 1 / (0.6 * 13.4e12), "relative_error": 0.25}
    values = {
        "schema": 1,
        "name": name,
        "source": "release of arXiv:2107.06533, inverse law replaced: results/prediction/spd_kfac.md"
        if inverse["formula"] == "power"
        else "release of arXiv:2107.06533, every constant as released",
        "environment": {"device": "NVIDIA RTX 2080 Ti", "network": "100 Gb/s InfiniBand", "world_size": GPUS},
        "largest_world_size": GPUS,
        "algorithm": "nccl",
        "links": {"between": dict.fromkeys(("all_reduce", "reduce_parts", "gather_parts"), link)},
        "gemm": rate,
        "factor": rate,
        "training": rate,
        "inverse": {"inverse": inverse},
        "bytes_per_second": 0.6 * 616e9,
        "memory_bytes": 11 * 2**30,
        "models": facts,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")
    return parse_calibration(values, name)


def _compare(published: list[dict[str, str]], calibration: Calibration) -> list[dict[str, Any]]:
    rows = []
    for row in published:
        model: Model = read_model(MODELS[row["model"]])
        config = KFACConfig(
            strategy=STRATEGIES[row["algorithm"]],
            solver="inverse",
            factor_update_steps=1,
            inverse_update_steps=1,
        )
        setup = Setup(
            model, config, GPUS, int(row["local_batch_size"]), inverse_packing="triangle", fusion="layer"
        )
        seconds = predict(setup, calibration).event_seconds
        head = {"model": row["model"], "algorithm": row["algorithm"]}
        sums: Counter[str] = Counter()
        for name, phases in PHASES.items():
            measured = float(row[f"{name}_ms"])
            predicted = 1e3 * sum(seconds[phase].central for phase in phases if phase in seconds)
            rows.append({**head, "phase": name, "published_ms": measured, "predicted_ms": predicted})
            sums.update({"published": measured, "predicted": predicted})
        rows.append(
            {**head, "phase": "total", "published_ms": sums["published"], "predicted_ms": sums["predicted"]}
        )
    for entry in rows:
        measured = entry["published_ms"]
        entry["signed_error"] = entry["predicted_ms"] / measured - 1 if measured else 0.0
    return rows


def _page(frame: pd.DataFrame) -> str:
    lines = [_HEAD]
    for name, own in frame.groupby("calibration", sort=False):
        totals = own[own["phase"] == "total"]
        met = int((totals["signed_error"].abs() <= GOAL).sum())
        lines += [f"## {name}: {met} of {len(totals)} totals within {GOAL:.0%}", ""]
        head = ["model", "algorithm", "published ms", "predicted ms", "total", "without inputs"]
        shown = ["gradient_comm", "factor_comm", "inverse_compute", "inverse_comm"]
        lines += [
            "| " + " | ".join([*head, *(s.replace("_", " ") for s in shown)]) + " |",
            "|" + "---|" * (len(head) + len(shown)),
        ]
        for (model, algorithm), cell in own.groupby(["model", "algorithm"], sort=False):
            by_phase = cell.set_index("phase")
            errors = [
                f"{by_phase.loc[p, 'signed_error']:+.0%}" if by_phase.loc[p, "published_ms"] else "none"
                for p in ["total", *shown]
            ]
            total = by_phase.loc["total"]
            values = [
                str(model),
                str(algorithm),
                f"{total['published_ms']:.0f}",
                f"{total['predicted_ms']:.0f}",
            ]
            inputs = by_phase.loc[["forward_backward", "factor_compute"], "published_ms"].sum()
            rest = (total["predicted_ms"] - inputs) / (total["published_ms"] - inputs) - 1
            errors.insert(1, f"{rest:+.0%}")
            lines.append("| " + " | ".join([*values, *errors]) + " |")
    return "\n".join([*lines, _WHY])


_HEAD = """# SPD-KFAC's published steps on 64 GPUs, predicted

`python jobs/experiments/spd_kfac_prediction.py results/prediction` wrote this page, `spd_kfac.csv`, the
figure `spd_kfac` and the calibrations `spd_kfac_64_release` and `spd_kfac_64`. Largest measured world: 64
ranks. Signed errors: predicted over published, minus one. Forward and backward pass and factor computation
are published single-GPU times, inputs and no prediction; `without inputs` is the error of all else together.
Factors, inverses and gradients travel layer by layer as triangles, as in the release's code.
"""

_WHY = """
## Misses, explained

- **Inverse compute, every constant as released.** The fit starts at 3.64 ms, so ResNet-50's 108 factors cost
  at least 393 ms where 274 were measured, and DenseNet-201's 402 at least 1.46 s where 0.48 were. The
  release fits with weights that favour large factors: MPD-KFAC, whose slowest rank holds those, is met, and
  D-KFAC, where every rank inverts all the small ones, is not.
- **Inverse compute, c + k n^3.** Two numbers of ResNet-50 determine both constants, so they are exact there.
  DenseNet-201 has no factor above 1,920 rows, and its MPD-KFAC phase is far too low: between launches and
  large products a GPU's Cholesky probably costs more than either term; two constants cannot say so.
- **Gradient comm** is too high for all models: the release averages gradients layer by layer during the
  backward pass, which hides a part; here all of it is exposed. How much is hidden was not published.
- **Inverse comm**: the constants of an all-reduce stand in for those of a broadcast, as in the release.
"""

if __name__ == "__main__":
    main(Path(sys.argv[1]))
