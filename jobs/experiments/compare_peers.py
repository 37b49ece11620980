"""Our core beside two public K-FAC packages: same model, seed and data; the parameters after 20 steps.

    python jobs/experiments/compare_peers.py results/peers/side_by_side.csv \
        --gpauloski <checkout of gpauloski/kfac-pytorch> --lzhangbv <checkout of lzhangbv/kfac_pytorch>

A peer without an option is skipped. Nothing of the peers is installed or copied: separate processes import
them from plain checkouts, because both packages are called `kfac`. `peer_cases.py` lists the cases and the
convention that each switches. Exits with 1 if a row does not match its case.

On both sides the gradient is averaged over ranks explicitly and SGD has momentum, so only K-FAC differs.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peer_cases import Case, cases
from torch import Tensor, nn
from torch.nn import functional

import kfac_core.solvers.eigen
from harness.bench.peer_imports import imports_from
from kfac_core import KFAC, KFACConfig
from kfac_core.grams import dense
from kfac_core.layers import KroneckerLayer

STEPS, GLOBAL_BATCH, LR, MOMENTUM, KL_CLIP = 20, 32, 0.05, 0.9, 0.001
FACTOR_STEPS, INVERSE_STEPS = 2, 4
AGREES = {"float32": 1e-5, "float64": 1e-10}
WORLDS = (1, 2, 4)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        parameters: norm of the difference of the parameters over the norm of the peer's, after the last step.
        movement: the same difference over the distance that the peer's parameters moved.
        cosine: between both sides' preconditioned gradients of the last step.
        turn: cosine between our preconditioned and plain gradient there; at 1 K-FAC only rescaled.
    """

    model: str
    peer: str
    variant: str
    ranks: int
    dtype: str
    loss: str
    switched: str
    parameters: float
    movement: float
    cosine: float
    turn: float
    agrees: bool
    as_expected: bool
    explanation: str


