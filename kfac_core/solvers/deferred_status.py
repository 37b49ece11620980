"""Decompositions whose status is read later, together with others.

torch's `eigh` gets a status from cuSOLVER or LAPACK, and reads it at once in an operator of its own,
`_linalg_check_errors`: the host waits for the device in every call. While statuses are deferred, another
kernel of that operator keeps them instead. It is registered for the time of the block, for one kind of
device; calls of other threads are checked at once, as before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kfac_core.solvers.solver import LinAlgError

_OPERATOR = "_linalg_check_errors"


@contextmanager
def deferred_status(like: Tensor) -> Iterator[list[Tensor]]:
    """A list that receives the status of each decomposition on the device of `like`, by matrix: 0 is success.

    LAPACK and MAGMA leave out the matrices of a call after one that fails: their results are undefined, and
    their status is 0.

    The list stays empty, and decompositions raise as always, under a torch that has no such operator.
    """
    statuses: list[Tensor] = []
    caller = threading.get_ident()

    def keep(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
        if threading.get_ident() == caller:
            statuses.append(info)
        elif info.any():
            raise LinAlgError(f"{api_name}: failed with status {info.flatten().tolist()}, {is_matrix=}")

    if not hasattr(torch.ops.aten, _OPERATOR):
        yield statuses
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(_OPERATOR, keep, like.device.type.upper())
        yield statuses
