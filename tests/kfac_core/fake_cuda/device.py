"""Loads a CUDA device without data and records what a step asks of it: waits, launches, memory, products.

Import this before torch, in a process of its own: the device stays for the life of the process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import tempfile
import zlib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def load_device() -> None:
    """Compile the guard against this torch, once a user and torch version, and load it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_dir = Path(spec.origin).parent
    name = f"{os.getuid()}-{zlib.crc32(bytes(torch_dir))}-{(HERE / 'guard.cpp').stat().st_mtime_ns}"
    library = Path(tempfile.gettempdir()) / f"fake-cuda-{name}.so"
    if not library.exists():
        includes = [f"-I{torch_dir}/include", f"-I{torch_dir}/include/torch/csrc/api/include"]
        half = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", *includes, str(HERE / "guard.cpp"), "-o",
            str(half),
             f"-L{torch_dir}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_dir}/lib"],
            check=True, capture_output=True,
        )  # fmt: skip
        half.rename(library)
    ctypes.CDLL(str(library))


load_device()

# ruff: noqa: E402  torch must find the device when it is imported
import traceback
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NO_KERNEL = frozenset({
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "detach", "device", "empty",
    "empty_like", "empty_strided", "is_same_size", "lift", "lift_fresh", "new_empty", "new_empty_strided",
    "record_stream", "resize_", "set_", "sym_size", "view",
})  # fmt: skip
_WAITS_INSIDE = frozenset({  # ATen/native/cuda: sizes that depend on data, and status codes that are checked
    "_linalg_check_errors", "_linalg_eigh", "_unique2", "bincount", "cholesky_inverse", "equal", "is_nonzero",
    "masked_select", "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim",
})  # fmt: skip
_GEMMS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm"})
_CHUNK, _BLOCKS = 65536, 320  # ATen/native/cuda/MultiTensorApply.cuh
_MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # of one launch, by the number of tensor lists
_CAT_INPUTS = 128  # ATen/native/cuda/Shape.cu
_ALIGNMENT = 512  # of torch's caching allocator


