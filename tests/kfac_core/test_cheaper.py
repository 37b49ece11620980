"""Promise: the cheaper approximations match their definition: part of the batch, a basis that converges."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from tests.kfac_core.runs import solved


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, stride=2), nn.Flatten(), nn.Linear(27, 5)
    ).double()


def factors(batch: int, **options: Any) -> dict[Any, torch.Tensor]:
    """Running factors after one step on the first `batch` of 8 examples, their loss a mean over the 8."""
    model = conv_net()
    kfac = KFAC(model, KFACConfig(factor_update_steps=1, inverse_update_steps=1, **options), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 2, 8, 8, dtype=torch.float64, generator=generator)
    labels = torch.arange(8) % 5
    functional.cross_entropy(model(images[:batch]), labels[:batch]).backward()
    kfac.step()
    return kfac._factors.running


@pytest.mark.parametrize(("fraction", "examples"), [(0.5, 4), (0.25, 2), (0.01, 1), (1.0, 8)])
def test_part_of_the_batch_gives_the_factors_of_a_batch_of_that_part(fraction, examples):
    part, whole = factors(8, factor_batch_fraction=fraction), factors(examples)
    for key, factor in part.items():
        torch.testing.assert_close(factor, whole[key], rtol=1e-12, atol=1e-14)


def test_a_warm_basis_converges_to_the_eigenvectors_of_a_constant_factor():
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(1, 12, 12, dtype=torch.float64, generator=generator))
    values = 2.0 ** -torch.arange(12, dtype=torch.float64)
    factor = basis * values @ basis.mT
    data = torch.cat([torch.eye(12).flatten(), torch.zeros(12)]).double()
    errors = []
    for _ in range(60):
        data = solved(KFACConfig(), factor, last=data)
        vectors, found = data[:-12].view(12, 12).T, data[-12:]
        errors.append(float((vectors * found @ vectors.T - factor).norm() / factor.norm()))
        assert torch.allclose(vectors.T @ vectors, torch.eye(12).double(), atol=1e-12)
    assert errors[0] > 1e-2
    assert errors[-1] < 1e-10
    assert errors[20] < 1e-3 * errors[0]  # the gap between neighbouring eigenvalues is 2: 1e-6 in 20 steps


def test_warm_training_stays_near_the_exact_one_and_starts_with_it():
    def gradient(steps: int, start: str) -> torch.Tensor:
        model = conv_net()
        config = KFACConfig(
            factor_update_steps=1, inverse_update_steps=1, eigen_start=start, damping=0.01, kl_clip=None
        )
        kfac = KFAC(model, config, lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            images = torch.randn(32, 2, 8, 8, dtype=torch.float64, generator=generator)
            model.zero_grad()
            functional.cross_entropy(model(images), torch.arange(32) % 5).backward()
            kfac.step()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert torch.equal(gradient(1, "warm"), gradient(1, "cold"))
    warm, cold = gradient(20, "warm"), gradient(20, "cold")
    assert not torch.equal(warm, cold)
    assert functional.cosine_similarity(warm, cold, dim=0) > 0.99
