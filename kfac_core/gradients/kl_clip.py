"""The kl-clip: bounds how far one step moves the predictions of the model (SC20, KAISA)."""

from torch import Tensor


def kl_clip_scale(size: Tensor, lr: float, kl_clip: float) -> Tensor:
    """The factor nu = min(1, sqrt(kl_clip / |lr^2 change|)) for all layers.

    It stays on the device, so that the host does not wait for it.

    Args:
        size: absolute sum over layers of <preconditioned gradient, gradient>, without dimensions.
        lr: learning rate of the step.
        kl_clip: bound on the predicted KL divergence, kappa in the papers.
    """
    return (size * (lr**2 / kl_clip)).rsqrt().clamp_max(1.0)
