"""Sums of outer products, layer by layer: the form that K-FAC takes on a GPU beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.bench.gpu.setting import Setting, spread, without_tf32
from harness.bench.gpu.subjects import subject
from kfac_core import device_grams
from kfac_core.convolution import Geometry
from kfac_core.device_grams import DeviceGrams

_PIECES = (1 << 22, 1 << 24, 1 << 26, 1 << 28)
_LIMITS = {"float32": 1e-5, "tf32": 2e-3, "bfloat16": 5e-3}


@dataclass(frozen=True)
class Case:
    """One layer's inputs or output gradients.

    Attributes:
        layers: of the network that have this shape.
        kind: `a` or `g`.
        rows: `[B, C, H, W]`, or `[count, n]` of a linear layer.
        geometry: of the windows; None for pixels and rows.
    """

    network: str
    layers: int
    kind: str
    rows: Tensor
    geometry: Geometry | None

    @property
    def name(self) -> str:
        """The shape, and the kernel of a convolution's A."""
        size = "x".join(map(str, self.rows.shape))
        if self.geometry is None:
            return f"{self.kind} of {size}"
        kernel, stride = self.geometry.kernel, self.geometry.stride
        return f"a of {size}, kernel {kernel[0]}x{kernel[1]}, stride {stride[0]}"


def run(setting: Setting) -> None:
    """Every distinct shape of the three networks in every form that can do it."""
    without_tf32()
    setting.findings.note(
        "`forms` decides the forms in `kernels/device_grams.py` (`of_pixels`: a product an image where an "
        "image has at least as many pixels as channels; `_PIECE_ELEMENTS`), and what `gram_precision` saves"
    )
    for network in ("resnet50", "resnet32", "bert"):
        for case in cases(setting, network):
            if not setting.has_time(f"{network} from {case.name} on"):
                return
            _measure(setting, case)


def cases(setting: Setting, network: str) -> Iterator[Case]:
    """Distinct shapes of inputs and output gradients, from one forward pass."""
    found = subject(network, setting.device, small=setting.small)
    shapes: dict[tuple[str, torch.Size, Geometry | None], int] = {}

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        conv = isinstance(module, nn.Conv2d)
        geometry = _geometry(module) if isinstance(module, nn.Conv2d) else None
        pairs = [("a", inputs[0], geometry), ("g", output, None)]
        for kind, tensor, windows in pairs:
            size = tensor.shape if conv else tensor.flatten(0, -2).shape
            shapes[kind, size, windows] = shapes.get((kind, size, windows), 0) + 1

    skipped = tuple(found.kfac.get("skip", ()))
    handles = [
        module.register_forward_hook(record)
        for name, module in found.model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear) and not name.startswith(skipped or ("\0",))
    ]
    with torch.no_grad():
        found.loss()
    for handle in handles:
        handle.remove()
    for (kind, size, geometry), count in shapes.items():
        rows = torch.randn(size, device=setting.device)
        yield Case(network, count, kind, rows, geometry)


def forms(case: Case, *, on_gpu: bool) -> dict[str, tuple[str, Callable[[], Tensor]]]:
    """By name: the precision of its operands, and the form itself, which returns `[1, n, n]`."""
    found: dict[str, tuple[str, Callable[[], Tensor]]] = {}
    for precision in (None, "tf32", "bfloat16") if on_gpu else (None,):
        grams = DeviceGrams(torch.float32, precision)
        found[f"chosen, {precision or 'float32'}"] = precision or "float32", partial(_chosen, grams, case)
    if case.rows.ndim == 4:
        grams, channels_last = DeviceGrams(torch.float32), torch.channels_last
        last = Case(
            case.network, case.layers, case.kind, case.rows.contiguous(memory_format=channels_last),
            case.geometry,
        )  # fmt: skip
        found["chosen, channels last"] = "float32", partial(_chosen, grams, last)
        found["columns of unfold, a product an image"] = "float32", partial(_unfolded, case)
        found["addbmm"] = "float32", partial(_addbmm, case)
        if case.geometry is None:
            found["one product over copied pixels"] = (
                "float32",
                partial(grams.of_patches, case.rows, Geometry((1, 1))),
            )
    return found


def _measure(setting: Setting, case: Case) -> None:
    columns = _columns(case).double()
    exact = (columns @ columns.mT).sum(0)
    del columns
    worst, of = 0.0, ""
    for form, (precision, work) in forms(case, on_gpu=setting.on_gpu).items():
        error = float((work().double() - exact).norm() / exact.norm())
        _row(setting, case, form, work, error)
        if not error / _LIMITS[precision] <= worst:  # also where it is not a number
            worst, of = error / _LIMITS[precision], form
    if case.geometry is not None and setting.on_gpu:
        before = device_grams._PIECE_ELEMENTS
        for elements in _PIECES:
            device_grams._PIECE_ELEMENTS = elements
            work = partial(_chosen, DeviceGrams(torch.float32), case)
            _row(setting, case, f"chosen, pieces of {elements} elements", work, None)
        device_grams._PIECE_ELEMENTS = before
    setting.findings.check(
        f"{case.network}, {case.name}: every form is as exact as its precision",
        f"{of} has {worst:.2g} of the error that is allowed", passed=worst <= 1,
    )  # fmt: skip


def _row(setting: Setting, case: Case, form: str, work: Callable[[], Tensor], error: float | None) -> None:
    base = torch.cuda.memory_allocated() if setting.on_gpu else 0
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = setting.seconds_of(work, least=3, most=5, seconds=0.05)
    peak = torch.cuda.max_memory_allocated() - base if setting.on_gpu else None
    setting.findings.row(
        "forms", network=case.network, case=case.name, layers=case.layers, form=form, **spread(seconds),
        error=error, transient_bytes=peak,
    )  # fmt: skip


def _chosen(grams: DeviceGrams, case: Case) -> Tensor:
    """As the layers call it."""
    if case.rows.ndim == 2:
        return grams.of_rows(case.rows)
    if case.geometry is None or case.geometry == Geometry((1, 1)):
        return grams.of_pixels(case.rows, 1)
    return grams.of_patches(case.rows, case.geometry)


def _unfolded(case: Case) -> Tensor:
    columns = _columns(case)
    return torch.bmm(columns, columns.mT).sum(0, keepdim=True)


def _addbmm(case: Case) -> Tensor:
    columns = _columns(case)
    n = columns.shape[1]
    return torch.addbmm(columns.new_zeros(n, n), columns, columns.mT, beta=0).unsqueeze(0)


def _columns(case: Case) -> Tensor:
    """Patches, pixels or rows as columns, `[B, n, positions]`."""
    if case.rows.ndim == 2:
        return case.rows.mT.unsqueeze(0)
    if case.geometry is None:
        return case.rows.flatten(2)
    padding = case.geometry.padding[2], case.geometry.padding[0]
    return functional.unfold(
        case.rows, case.geometry.kernel, case.geometry.dilation, padding, case.geometry.stride
    )


def _geometry(conv: nn.Conv2d) -> Geometry:
    """Of a convolution with symmetric padding."""
    assert not isinstance(conv.padding, str)  # noqa: S101  the networks here give numbers
    (down, across), stride, dilation = conv.padding, conv.stride, conv.dilation
    kernel = conv.kernel_size
    return Geometry(
        (kernel[0], kernel[1]), (stride[0], stride[1]), (dilation[0], dilation[1]), 1,
        (across, across, down, down),
    )  # fmt: skip
