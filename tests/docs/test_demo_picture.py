"""Promise: the README's picture follows from the demo's archive."""

from __future__ import annotations

import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

DEMO = Path(__file__).parents[2] / "results" / "demo"


@pytest.mark.slow  # reads an archive and draws
def test_the_picture_of_the_demo_is_drawn_from_its_archive(tmp_path):
    runpy.run_path(str(DEMO / "draw.py"))["main"](tmp_path)
    for name in ("demo.png", "demo-dark.png"):
        drawn, committed = plt.imread(tmp_path / name), plt.imread(DEMO / name)
        assert drawn.shape == committed.shape
        assert np.mean(drawn != committed) < 0.001, name  # an edge may round otherwise on another CPU
