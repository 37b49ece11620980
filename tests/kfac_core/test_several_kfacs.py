"""Promise: several KFACs in one process, also in threads, keep to their own models."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig

NOW = {"factor_decay": 0.0, "factor_update_steps": 1, "inverse_update_steps": 1, "loss_terms": "example"}


def _trained(seed: int, steps: int, at_once: threading.Barrier | None = None) -> list[Tensor]:
    """An attention's factors, of statistics that it takes while another thread takes its own."""
    generator = torch.Generator().manual_seed(seed)
    with _SEEDED:
        torch.manual_seed(seed)
        model = nn.MultiheadAttention(4, 2, batch_first=True).double()
        kfac = KFAC(model, KFACConfig.sc20(**NOW), lr=0.1)
    for _ in range(steps):
        model.zero_grad()
        x = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
        if at_once is not None:
            model.register_forward_pre_hook(lambda *_: _together(at_once))
        model(x, x, x, need_weights=False)[0].square().mean().backward()
        kfac.step()
    return list(kfac._factors.running.values())


def _together(barrier: threading.Barrier) -> None:
    """Both threads listen before either is told of a product."""
    barrier.wait(30)


_SEEDED = threading.Lock()


def test_attention_in_two_threads_has_the_statistics_of_each_thread():
    plain = functional.linear
    want = [_trained(seed, 1) for seed in (0, 1)]
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda seed: _trained(seed, 1, barrier), (0, 1)))
    for factors, wanted in zip(got, want, strict=True):
        for factor, alone in zip(factors, wanted, strict=True):
            torch.testing.assert_close(factor, alone, rtol=1e-12, atol=0)
    assert functional.linear is plain


def test_a_block_in_eval_mode_inside_of_attention_does_not_end_what_is_listened_to():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    kfac = KFAC(model, KFACConfig.sc20(**NOW), lr=0.1)
    inner = nn.MultiheadAttention(4, 2).double()
    other = KFAC(inner, KFACConfig.sc20(**NOW), lr=0.1)
    inner.eval()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    model.self_attn.register_forward_pre_hook(lambda *_: inner(x, x, x) and None)
    model(x).square().mean().backward()
    assert all(statistics.shares() is not None for statistics in kfac._capture.statistics)
    assert not any(statistics.shares() for statistics in other._capture.statistics)


def _made_and_removed(rank: int, world_size: int, overlap: bool, refreshes: int) -> list[tuple[int, ...]]:
    """Open files and threads of this rank after each KFAC."""
    counts = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    wrapped = nn.parallel.DistributedDataParallel(model)
    for _ in range(4):
        kfac = KFAC(wrapped, KFACConfig.sc20(**NOW, overlap_factors=overlap), lr=0.1)
        for _ in range(1 + refreshes):
            wrapped(torch.randn(3, 4)).square().mean().backward()
            kfac.step()
            if refreshes:
                kfac.refresh()
        kfac.remove()
        saved = kfac.state_dict()  # still there for the next one
        assert saved["steps"] == 1 + refreshes
        gc.collect()  # what tests before this one have left in the world
        counts.append((*(len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")),))
    return counts


@pytest.mark.parametrize("refreshes", [0, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_removed_kfac_leaves_no_process_group_behind(world, overlap, refreshes):
    for counts in world(2).run(_made_and_removed, overlap, refreshes):
        assert counts[3] == counts[2]
