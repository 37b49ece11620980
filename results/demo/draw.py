"""Draws the README's picture, for light and dark pages, from the demo's archive.

python results/demo/draw.py [OUT]
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from analysis import Study, load
from analysis.figures import FIGURES

HERE = Path(__file__).parent
SHOWN = "sgd", "kfac", "dp_kfac"  # of which the phases are shown: one row of panels


def main(out: Path) -> None:
    """Write `demo.png` and `demo-dark.png` into `out`: time to accuracy above the phases of a step."""
    study = load(HERE / "demo.tar.xz")
    some = study.of_cells(set(study.cells.loc[study.cells["method"].isin(SHOWN), "cell"]))
    rows = [pixels(study, "time_to_accuracy"), pixels(some, "phase_breakdown")]
    width = max(row.shape[1] for row in rows)
    light = np.concatenate(
        [np.pad(row, ((0, 40), (0, width - row.shape[1]), (0, 0)), constant_values=1) for row in rows]
    )
    # lightness the other way around: colours keep their hue
    dark = light + 1 - light.max(axis=2, keepdims=True) - light.min(axis=2, keepdims=True)
    for name, image in (("demo", light), ("demo-dark", dark)):
        plt.imsave(out / f"{name}.png", image.clip(0, 1), metadata={"Software": None})


def pixels(study: Study, figure: str) -> np.ndarray:
    """A figure of the study, `[height, width, 3]`, from 0 to 1."""
    return plt.imread(io.BytesIO(FIGURES[figure].draw(study).image("png")))[..., :3]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
