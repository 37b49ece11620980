"""Distributed K-FAC as a library.

    from kfac_core import KFAC, KFACConfig

    kfac = KFAC(model, KFACConfig(), lr=optimizer)
    ...
    loss.backward()
    kfac.step()
    optimizer.step()

`KFAC` is loaded on first use, so that a login node can import `kfac_core.config` and `kfac_core.placement`
without torch.
"""

from typing import TYPE_CHECKING, Any

from kfac_core.config import KFACConfig
from kfac_core.errors import ConfigError, PlacementError
from kfac_core.phases import Phase

if TYPE_CHECKING:
    from kfac_core.preconditioner import KFAC

__all__ = ["KFAC", "ConfigError", "KFACConfig", "Phase", "PlacementError"]


def __getattr__(name: str) -> Any:
    if name == "KFAC":
        from kfac_core.preconditioner import KFAC  # noqa: PLC0415  torch is imported only with K-FAC

        return KFAC
    raise AttributeError(f"module 'kfac_core' has no attribute {name!r}")
