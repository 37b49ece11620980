"""Optimizers that no maintained library has: `NLCG`, and `LevenbergMarquardt` for least squares.

Each is a `torch.optim.Optimizer`, so that learning-rate schedulers and checkpoints work as usual.
"""

from kfac_core.optimizers.levenberg_marquardt import AdaptiveDamping, LevenbergMarquardt
from kfac_core.optimizers.nlcg import NLCG

__all__ = ["NLCG", "AdaptiveDamping", "LevenbergMarquardt"]