class Watch(TorchDispatchMode):
    """Records what happens to `cuda` tensors, above a FakeTensorMode.

    Attributes:
        waits: times the host waits for the device, by (phase, reason, place in the code).
        launches: kernels, by (phase, operator); decompositions and convolutions count as one.
        gemms: products as cuBLAS is called, by phase.
        tf32: products while TF32 is allowed, by phase.
        transient: by phase, the largest bytes allocated above those at its beginning.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "other"
        self.transient: dict[str, int] = {}
        self._live = self._base = 0
        self._storages: set[int] = set()
        self.clear()

    def clear(self) -> None:
        """Forget all counts."""
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.launches: Counter[tuple[str, str]] = Counter()
        self.gemms: Counter[str] = Counter()
        self.tf32: Counter[str] = Counter()
        self.transient.clear()

    def enter(self, phase: str) -> None:
        """Book what follows on `phase`; a phase timer's observer."""
        self.phase, self._base = phase, self._live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(tensor.is_cuda for tensor in tensors)
        self._count_waits(name, tensors, args, kwargs, on_device=on_device)
        if name == "_local_scalar_dense":
            return tensors[0].dtype == torch.bool  # finite, and no update refused
        if name == "_linalg_check_errors":
            return None
        if name == "bincount":  # its size depends on data for torch, not where every token is below minlength
            self.launches[self.phase, name] += 1
            return args[0].new_empty(kwargs.get("minlength", args[-1]), dtype=torch.long)
        result = func(*args, **kwargs)
        self._book_memory(result)
        target = kwargs.get("device")
        made = target is not None and torch.device(target).type == "cuda"
        if (on_device or made) and not (func.is_view or name in _NO_KERNEL or func.namespace == "c10d"):
            self.launches[self.phase, name] += _launches(name, args, tensors)
            if name in _GEMMS:
                self.gemms[self.phase] += _launches(name, args, tensors)
                self.tf32[self.phase] += torch.backends.cuda.matmul.fp32_precision == "tf32"
        return result

    def _count_waits(
        self, name: str, tensors: Sequence[Tensor], args: Any, kwargs: Any, *, on_device: bool
    ) -> None:
        kinds = [tensor.device.type for tensor in tensors]
        reason = ""
        if name == "_linalg_eigh" and _defers_status():
            reason = ""
        elif name in _WAITS_INSIDE or name == "_local_scalar_dense":
            reason = name if on_device else ""
        elif name == "_to_copy" and kwargs.get("device") is not None and tensors:
            to = torch.device(kwargs["device"]).type
            reason = f"{kinds[0]} to {to}" if kinds[0] != to and not kwargs.get("non_blocking") else ""
        elif name == "copy_" and len(set(kinds)) > 1:
            quick = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            reason = "" if quick else f"{kinds[1]} to {kinds[0]}"
        elif name in ("index", "index_put", "index_put_") and on_device:
            masks = any(tensor.dtype == torch.bool for tensor in tensors[1:])
            reason = "index by mask" if masks else ""
        if reason:
            self.waits[self.phase, reason, _place()] += 1

    def _book_memory(self, result: Any) -> None:
        for tensor in tree_leaves(result):
            if not (isinstance(tensor, Tensor) and tensor.is_cuda):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._storages:
                continue
            size = -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
            self._storages.add(storage._cdata)
            self._live += size
            weakref.finalize(storage, self._free, storage._cdata, size)
            rise = self._live - self._base
            self.transient[self.phase] = max(rise, self.transient.get(self.phase, 0))

    def _free(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self._live -= size


def _defers_status() -> bool:
    """Whether the operator by which torch reads a decomposition's status has been replaced."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_linalg_check_errors", "CUDA")


def _launches(name: str, args: Any, tensors: Sequence[Tensor]) -> int:
    """Kernels of one operator on CUDA."""
    if name == "addbmm":
        return int(args[1].shape[0])  # ATen/native: a GEMM for each batch
    if name == "im2col":
        return int(args[0].shape[0])  # a kernel for each image
    if name == "constant_pad_nd":
        return 2  # fills, then copies
    if name in ("cat", "stack"):
        return -(-len(tensors) // _CAT_INPUTS)
    if name.startswith("_foreach_"):
        return _multi_tensor_launches(args)
    return 1


def _multi_tensor_launches(args: Any) -> int:
    """Of an operator on lists: fused where all tensors at one place of the lists are laid out alike."""
    lists = [each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], Tensor)]
    alike = all(
        len({(t.shape, t.stride(), t.dtype) for t in place}) == 1 and _is_dense(place[0])
        for place in zip(*lists, strict=True)
    )
    if not alike or len({tensor.dtype for tensor in lists[0]}) > 1:
        return len(lists[0])
    chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in lists[0])
    most = _MOST_TENSORS[min(len(lists) + 1, 5)]
    return max(-(-chunks // _BLOCKS), -(-len(lists[0]) // most))


def _is_dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _place() -> str:
    """File and line in this project that asked for an operator."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path.parts[len(ROOT.parts)] in ("kfac_core", "harness"):
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "outside"


def pretend_cuda() -> None:
    """What torch's Python asks a real device: its capability, its number, and whose memory a tensor is in."""
    real = Tensor.data_ptr
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda device=None: "fake"
    torch.cuda.Event = _Event
    Tensor.data_ptr = lambda self: _address(self) if isinstance(self, FakeTensor) else real(self)


class _Event:
    """Reached at once."""

    def record(self) -> None:
        """Nothing is queued."""

    def query(self) -> bool:
        """Nobody waits."""
        return True


def _address(tensor: Tensor) -> int:
    """Different for different memory; a fake tensor's own answer is zero."""
    return int(tensor.untyped_storage()._cdata) + tensor.storage_offset() * tensor.element_size()
