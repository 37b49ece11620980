"""Promise: `training.precision` changes the precision of the model's products, and of nothing else."""

import pytest
import torch

from harness.errors import SiteError
from harness.runs.records import EvalRecord
from harness.training.passes import ModelPrecision
from kfac_core import KFAC
from tests.harness.test_train import KFAC as KFAC_FIELDS
from tests.harness.test_train import cell, train_on_rank

CPU = torch.device("cpu")
TWO_EPOCHS = {"global_batch_size": 256, "epochs": 2, "stop_at_target": False}


def losses(precision: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seen: set[torch.dtype] = set()
    step = KFAC.step

    def watched(self: KFAC) -> None:
        seen.update(gradient.dtype for gradient in self._gradients.raw)
        step(self)
        seen.update(factor.dtype for factor in self._factors.running.values())

    monkeypatch.setattr(KFAC, "step", watched)
    training = {**TWO_EPOCHS, "precision": precision}
    _, records = train_on_rank(0, 1, cell(training=training, kfac=KFAC_FIELDS), folder)
    assert seen == {torch.float32}
    return [record.train_loss for record in records if isinstance(record, EvalRecord)]


@pytest.mark.slow
def test_bfloat16_learns_like_float32_and_leaves_gradients_and_factors_in_float32(tmp_path, monkeypatch):
    whole, half = (losses(name, str(tmp_path), monkeypatch) for name in ("float32", "bfloat16"))
    assert half == pytest.approx(whole, rel=0.05)
    assert half != whole


def test_only_the_model_is_inside_autocast():
    matrix = torch.full((8, 8), 1 + 2**-12)  # bfloat16 has seven fraction bits
    precision = ModelPrecision("bfloat16", CPU)
    with precision.autocast():
        assert torch.equal(matrix @ matrix, torch.full((8, 8), 8.0, dtype=torch.bfloat16))
    assert torch.equal(matrix @ matrix, matrix.double().mm(matrix.double()).float())


def test_tf32_without_a_gpu_is_an_error():
    with pytest.raises(SiteError, match="precision=tf32 needs a GPU, and this rank computes on cpu"):
        ModelPrecision("tf32", CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "rounded"), [("float32", False), ("tf32", True)])
def test_a_gpu_rounds_products_only_with_tf32(precision, rounded):
    device = torch.device("cuda")
    ModelPrecision(precision, device)
    try:
        # 1 + 2^-12 is 1 in TF32's ten bits
        matrix = torch.full((256, 256), 1 + 2**-12, device=device)
        image = torch.full((1, 64, 16, 16), 1 + 2**-12, device=device)
        kernel = torch.ones(64, 64, 1, 1, device=device)
        products = (matrix @ matrix)[0, 0].item() == 256.0
        convolutions = torch.nn.functional.conv2d(image, kernel)[0, 0, 0, 0].item() == 64.0
        assert (products, convolutions) == (rounded, rounded)
    finally:
        ModelPrecision("float32", device)
