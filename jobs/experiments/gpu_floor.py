"""What decides how fast K-FAC can be on a GPU: `python -m jobs.experiments.gpu_floor OUT [--device cpu]`.

Host costs of marks and launches, products by precision, eigenbases decomposed and refined, and steps of three
networks at the sizes of the goals, plain and with K-FAC. Writes a JSON file, and a CSV file for each table.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.bench.gpu.activity import known_waits
from harness.bench.gpu.findings import Findings, write_tables
from harness.bench.gpu.machine import describe
from harness.bench.gpu.nets import Encoder
from harness.bench.gpu.setting import Setting, spread
from harness.bench.gpu.subjects import BERT_BASE, Subject
from harness.bench.gpu.training_steps import FACTOR_STEPS, INVERSE_STEPS, KINDS, Steps
from harness.workloads.models.resnet import cifar_resnet, resnet32, resnet50
from kfac_core import KFACConfig, Phase
from kfac_core.kernels.matmul import tf32_products
from kfac_core.layers import find_layers
from kfac_core.timing.timer import PhaseTimer, seconds_per_entry

Product = Callable[[Tensor, Tensor], Tensor]
_CALLS = 500
_SHIFT = 1e-4
"""Of the largest eigenvalue, added to all while a basis is refined."""


def main() -> None:
    """Measure what there is time for, most important first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=180.0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    findings = Findings(given.out / "floor.json", {"part": "floor", **describe(given.device)})
    ends = time.monotonic() + given.seconds
    small = given.device == "cpu"
    setting = Setting("floor", torch.device(given.device), ends, findings, small=small)
    run(setting)
    findings.finish(complete=setting.complete)
    write_tables(given.out, "floor", findings.content["tables"])


def run(setting: Setting) -> None:
    """Host costs, all products and all bases of two networks, then steps."""
    _host_costs(setting)
    for name, shapes in networks(small=setting.small).items():
        _products(setting, name, shapes)
        if setting.has_time(f"bases of {name}", 10.0):
            _bases(setting, name, shapes)
    for name in ("resnet50, batch 64", "bert, 32 x 512 tokens, TF32", "resnet32, batch 512"):
        for solver in ("inverse", "eigen"):
            if setting.has_time(f"{name}, {solver}", 10.0):
                _steps(setting, name, solver)


def _steps(setting: Setting, name: str, solver: str) -> None:
    """Steps of each kind beside plain ones, and their mean at factors every 10 and solves every 100 steps."""
    gc.collect()
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if "TF32" in name else "ieee"  # of the network; K-FAC sets its own
    plain = Steps(setting, _subject(setting, name))
    base = spread(setting.seconds_of(plain.step, seconds=1.0))
    del plain
    steps = Steps(setting, _subject(setting, name), {"solver": solver})
    steps.step("full")
    seconds = {}
    for kind in KINDS:
        found = setting.seconds_of(partial(steps.step, kind), least=2, seconds=1.0)
        seconds[kind] = median(found)
        setting.findings.row("steps", network=name, solver=solver, kind=kind, **spread(found))
    steps.close()
    again = Steps(setting, _subject(setting, name))
    beside = (base["seconds"] + median(setting.seconds_of(again.step, seconds=1.0))) / 2
    updates = INVERSE_STEPS // FACTOR_STEPS
    period = (
        seconds["full"] + (updates - 1) * seconds["factor"] + (INVERSE_STEPS - updates) * seconds["plain"]
    )
    setting.findings.row(
        "of_plain", network=name, solver=solver, plain_seconds=beside, step_seconds=period / INVERSE_STEPS,
        ratio=period / INVERSE_STEPS / beside,
    )  # fmt: skip
    settings.fp32_precision = before


