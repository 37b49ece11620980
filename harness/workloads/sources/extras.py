"""Optional libraries, each part of an extra of this package."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def import_extra(module: str, needed_by: str, extra: str, alternative: str = "") -> ModuleType:
    """Import an optional library.

    Args:
        module: its name.
        needed_by: the option or workload that needs it, for the error message.
        extra: the extra that installs it.
        alternative: end of the error message: what else the user can do.

    Raises:
        ModuleNotFoundError: it is missing, or (torchvision) built for another version of torch.
    """
    try:
        return import_module(module)
    except (ImportError, RuntimeError) as error:  # torchvision for another torch lacks operators
        reason = " ".join(str(error).split())
        raise ModuleNotFoundError(
            f"{needed_by} needs {module.partition('.')[0]}: pip install 'kronscale[{extra}]'{alternative} "
            f"({reason})"
        ) from None
