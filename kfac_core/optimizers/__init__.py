"""Optimizers that no maintained library has: `NLCG`, preconditioned by diagonal BFGS or K-FAC.

Each is a `torch.optim.Optimizer`, so that learning-rate schedulers and checkpoints work as usual.
"""

from kfac_core.optimizers.nlcg import NLCG

__all__ = ["NLCG"]
