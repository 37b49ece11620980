"""Drawer of launchers: each gives attempts at cells their ranks. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from harness.cell import Cell
from harness.launchers.launch import WORKER_COMMAND, Launch
from harness.launchers.local import LocalLauncher
from harness.launchers.site import Site
from harness.store import Attempt, SweepFolder


class Launcher(Protocol):
    """What submit, status and cancel need of a launcher.

    It gets attempts as folders, all of one call together, so that a cluster's can make arrays of them and
    ask its scheduler once. Whatever it starts ends by writing the attempt's outcome.
    """

    def check(self, cell: Cell, site: Site) -> None:
        """Refuse, with a SiteError, a cell that the site can never run."""

    def plan(self, cell: Cell, site: Site, command: Sequence[str] = WORKER_COMMAND) -> Launch:
        """How an attempt at `cell` will be launched; changes nothing."""

    def launch(self, folder: SweepFolder, launches: Iterable[tuple[Attempt, Launch]]) -> None:
        """Make attempts pending and see to it that they start; called under the sweep's submit lock."""

    def resume(self, folder: SweepFolder) -> None:
        """See to it that pending attempts start; called under the sweep's submit lock."""

    def works_on(self, folder: SweepFolder) -> bool:
        """Whether pending attempts will start without `resume`."""

    def lost(self, running: Sequence[Attempt]) -> set[Attempt]:
        """Those that began, have no outcome, and will never get one."""

    def cancel(self, attempt: Attempt, *, checkpoint: bool = False) -> None:
        """Ask for the end of a pending or running attempt; may return before it has ended.

        With `checkpoint` its ranks save one first, if they run.
        """


LAUNCHERS: Mapping[str, Launcher] = {"local": LocalLauncher()}
