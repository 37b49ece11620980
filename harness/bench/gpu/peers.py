"""Steps of two public K-FAC packages, from plain checkouts, with the settings of `training_steps`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.bench.gpu.peer_imports import imports_from
from harness.bench.gpu.training_steps import FACTOR_STEPS, INVERSE_STEPS, KINDS, Other

_DAMPING, _DECAY, _KL_CLIP, _LR = 0.003, 0.95, 0.001, 0.1


def make(name: str, checkout: str, solver: str, model: nn.Module, skip: Sequence[str]) -> Other:
    """What `Steps` calls before the forward and after the backward pass of `model`.

    `name`: `gpauloski` (github.com/gpauloski/kfac-pytorch) or `lzhangbv` (github.com/lzhangbv/kfac_pytorch).
    `checkout` the folder with its package `kfac`; `skip` are patterns of layers that it leaves out.
    """
    return {"gpauloski": _gpauloski, "lzhangbv": _lzhangbv}[name](checkout, solver, model, skip)


def _gpauloski(checkout: str, solver: str, model: nn.Module, skip: Sequence[str]) -> Other:
    with imports_from(checkout):
        enums, preconditioner = import_module("kfac.enums"), import_module("kfac.preconditioner")
    theirs: Any = preconditioner.KFACPreconditioner(
        model, factor_update_steps=FACTOR_STEPS, inv_update_steps=INVERSE_STEPS, damping=_DAMPING,
        factor_decay=_DECAY, kl_clip=_KL_CLIP, lr=_LR,
        compute_method={"eigen": enums.ComputeMethod.EIGEN, "inverse": enums.ComputeMethod.INVERSE}[solver],
        skip_layers=[f"^{each}" for each in skip],
    )  # fmt: skip

    def prepare(kind: str) -> None:
        theirs._steps = KINDS[kind]

    return prepare, theirs.step


def _lzhangbv(checkout: str, solver: str, model: nn.Module, skip: Sequence[str]) -> Other:
    if skip:
        raise ValueError("it takes no list of layers to skip")
    if not dist.is_initialized():  # it cannot do without
        on_gpu = next(model.parameters()).is_cuda
        dist.init_process_group("nccl" if on_gpu else "gloo", store=HashStore(), rank=0, world_size=1)
    with imports_from(checkout):
        package = import_module("kfac")
        import_module("kfac.backend").init("Torch")
    theirs: Any = package.get_kfac_module(solver)(
        model, lr=_LR, damping=_DAMPING, fac_update_freq=FACTOR_STEPS, kfac_update_freq=INVERSE_STEPS,
        kl_clip=_KL_CLIP, factor_decay=1 - _DECAY,
    )  # fmt: skip
    first = [True]

    def prepare(kind: str) -> None:
        theirs.steps = 0 if first[0] else {**KINDS, "full": INVERSE_STEPS}[kind]  # step 0 makes their buffers
        first[0] = False

    return prepare, theirs.step