def main() -> int:
    """Run the cases of all given peers and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--gpauloski", type=Path)
    parser.add_argument("--lzhangbv", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for peer in ("lzhangbv", "gpauloski"):
        checkout = getattr(arguments, peer)
        if checkout is None:
            print(f"{peer}: not given, left out")
            continue
        if not (checkout / "kfac" / "__init__.py").is_file():
            parser.error(f"--{peer} {checkout} is not a checkout: it has no kfac/__init__.py")
        for ranks in WORLDS:
            rows += _in_world(ranks, peer, checkout.resolve())
    with arguments.table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(_shown(row) for row in rows)
    odd = [row for row in rows if not row.as_expected]
    for row in odd:
        print("NOT AS EXPECTED", _shown(row))
    print(f"{len(rows)} rows, {sum(row.agrees for row in rows)} agree, {len(odd)} not as expected")
    return bool(odd)


def _shown(row: Row) -> dict[str, Any]:
    """Format a value: differences with three digits, a cosine by its distance from 1."""
    shown = asdict(row)
    for name in ("parameters", "movement"):
        shown[name] = f"{shown[name]:.2e}"
    for name in ("cosine", "turn"):
        shown[name] = f"{shown[name]:.6f}"
    return shown


def _in_world(ranks: int, peer: str, checkout: Path) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows"
        mp.spawn(_rank, (ranks, peer, str(checkout), folder, str(answer)), nprocs=ranks)
        rows: list[Row] = torch.load(answer, weights_only=False)  # written by our own rank 0 just now
    return rows


def _rank(rank: int, ranks: int, peer: str, checkout: str, folder: str, answer: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    make = {"lzhangbv": _make_lzhangbv, "gpauloski": _make_gpauloski}[peer](checkout)
    rows = []
    for case in cases(peer):
        if ranks in case.worlds:
            rows += [_compare(case, make, rank, ranks, dtype) for dtype in case.dtypes]
    if rank == 0:
        torch.save(rows, answer)
    dist.barrier()
    dist.destroy_process_group()


def _compare(case: Case, make: Callable[..., Any], rank: int, ranks: int, dtype: str) -> Row:
    arguments = case, rank, ranks, getattr(torch, dtype)
    start, theirs, their_gradient, _ = _train(make, *arguments)
    _, ours, our_gradient, plain = _train(_make_ours, *arguments)
    difference = (ours - theirs).norm()
    parameters = torch.stack([difference / theirs.norm()])
    dist.all_reduce(parameters, dist.ReduceOp.MAX)  # NaN stays NaN; the worst rank counts
    agrees = bool(parameters < AGREES[dtype])
    return Row(
        case.model, case.peer, case.variant, ranks, dtype, case.loss,
        " ".join(case.switches) or "as released",
        parameters.item(),
        (difference / (theirs - start).norm()).item(),
        functional.cosine_similarity(our_gradient, their_gradient, dim=0).item(),
        functional.cosine_similarity(our_gradient, plain, dim=0).item(),
        agrees, agrees == case.agrees, case.explanation,
    )  # fmt: skip


def _train(
    make: Callable[..., Any], case: Case, rank: int, ranks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parameters before and after, and the last step's gradient behind and before K-FAC."""
    torch.manual_seed(0)
    model = MODELS[case.model]().to(dtype)
    lr = LR if case.loss == "mean" else LR / GLOBAL_BATCH
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    kfac = make(model, case, optimizer, ranks)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    share = GLOBAL_BATCH // ranks
    mine = slice(rank * share, (rank + 1) * share)
    for step in range(STEPS):
        x, y = _batch(case.model, step, dtype)
        optimizer.zero_grad()
        functional.cross_entropy(model(x[mine]), y[mine], reduction=case.loss).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        plain = _gradient(model)
        kfac.step()
        preconditioned = _gradient(model)
        optimizer.step()
    kfac_core.solvers.eigen.SMALLEST_EIGENVALUE = SMALLEST
    return start, nn.utils.parameters_to_vector(model.parameters()).detach(), preconditioned, plain


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def _batch(model: str, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The global batch of a step; a fixed random map of the inputs labels them."""
    generator = torch.Generator().manual_seed(1 + step)
    x = torch.randn(GLOBAL_BATCH, *INPUTS[model], generator=generator, dtype=torch.float64)
    teacher = torch.Generator().manual_seed(99)
    labels = x.flatten(1) @ torch.randn(x[0].numel(), 4, generator=teacher, dtype=torch.float64)
    return x.to(dtype), labels.argmax(1)


def _linear() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 10, bias=False), nn.ReLU(), nn.Linear(10, 4)
    )


class _Faint(nn.Module):
    """Inputs so small that the eigenvalues of A, about 1e-11, are below our clamp."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 3e-6)


class _Tokens(nn.Module):
    """Linear layers on [batch, tokens, features], averaged over tokens before the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1)


def _conv() -> nn.Module:
    """Stride, padding and a non-square kernel, with and without bias."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(6, 4, (3, 2), padding=(0, 1)), nn.Tanh(),
        nn.Flatten(), nn.Linear(40, 4),
    )  # fmt: skip


