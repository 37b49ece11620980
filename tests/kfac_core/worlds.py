"""Real worlds of processes for tests: started once per size; they run functions on every rank."""

from __future__ import annotations

import gc
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

START_SECONDS, RUN_SECONDS = 120, 240
PRELOADED = ("torch.distributed", "torch._dynamo", "pytest")
"""What tests import on ranks; torch's optimizers import its compiler. Every rank would take 2 CPU seconds."""


def rank_context(*preloaded: str) -> ForkServerContext:
    """Starts processes that have loaded torch and `preloaded`: forks of a process that has not used them."""
    context = mp.get_context("forkserver")  # a fork of one that has used torch can hang
    context.set_forkserver_preload([*PRELOADED, *preloaded])
    return context


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Make this process a rank of a world without other ranks: every collective returns at once."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()


class World:
    """`world_size` processes joined by Gloo; `run` calls a module-level function on each."""

    def __init__(self, world_size: int, *preloaded: str) -> None:
        context = rank_context(*preloaded)
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, world_size, store), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results by rank; a failure on any rank fails the test with that rank's traceback."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []  # all of them, or the next call would take one for its own
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(RUN_SECONDS):
                raise TimeoutError(f"rank {rank} gave no answer in {RUN_SECONDS} s")
            answers.append(pipe.recv())
        for rank, (ok, value) in enumerate(answers):
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()


def serve(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size,
            timeout=timedelta(seconds=RUN_SECONDS),
        )  # fmt: skip
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((True, function(rank, world_size, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
