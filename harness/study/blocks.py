"""Runs a sweep block by block, each on one machine, and archives every complete block.

A block contains every arm once: the cells of one world size and seed and, where a sweep tunes, trial. What
disturbs a machine for an hour then disturbs all arms alike, and a study can be continued on another machine
without a block that spans two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cell import Cell
from harness.errors import StoreError
from harness.runs.archive import SUFFIX, read_manifest, write_archive
from harness.runs.store import SweepFolder
from harness.runs.stored_files import STRICT, read_as, with_checksum, write_atomically
from harness.study.cell_states import stored_states
from harness.study.start_cells import in_blocks

_SET_ASIDE = "set-aside"


@dataclass(frozen=True)
class Block:
    """Cells that run on one machine, one after the other.

    Attributes:
        name: `p2-seed-3`, or `p2-seed-1000-trial-05`.
    """

    name: str
    cells: tuple[Cell, ...]

    def archive(self, into: Path) -> Path:
        """The file that the block is archived in."""
        return into / f"{self.cells[0].sweep}-{self.name}{SUFFIX}"


@dataclass(frozen=True)
class _Marker:
    """The content of `blocks/<name>.json`: the machine that began the block last."""

    __pydantic_config__ = STRICT
    machine: str


def blocks_of(cells: Sequence[Cell]) -> list[Block]:
    """The blocks of a sweep in the order of their run: by trial, seed and world size."""
    found: dict[tuple[int, int, int], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.trial or 0, cell.seed, cell.world_size), []).append(cell)
    return [
        Block(f"p{size}-seed-{seed}" + (f"-trial-{trial:02}" if trial else ""), tuple(in_blocks(own)))
        for (trial, seed, size), own in sorted(found.items())
    ]


def open_blocks(blocks: Sequence[Block], into: Path) -> list[Block]:
    """The blocks without an archive in `into`.

    Raises:
        StoreError: an archive lacks a cell of its block, because the sweep was changed since.
    """
    found = []
    for block in blocks:
        path = block.archive(into)
        if not path.exists():
            found.append(block)
            continue
        archived = {cell.id for cell in read_manifest(path).cells}
        if missing := [cell.id for cell in block.cells if cell.id not in archived]:
            raise StoreError(
                f"{path} lacks {len(missing)} of the block's {len(block.cells)} cells, such as {missing[0]}: "
                "the sweep was changed after the block had run; give the changed one another name"
            )
    return found


def run_blocks(
    blocks: Sequence[Block],
    folder: SweepFolder,
    into: Path,
    minutes: float,
    run_cell: Callable[[Cell], None],
    clock: Callable[[], float],
    machine: str,
) -> Iterator[Block]:
    """Run blocks, one cell at a time, while the next one is expected to end in time; yield each as it ends.

    Args:
        blocks: to run, in order; the first one is always begun.
        folder: of the sweep's runs.
        into: folder of the archives.
        minutes: after which no block should be running. A block is expected to take as long as the longest
            one of this call.
        run_cell: starts a cell that has not completed, and returns when it has ended.
        clock: seconds.
        machine: identity of this machine. What another one began and did not complete is set aside.

    Raises:
        StoreError: a cell did not complete; its block can be continued on this machine. Or the file that
            names the machine of a block is damaged.
    """
    start, longest = clock(), 0.0
    for block in blocks:
        begun = clock()
        if begun - start + longest > minutes * 60 and longest:
            return
        _begin(folder, block, machine)
        for cell in block.cells:
            if cell.id in _not_completed(folder, block):
                run_cell(cell)
        if missing := _not_completed(folder, block):
            raise StoreError(
                f"{folder.path}: {len(missing)} of {len(block.cells)} cells of block {block.name} did not "
                f"complete, such as {missing[0]}; the same command continues the block on this machine"
            )
        write_archive(folder, [folder.cell_folder(cell) for cell in block.cells], block.archive(into))
        longest = max(longest, clock() - begun)
        yield block


def _begin(folder: SweepFolder, block: Block, machine: str) -> None:
    """Note that the block runs on this machine, and set aside what another one has left incomplete."""
    marker = folder.path / "blocks" / f"{block.name}.json"
    marker.parent.mkdir(parents=True, exist_ok=True)
    if marker.exists() and read_as(_Marker, marker).machine != machine and _not_completed(folder, block):
        _set_aside(folder, block)
    write_atomically(marker, with_checksum({"machine": machine}))


def _set_aside(folder: SweepFolder, block: Block) -> None:
    number = 1
    while (place := folder.path / _SET_ASIDE / f"{block.name}-{number}").exists():
        number += 1
    for cell in block.cells:
        if (stored := folder.cell_folder(cell).path).is_dir():
            place.mkdir(parents=True, exist_ok=True)
            stored.rename(place / stored.name)


def _not_completed(folder: SweepFolder, block: Block) -> list[str]:
    states = stored_states(folder, block.cells)
    return [cell.id for cell, stored in states if stored.state != "COMPLETED"]


def this_machine() -> str:
    """Identity of this machine since it was started; a name such as `vm` may be that of many."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