def _subject(setting: Setting, name: str) -> Subject:
    """A network of the goals with its batch, always the same."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        if name.startswith("bert"):
            layers, hidden, heads, vocabulary, examples, length = (
                (1, 16, 2, 64, 2, 8) if setting.small else (12, 768, 12, 30522, 32, 512)
            )
            model: nn.Module = Encoder(layers, hidden, heads, vocabulary, length)
            batch = torch.randint(0, vocabulary, (examples, length))
            labels, kfac = batch.roll(1).flatten(), {"skip": ("embeddings", "cls")}
        else:
            examples, side, classes = (64, 224, 1000) if name.startswith("resnet50") else (512, 32, 10)
            if setting.small:
                examples, side, model = 2, 16, cifar_resnet(8, classes, 8)
            else:
                model = resnet50() if name.startswith("resnet50") else resnet32()
            batch, kfac = torch.randn(examples, 3, side, side), {}
            labels = torch.arange(examples) % classes

    def loss() -> Tensor:
        return functional.cross_entropy(model(batch).float().flatten(0, -2), labels)

    return Subject(name, model, loss, kfac)


def networks(*, small: bool) -> dict[str, Counter[tuple[int, int]]]:
    """Number of layers by the sizes of A and G."""
    options = {key: value for key, value in BERT_BASE.items() if key != "sequence_length"}
    with torch.device("meta"):
        made: dict[str, nn.Module] = {"resnet50": resnet50(), "bert": Encoder(**options, length=128)}
    skipped = KFACConfig(skip=("embeddings", "cls"))
    found = {}
    for name, model in made.items():
        layers = find_layers(model, skipped if name == "bert" else KFACConfig())
        sizes = Counter((layer.shape.a.dim, layer.shape.g.dim) for layer in layers)
        found[name] = Counter({(20, 12): 2, (9, 12): 1}) if small else sizes
    return found


def _host_costs(setting: Setting) -> None:
    """Microseconds of the host for each call, the device idle at first."""
    one = torch.zeros(1, device=setting.device)
    calls: dict[str, Callable[[], object]] = {
        "a kernel of one element": partial(one.add_, 1.0),
        "torch.profiler.record_function": _in_range,
    }
    if setting.on_gpu:
        event, other = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        event.record()
        other.record()
        other.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                one.add_(1.0)
        calls |= {
            "a graph of 20 kernels of one element": graph.replay,
            "a new event": partial(torch.cuda.Event, enable_timing=True),
            "Event.record": event.record,
            "Event.query": other.query,
            "Event.elapsed_time": partial(event.elapsed_time, other),
            "nvtx.range": _in_nvtx_range,
        }
        setting.synchronize()
    for name, call in calls.items():
        setting.findings.row("host", call=name, microseconds=1e6 * _seconds_a_call(setting, call))
    for ranges in (False, True):
        timer = PhaseTimer(setting.device, ranges=ranges)
        timer.start()
        began = time.perf_counter()
        for _ in range(_CALLS):
            with timer.phase(Phase.FORWARD):
                pass
        seconds = time.perf_counter() - began
        timer.stop()
        name = f"PhaseTimer.phase{', ranges' if ranges else ''}"
        setting.findings.row("host", call=name, microseconds=1e6 * seconds / _CALLS)
    seconds = seconds_per_entry(setting.device)
    setting.findings.row("host", call="seconds_per_entry, with the reading", microseconds=1e6 * seconds)


def _seconds_a_call(setting: Setting, call: Callable[[], object]) -> float:
    """The least of five rounds."""
    rounds = []
    for _ in range(5):
        setting.synchronize()
        began = time.perf_counter()
        for _ in range(_CALLS):
            call()
        rounds.append(time.perf_counter() - began)
    setting.synchronize()
    return min(rounds) / _CALLS


def _in_range() -> None:
    with torch.profiler.record_function("kronscale.nothing"):
        pass


def _in_nvtx_range() -> None:
    with torch.cuda.nvtx.range("kronscale.nothing"):
        pass


def _ieee(one: Tensor, other: Tensor) -> Tensor:
    return one @ other


def _tf32(one: Tensor, other: Tensor) -> Tensor:
    with tf32_products(one, allowed=True):
        return one @ other


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """What TF32 keeps of float32 (11 bits), and the rest."""
    high = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return high, x - high


def _tf32x3(one: Tensor, other: Tensor) -> Tensor:
    """Three products in one: high and low parts side by side along the inner dimension."""
    (a, b), (c, d) = _parts(one.contiguous()), _parts(other.contiguous())
    return _tf32(torch.cat([a, a, b], -1), torch.cat([c, d, c], -2))


_PRODUCTS: dict[str, Product] = {"ieee": _ieee, "tf32": _tf32, "tf32x3": _tf32x3}


def _products(setting: Setting, network: str, shapes: Counter[tuple[int, int]]) -> None:
    """Preconditioning of all layers by explicit inverses (two products a layer) in each precision."""
    operands = [
        (
            _factors(setting, count, g), torch.randn(count, g, a, device=setting.device),
            _factors(setting, count, a),
        )
        for (a, g), count in shapes.items()
    ]  # fmt: skip
    flops = sum(2 * count * a * g * (a + g) for (a, g), count in shapes.items())
    for name, product in _PRODUCTS.items():
        seconds = spread(setting.seconds_of(partial(_all, product, operands), least=3, most=10, seconds=0.5))
        errors = []
        for left, middle, right in operands:
            exact = left[0].double() @ middle[0].double() @ right[0].double()
            errors.append(float((product(product(left, middle), right)[0] - exact).norm() / exact.norm()))
        setting.findings.row(
            "products", network=network, precision=name, **seconds, error=max(errors),
            flops_per_second=flops / seconds["seconds"],
        )  # fmt: skip
    del operands
    sizes = sorted(shapes.items(), key=lambda item: -item[0][0] * item[0][1] * item[1])[:4]
    for (a, g), count in sizes:  # one line for each of the largest groups
        left, middle = _factors(setting, count, g), torch.randn(count, g, a, device=setting.device)
        for name, product in _PRODUCTS.items():
            seconds = spread(setting.seconds_of(partial(product, left, middle), most=10, seconds=0.2))
            setting.findings.row(
                "product_shapes", network=network, count=count, a=a, g=g, precision=name, **seconds,
                flops_per_second=2 * count * a * g * g / seconds["seconds"],
            )  # fmt: skip


def _all(product: Product, operands: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    for left, middle, right in operands:
        product(product(left, middle), right)


def _factors(setting: Setting, count: int, size: int) -> Tensor:
    """Symmetric, eigenvalues from 1e-4 to 1, random bases: `[count, n, n]`."""
    vectors = torch.linalg.qr(torch.randn(size, size, device=setting.device))[0].expand(count, size, size)
    turns = torch.rand(count, 1, size, device=setting.device)
    values = torch.pow(10.0, -4 * turns)
    return torch.bmm(vectors * values, vectors.mT)


def _bases(setting: Setting, network: str, shapes: Counter[tuple[int, int]]) -> None:
    """All factors: eigh, and one refinement from the basis that was right before a tenth of them changed."""
    sizes: Counter[int] = Counter()
    for (a, g), count in shapes.items():
        sizes[a] += count
        sizes[g] += count
    for size, count in sorted(sizes.items()):
        before = _factors(setting, count, size)
        factors = 0.9 * before + 0.1 * _factors(setting, count, size)
        values, vectors = torch.linalg.eigh(before)
        row: dict[str, Any] = {"network": network, "size": size, "count": count}
        large = 0.0 if setting.small or size < 1024 else 0.3
        row["eigh_seconds"] = min(
            setting.seconds_of(partial(torch.linalg.eigh, factors), least=1, most=2, seconds=large)
        )
        row["off_before"] = _off(factors, vectors)
        for name, product in _PRODUCTS.items():
            work = partial(refined, factors, vectors, values, product)
            row[f"{name}_seconds"] = min(setting.seconds_of(work, least=2, most=3, seconds=0.3))
            row[f"{name}_off"] = _off(factors, work())
            row[f"{name}_orthogonality"] = _orthogonality(work())
        gram = factors + torch.eye(size, device=setting.device)
        row["cholesky_seconds"] = min(
            setting.seconds_of(partial(torch.linalg.cholesky_ex, gram), least=2, most=3, seconds=0.3)
        )
        solve = partial(
            torch.linalg.solve_triangular, torch.linalg.cholesky_ex(gram)[0], vectors.mT, upper=False
        )
        row["triangular_seconds"] = min(setting.seconds_of(solve, least=2, most=3, seconds=0.3))
        row["waits"] = known_waits(partial(refined, factors, vectors, values, _ieee)) if setting.on_gpu else 0
        setting.findings.row("bases", **row)


def refined(factors: Tensor, vectors: Tensor, values: Tensor, product: Product) -> Tensor:
    """One step of scaled and shifted orthogonal iteration, orthonormalised twice by Cholesky's factor.

    `Z = (A Q + s Q) / (lambda + s)` by columns is nearly orthonormal where Q is nearly right, so that the
    Gram matrix of Z is well conditioned, which that of A Q is not.
    """
    vectors, values = vectors.flip(-1), values.flip(-1).clamp_min(0).unsqueeze(-2)
    shift = _SHIFT * values[..., :1]
    basis = (product(factors, vectors) + shift * vectors) / (values + shift)
    for _ in range(2):
        lower, _ = torch.linalg.cholesky_ex(product(basis.mT, basis))
        basis = torch.linalg.solve_triangular(lower, basis.mT, upper=False).mT
    return basis


def _off(factors: Tensor, vectors: Tensor) -> float:
    """The largest share of a factor, of norms, that its basis leaves off the diagonal."""
    turned = (vectors.mT @ factors @ vectors).double()
    off = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    return float((off.norm(dim=(-2, -1)) / turned.norm(dim=(-2, -1))).max())


def _orthogonality(vectors: Tensor) -> float:
    eye = torch.eye(vectors.shape[-1], device=vectors.device)
    return float((vectors.mT @ vectors - eye).abs().max())


if __name__ == "__main__":
    main()
