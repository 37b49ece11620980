"""Starts cells: whether site and budget allow it, a new attempt of each, in which order they are launched.

`harness.launchers.resuming` says what an attempt resumes. If one attempt of a submission cannot be launched,
all are withdrawn.
"""

from __future__ import annotations

import random
import secrets
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from harness.cell import Cell
from harness.errors import StoreError
from harness.launchers import LAUNCHERS
from harness.launchers.cost import CostEstimate, open_budget
from harness.launchers.launch import WORKER_COMMAND, Launch
from harness.launchers.resuming import continued_attempts, discard, refuse_change
from harness.launchers.site_profile import Site
from harness.runs.store import Attempt, CellFolder, SweepFolder
from harness.study.cell_states import stored_state


@dataclass(frozen=True)
class Terms:
    """Under what terms cells may start.

    Attributes:
        command: starts one rank.
        budget: upper limit of the cost of one start of each, in GPU-hours if the site has GPUs, else in
            core-hours, and of all starts together where runs continue by themselves; None for no limit.
        ask: whether a cost above the threshold is refused, so that somebody can be asked.
        resume: whether they continue from the newest checkpoint of earlier attempts.
        change_site: whether a run may continue at another site, launcher or kind of node.
    """

    command: Sequence[str] = WORKER_COMMAND
    budget: float | None = None
    ask: bool = False
    resume: bool = False
    change_site: bool = False


def start_cells(cells: Sequence[Cell], site: Site, folder: SweepFolder, terms: Terms) -> CostEstimate:
    """Give each cell a new attempt and launch all; the caller holds the submit lock.

    Returns:
        Upper bound of their cost.

    Raises:
        UserError: as `harness.study.submit.submit`; nothing is submitted.
    """
    if not cells:
        return CostEstimate()
    launcher = LAUNCHERS[site.launcher]
    for cell in cells:
        launcher.check(cell, site)
    cost = launcher.estimate_cost(cells, site)
    cost.refuse_beyond(terms.budget)
    if terms.ask and terms.budget is None:
        cost.refuse_unasked()
    continued = continued_attempts(cells, folder) if terms.resume else {}
    if not terms.change_site:
        refuse_change(continued, site)
    made: list[Attempt | CellFolder] = []
    order_seed = secrets.randbits(32)
    common = {"order_seed": order_seed, "budget": _budget(folder, site, terms, cost)}
    launches = (
        (attempt, launch.model_copy(update={**common, "order": order}))
        for order, cell in enumerate(in_blocks(cells, order_seed))
        for attempt, launch in [_new(cell, site, folder, terms, continued.get(cell.id), made)]
    )
    try:
        launcher.launch(folder, launches)
    except OSError as error:
        _withdraw(made)
        raise _no_space(error, folder) from None
    return cost


def _budget(folder: SweepFolder, site: Site, terms: Terms, cost: CostEstimate) -> str | None:
    """Name of the budget from which further starts are paid; None if there are none, or no budget."""
    if terms.budget is None or not site.max_continuations:
        return None
    try:
        return open_budget(folder, terms.budget, cost)
    except OSError as error:
        raise _no_space(error, folder) from None


def _no_space(error: OSError, folder: SweepFolder) -> StoreError:
    return StoreError(
        f"{error.filename or folder.path}: {error.strerror or error}; nothing was submitted: free some "
        "space, or keep runs on another file system (--runs)"
    )


def in_blocks(cells: Sequence[Cell], order_seed: int = 0) -> list[Cell]:
    """Cells in the order of their start: block after block, each block in a random order.

    A start block has the cells of one seed: every arm once on each world size. (`kronscale run --blocks` and
    `pair_arms` divide it further, by world size.) A machine that slows down during the study then slows all
    arms, not only the last one in the file, and no arm is always the first.

    Args:
        cells: in any order.
        order_seed: of the random orders; a submission draws one, and every `launch.json` of it has it.
    """
    blocks: dict[int, list[Cell]] = defaultdict(list)
    for cell in sorted(cells, key=lambda cell: (cell.seed, cell.content_hash)):
        blocks[cell.seed].append(cell)
    for seed, block in blocks.items():
        random.Random(f"{order_seed}/{seed}").shuffle(block)  # noqa: S311  no secret
    return [cell for block in blocks.values() for cell in block]


def _new(
    cell: Cell,
    site: Site,
    folder: SweepFolder,
    terms: Terms,
    continued: Attempt | None,
    made: list[Attempt | CellFolder],
) -> tuple[Attempt, Launch]:
    """The new attempt and its launch; adds the folders that it makes to `made`."""
    if not (cell_folder := folder.cell_folder(cell)).path.exists():
        made.append(cell_folder)
    folder.stage(cell)
    launch = LAUNCHERS[site.launcher].plan(cell, site, terms.command)
    attempt = _attempt_at(cell_folder)
    made.append(attempt)
    number = continued.number if continued is not None else None
    return attempt, launch.model_copy(update={"continues": number})


def _attempt_at(cell_folder: CellFolder) -> Attempt:
    """A new attempt, or the newest one if its submission was interrupted before the launch."""
    latest = cell_folder.latest()
    if latest is not None and stored_state(latest).state == "STAGED":
        latest.make_logs()  # the interrupted submission may not have made them
        return latest
    return cell_folder.new_attempt()


def _withdraw(made: Sequence[Attempt | CellFolder]) -> None:
    """Undo a submission that could not be completed, and that has started nothing.

    Folders in which another process has written something meanwhile stay.
    """
    for folder in reversed(made):
        if isinstance(folder, Attempt):
            discard(folder)
        elif folder.latest() is None:
            (folder.path / "cell.json").unlink(missing_ok=True)
            with suppress(OSError):
                folder.path.rmdir()
