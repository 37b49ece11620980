"""Handwritten digits: what a login node knows of the workload (no torch)."""

from __future__ import annotations

from harness.workloads.description import Options, WorkloadDescription, check_minimum

DIGITS_TRAIN = 1437


def digits_examples(options: Options) -> int:
    """Size of the training set, whatever the width of the network."""
    check_minimum(options, {"width": 1})
    return DIGITS_TRAIN


DIGITS = WorkloadDescription(
    module="harness.workloads.digits.digits",
    metrics={"accuracy": "higher", "loss": "lower"},
    options={"width": 16, "network": "small"},
    meanings={
        "width": "channels of the first convolution",
        "network": "two convolutions and two linear layers (small), or three convolutions of equal width "
        "and a linear layer, on the images enlarged to 16x16 (larger)",
    },
    choices={"network": ("small", "larger")},
    train_examples=DIGITS_TRAIN,
    counted=digits_examples,
    about="1,797 real handwritten digits of 8x8 pixels (UCI, inside scikit-learn); a small ConvNet",
)