def _conv_bn() -> nn.Module:
    """As in a residual network: no bias where BatchNorm follows, pooled to a Linear."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


MODELS = {"linear": _linear, "faint": _Faint, "tokens": _Tokens, "conv": _conv, "conv_bn": _conv_bn}
INPUTS = {"linear": (12,), "faint": (12,), "tokens": (5, 6), "conv": (2, 8, 8), "conv_bn": (2, 8, 8)}
SMALLEST = kfac_core.solvers.eigen.SMALLEST_EIGENVALUE


def _make_ours(model: nn.Module, case: Case, optimizer: torch.optim.Optimizer, ranks: int) -> KFAC:
    options = dict(case.options)
    if options.get("grad_worker_fraction") and ranks == 1:
        options["grad_worker_fraction"] = 1.0
    if "first_start" in case.switches:
        options["factor_start"] = "first"
    if "no_floor" in case.switches:
        kfac_core.solvers.eigen.SMALLEST_EIGENVALUE = 0.0
    config = KFACConfig.sc20(
        damping=case.damping,
        factor_decay=1 - case.factor_decay if "same_decay" in case.switches else case.factor_decay,
        kl_clip=KL_CLIP,
        factor_update_steps=FACTOR_STEPS,
        inverse_update_steps=INVERSE_STEPS,
        loss_reduction=case.loss,  # type: ignore[arg-type]
        **options,
    )
    kfac = KFAC(model, config, lr=optimizer)
    batch = GLOBAL_BATCH if "global_batch" in case.switches else GLOBAL_BATCH // ranks
    for layer in kfac._layers:
        if "gp_factor_scale" in case.switches:
            convolves = isinstance(layer.module, nn.Conv2d)
            _divide_factors(layer, lambda s, c=convolves: (s if c else 1, batch**2 * (s**4 if c else 1)))
        if "lz_token_mean" in case.switches:
            _divide_factors(layer, lambda _: (1, INPUTS[case.model][0] ** 2))
    return kfac


def _divide_factors(layer: KroneckerLayer, divisors: Callable[[int], tuple[float, float]]) -> None:
    """Divide A and G of `layer` by `divisors(S)`, with S its number of positions."""
    input_gram, output_gram, positions = layer.input_gram, layer.output_gram, layer.positions
    found: dict[str, int] = {}

    def look(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found["S"] = positions(inputs[0], output)[1]

    layer.module.register_forward_hook(look, prepend=True)  # before the hook that computes the grams
    layer.input_gram = lambda x: dense(input_gram(x)) / divisors(found["S"])[0]  # type: ignore[method-assign]
    layer.output_gram = lambda g: dense(output_gram(g)) / divisors(found["S"])[1]  # type: ignore[method-assign]


def _make_lzhangbv(checkout: str) -> Callable[..., Any]:
    with imports_from(checkout):
        import kfac  # noqa: PLC0415  the peer's
        import kfac.backend  # noqa: PLC0415

    kfac.backend.init("Torch")

    def make(model: nn.Module, case: Case, optimizer: torch.optim.Optimizer, _: int) -> Any:
        kind = kfac.get_kfac_module(case.variant)
        theirs = kind(
            model, lr=optimizer.param_groups[0]["lr"], damping=case.damping, kl_clip=KL_CLIP,
            fac_update_freq=FACTOR_STEPS, kfac_update_freq=INVERSE_STEPS, factor_decay=1 - case.factor_decay,
        )  # fmt: skip
        if "copied_damping" in case.switches:
            theirs._add_value_to_diagonal = lambda factor, value: (
                factor + value * torch.eye(len(factor), dtype=factor.dtype)
            )
        return theirs

    return make


def _make_gpauloski(checkout: str) -> Callable[..., Any]:
    with imports_from(checkout):
        import kfac  # noqa: PLC0415  the peer's

    fractions = {
        "comm": kfac.enums.DistributedStrategy.COMM_OPT,
        "mem": kfac.enums.DistributedStrategy.MEM_OPT,
        "hybrid": kfac.enums.DistributedStrategy.HYBRID_OPT,
    }

    def make(model: nn.Module, case: Case, optimizer: torch.optim.Optimizer, ranks: int) -> Any:
        strategy, method = case.variant.split()
        double = "double_solve" in case.switches
        for module in (kfac.layers.eigen, kfac.layers.inverse):
            module.torch = _DoubleTorch() if double else torch
        return kfac.preconditioner.KFACPreconditioner(
            model, factor_update_steps=FACTOR_STEPS, inv_update_steps=INVERSE_STEPS, damping=case.damping,
            factor_decay=case.factor_decay, kl_clip=KL_CLIP, lr=optimizer.param_groups[0]["lr"],
            compute_method=method, grad_worker_fraction=fractions[strategy],
            compute_eigenvalue_outer_product="no_prediv" not in case.switches,
            inv_dtype=torch.float64 if double else torch.float32, **case.peer_options,
        )  # fmt: skip

    return make


class _DoubleTorch:
    """`torch` with `float32` replaced by float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


if __name__ == "__main__":
    sys.exit(main())
