"""What a strategy costs at any world size: placement, layer shapes and a calibration, and no torch.

    models/          layers of the papers' networks, by construction        Model
    work             what every rank computes, sends and keeps, exactly      Work
    calibration      what a machine takes for it                             Calibration
    prediction       both together: seconds by phase, with an interval       Prediction
    recommendation   the cheapest strategy that fits

The placement is the one that `kfac_core` executes.
"""
