"""Promise: on a GPU a step waits for the device, launches and allocates no more than these tables say.

The GPU is one without data (`fake_cuda`), in a process of its own; it needs g++.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a CUDA device without data")

Step = dict[str, Any]
EVERY: dict[str, dict[str, Any]] = {
    "conv": {"model": "conv", "batch": 8},
    "channels last, tf32 elsewhere": {"model": "conv", "batch": 8, "channels_last": True, "tf32": True},
    "transformer": {"model": "transformer", "batch": 8},
    "inverse, rank 3 of 8": {
        "model": "transformer", "batch": 8, "world_size": 8, "rank": 3, "config": {"solver": "inverse_pi"},
    },
    "overlap, bfloat16": {
        "model": "transformer", "batch": 8, "world_size": 8, "rank": 3, "autocast": "bfloat16",
        "config": {"overlap_factors": True, "gram_precision": "bfloat16"},
    },
    "scaler": {"model": "conv", "batch": 8, "scaler": True, "autocast": "float16"},
}  # fmt: skip


def measured(cases: list[dict[str, Any]]) -> list[dict[str, Step]]:
    """Counts of every case by kind of step."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kfac_core.fake_cuda.measure"],
        input=json.dumps(cases), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return [{step["step"]: step for step in steps} for steps in json.loads(ran.stdout)]


@pytest.fixture(scope="module")
def small() -> dict[str, dict[str, Step]]:
    return dict(zip(EVERY, measured(list(EVERY.values())), strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("case", EVERY)
def test_a_plain_step_and_a_factor_step_never_wait(small, case):
    assert small[case]["plain"]["waits"] == small[case]["factors"]["waits"] == {}


@pytest.mark.ranks
@pytest.mark.parametrize("case", EVERY)
def test_an_inverse_step_waits_once(small, case):
    assert sum(small[case]["all"]["waits"].values()) == 1


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "plain", "factors", "gemms"),
    [
        ("conv", 87, 286, 48),
        ("channels last, tf32 elsewhere", 87, 282, 48),
        ("transformer", 61, 154, 33),
        ("overlap, bfloat16", 61, 240, 33),
    ],
)
def test_a_step_launches_no_more_than_today(small, case, plain, factors, gemms):
    assert small[case]["plain"]["launches"] <= plain
    assert small[case]["factors"]["launches"] <= factors
    assert small[case]["factors"]["gemms"] <= gemms


@pytest.mark.ranks
def test_no_product_of_kfac_uses_tf32_unless_asked(small):
    for step in small["channels last, tf32 elsewhere"].values():
        assert step["tf32"] == 0
        assert step["gemms"] > 0


@pytest.mark.slow
@pytest.mark.ranks
def test_resnet50_meets_its_targets():
    plain_waits, plain, factors = 0, 150, 1200
    (steps,) = measured([{"model": "resnet50", "batch": 32}])
    assert sum(steps["plain"]["waits"].values()) == sum(steps["factors"]["waits"].values()) == plain_waits
    assert steps["plain"]["launches"] <= plain
    assert steps["factors"]["launches"] <= factors
    assert max(steps["plain"]["transient_mb"], steps["factors"]["transient_mb"]) <= 300
