"""Predicts the cost of a strategy at any world size from placement, layer shapes and a calibration; no torch.

    models/       layers of the papers' networks, by construction                  Model
    work          operations, traffic and memory of every rank, exactly            Work
    calibration   measured speeds of a machine                                     Calibration
    prediction    both together: seconds by phase, with an interval                Prediction
    arms          arms over world sizes: crossovers, and the cheapest that fits    Recommendation

The placement is the one that `kfac_core` executes.
"""
