"""A study whose steps follow laws in closed form: nothing of the prediction's code is used for them.

Four layers of 100 by 100 under SGD, comm_opt or mem_opt. All layers are alike, so all ranks with work have as
much. An error that no law of the prediction knows can grow with every doubling of the ranks.
"""

from __future__ import annotations

import math
from random import Random
from statistics import fmean

from analysis.prediction.arms import Arm, Measured, World
from analysis.prediction.networks import Network
from analysis.prediction.prediction import study_model
from harness.cell import Training
from kfac_core.config import KFACConfig
from kfac_core.phases import COMM_PHASES
from kfac_core.placement import FactorShape, LayerShape

N, LAYERS, BATCH = 100, 4, 64
F, E = 5, 10
ALPHA, BETA = 2e-4, 1e-8  # seconds a message, and a byte on the wire
SHAPES = tuple(LayerShape(f"layer{i}", FactorShape(N), FactorShape(N)) for i in range(LAYERS))
COMM = {phase.value for phase in COMM_PHASES}


def step(method: str, ranks: int) -> dict[str, float]:
    """Seconds a step by phase, in closed form; all layers are alike, so all ranks with work have as much."""
    batch = BATCH // ranks
    found = {
        "data": 1e-4,
        "forward": 1e-3 + 2e-5 * batch,
        "backward": 2e-3 + 4e-5 * batch,
        "update": 3e-4,
        "gradient_comm": ring(ranks, 4 * LAYERS * N * N),
    }
    if method == "sgd":
        return found
    factors, owners = 2 * LAYERS, min(ranks, 2 * LAYERS if method == "comm_opt" else LAYERS)
    each = factors / owners
    solve = 3e-4 + 5e-9 * N**3
    found |= {
        "factor_compute": (4e-4 + 1e-8 * batch * factors * N**2) / F,
        "factor_comm": direct(ranks, owners, 4 * each * (N * (N + 1) / 2 + 2)) / F,
        "inverse_compute": each * solve / E,
        "scale": 5e-5,
    }
    product = 2e-5 + 1e-11 * 8 * N**3
    if method == "comm_opt":
        inverses = direct(ranks, owners, 4 * each * (N**2 + N))
        return found | {"inverse_comm": inverses / E, "precondition": LAYERS * product}
    gradients = direct(ranks, owners, 4 * LAYERS / owners * N**2)
    return found | {"precondition_comm": gradients, "precondition": LAYERS / owners * product}


def ring(ranks: int, size: float) -> float:
    return (ranks - 1) * ALPHA + 2 * (ranks - 1) / ranks * size * BETA


def direct(ranks: int, owners: int, part: float) -> float:
    """Every owner exchanges its part with all other ranks, one message a part."""
    return owners * ALPHA + (ranks - 1) * part * BETA if ranks > 1 else 0.0


def coverage(error: float, sizes: tuple[int, ...], studies: int) -> dict[int, float]:
    """By world size, the share of held-out runs within the 90 % bounds.

    Args:
        error: of the laws per doubling of the ranks, standard deviation of its log.
        sizes: of the held-out worlds.
        studies: simulated ones; each has two arms.
    """
    random = Random(5)  # noqa: S311  simulated noise
    hits: dict[int, list[bool]] = {size: [] for size in sizes}
    for _ in range(studies):
        drift = random.gauss(0, error)
        arms = tuple(simulated(method, drift, random, (1, 2, 4)) for method in ("sgd", "mem_opt"))
        model = study_model(Measured("simulated", "gloo", 0.0, arms, True, ()))
        for arm in arms:
            held_out = simulated(arm.name, drift, random, sizes)
            for size, found in hits.items():
                seconds = model.predict(arm.name, size).seconds
                found.append(seconds.low <= held_out.worlds[size].runs[0] <= seconds.high)
    return {size: fmean(found) for size, found in hits.items()}


def simulated(method: str, drift: float, random: Random, sizes: tuple[int, ...]) -> Arm:
    """An arm whose steps follow the laws, off by `drift` in the log for every doubling of the ranks."""
    network = Network("simulated", SHAPES, 0)
    config = (
        None
        if method == "sgd"
        else KFACConfig.sc20(strategy=method, factor_update_steps=F, inverse_update_steps=E)
    )
    worlds = {}
    for size in sizes:
        off = math.exp(drift * math.log2(size))
        seconds = {name: value * off for name, value in step(method, size).items()}
        runs = [math.exp(random.gauss(0, 0.03)) for _ in range(2)]
        mean = fmean(runs)
        total = sum(seconds.values())
        worlds[size] = World(
            tuple(run * total for run in runs), 0.03, 4,
            {name: (mean * value,) * size for name, value in seconds.items() if name not in COMM},
            {name: mean * value for name, value in seconds.items() if name in COMM},
        )  # fmt: skip
    training = Training(global_batch_size=BATCH, epochs=1, gradient_averaging="flat")
    return Arm(method, network, config, training, worlds, {})
