"""The drawer of optimizers that no kept library has: `NLCG`, with diagonal BFGS or K-FAC in front.

Each is a `torch.optim.Optimizer`, so that learning-rate schedulers and checkpoints treat it as any other.
"""

from kfac_core.optimizers.nlcg import NLCG

__all__ = ["NLCG"]
