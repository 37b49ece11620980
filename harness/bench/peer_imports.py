"""Imports public K-FAC packages from plain checkouts; several of them have the same name, `kfac`."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def imports_from(checkout: str | Path) -> Iterator[None]:
    """Import `kfac` from `checkout`; afterwards `sys.modules` holds no module of that name.

    lzhangbv's package imports horovod even for its torch backend, so a stub replaces it. gpauloski's reads
    its installed version at import.
    """
    version = importlib.metadata.version
    horovod, horovod_torch = types.ModuleType("horovod"), types.ModuleType("horovod.torch")
    horovod_torch.synchronize = lambda _: None  # type: ignore[attr-defined]
    horovod.torch = horovod_torch  # type: ignore[attr-defined]
    sys.modules.update({"horovod": horovod, "horovod.torch": horovod_torch})
    importlib.metadata.version = lambda distribution_name: (
        "0" if distribution_name == "kfac-pytorch" else version(distribution_name)
    )
    sys.path.insert(0, str(checkout))
    try:
        yield
    finally:
        sys.path.remove(str(checkout))
        importlib.metadata.version = version
        for name in [name for name in sys.modules if name.split(".")[0] == "kfac"]:
            del sys.modules[name]
