"""The kl-clip: bounds how far one step moves the predictions of the model (SC20, KAISA)."""

from torch import Tensor


def kl_clip_scale(change: Tensor, lr: float, kl_clip: float) -> Tensor:
    """The factor nu = min(1, sqrt(kl_clip / |lr^2 change|)) for all layers.

    It stays on the device, so that the host does not wait for it.

    Args:
        change: sum over layers of <preconditioned gradient, gradient>, a tensor without dimensions.
        lr: learning rate of the step.
        kl_clip: bound on the predicted KL divergence, kappa in the papers.
    """
    predicted = change.abs() * lr**2
    return (kl_clip / predicted).sqrt().clamp_max(1.0)
