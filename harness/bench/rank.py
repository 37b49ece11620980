"""What the ranks of all benchmarks share; `harness.bench.start` starts them."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.training.malloc import keep_freed_memory


@dataclass(frozen=True)
class Rank:
    """One rank of a benchmark; `folder` has the files of all ranks."""

    number: int
    options: dict[str, Any]
    folder: Path

    @classmethod
    def join(cls, description: str | None) -> Rank:
        """Join the other ranks, as the command line says; over Gloo unless the options name a backend."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("options", type=Path)
        parser.add_argument("--rank", type=int, required=True)
        given = parser.parse_args()
        options, folder = json.loads(given.options.read_text()), given.options.parent
        torch.set_num_threads(options["threads"])
        keep_freed_memory()
        if (ranks := options["ranks"]) > 1:
            store = FileStore(str(folder / "store"), ranks)
            backend = options.get("backend", "gloo")
            dist.init_process_group(backend, store=store, rank=given.rank, world_size=ranks)
        return cls(given.rank, options, folder)

    def finish(self, figures: object) -> None:
        """Write the figures beside the options, and wait for the other ranks."""
        (self.folder / f"rank-{self.number}.json").write_text(json.dumps(figures))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
