"""Promise: decompositions fail as always, but for a block in which one thread reads their status later."""

import threading

import pytest
import torch

from kfac_core.second_order import deferred_status
from kfac_core.solvers import LinAlgError


def broken(count: int, *places: int) -> torch.Tensor:
    matrices = torch.eye(3).repeat(count, 1, 1)
    matrices[list(places)] = float("nan")
    return matrices


def test_statuses_are_kept_and_nothing_is_raised():
    with deferred_status(torch.empty(0)) as statuses:
        torch.linalg.eigh(broken(4, 1))
        torch.linalg.eigh(broken(1))
    assert [(status != 0).flatten().tolist() for status in statuses] == [[False, True, False, False], [False]]


def test_decompositions_raise_again_after_the_block_and_after_an_error_in_it():
    with deferred_status(torch.empty(0)):
        pass
    with pytest.raises(LinAlgError):
        torch.linalg.eigh(broken(1, 0))
    with pytest.raises(ZeroDivisionError), deferred_status(torch.empty(0)):
        raise ZeroDivisionError
    with pytest.raises(LinAlgError):
        torch.linalg.eigh(broken(1, 0))


def test_another_thread_is_told_at_once():
    raised: list[Exception] = []

    def decompose() -> None:
        torch.linalg.eigh(broken(1))
        try:
            torch.linalg.eigh(broken(2, 1))
        except LinAlgError as error:
            raised.append(error)

    with deferred_status(torch.empty(0)) as statuses:
        thread = threading.Thread(target=decompose)
        thread.start()
        thread.join()
    assert statuses == []
    assert "linalg.eigh" in str(raised[0])


def test_without_the_operator_decompositions_raise(monkeypatch):
    monkeypatch.setattr("kfac_core.second_order._OPERATOR", "_no_such_operator")
    with deferred_status(torch.empty(0)) as statuses, pytest.raises(LinAlgError):
        torch.linalg.eigh(broken(1, 0))
    assert statuses == []
