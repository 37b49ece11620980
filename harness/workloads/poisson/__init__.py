"""The Poisson equation by a network: what a login node knows of the workload (no torch)."""

from __future__ import annotations

from harness.workloads.description import Options, WorkloadDescription, check_minimum

EPOCH_STEPS = 10
NETWORKS = {"64": (64,), "64-64-48-48": (64, 64, 48, 48)}
"""Widths of the hidden layers, by the option `network`; those of Dangel et al. 2024."""


def points(options: Options) -> int:
    """Points of a step: all of them."""
    return int(options["inside"]) + int(options["boundary"])


def examples(options: Options) -> int:
    """Points of an epoch: every point once a step."""
    check_minimum(options, {"inside": 1, "boundary": 1})
    if options["dimensions"] not in (2, 5):
        raise ValueError(f"options.dimensions={options['dimensions']} is not one of 2, 5")
    return EPOCH_STEPS * points(options)


POISSON = WorkloadDescription(
    module="harness.workloads.poisson.poisson",
    metrics={"l2_error": "lower"},
    options={"dimensions": 2, "network": "64", "inside": 900, "boundary": 120},
    meanings={
        "dimensions": "of the unit cube: 2, for a product of sines as solution, or 5, for a sum of cosines",
        "network": "widths of the hidden layers",
        "inside": "points inside, at which the network's residual of the equation counts",
        "boundary": "points on the boundary, at which its value counts",
    },
    train_examples=EPOCH_STEPS * 1020,
    counted=examples,
    whole_batch=points,
    divided=("inside", "boundary"),
    choices={"network": tuple(NETWORKS)},
    about="the Poisson equation on the unit square or the 5-cube by a tanh network (a PINN), in float64; "
    "an epoch is 10 steps on all points",
)
