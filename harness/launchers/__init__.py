"""Drawer of launchers: each gives attempts at cells their ranks. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from harness.cell import Cell
from harness.launchers.attempt_state import AttemptState
from harness.launchers.cost_estimate import CostEstimate
from harness.launchers.launch import WORKER_COMMAND, Launch
from harness.launchers.local.launcher import LocalLauncher
from harness.launchers.site import Site
from harness.launchers.slurm.launcher import SlurmLauncher
from harness.runs.store import Attempt, SweepFolder


class Launcher(Protocol):
    """What submit, status and cancel need of a launcher.

    It gets attempts as folders, all of one call together, so that a cluster's can make arrays of them and
    ask its scheduler once. Whatever it starts ends by writing the attempt's outcome.
    """

    def check(self, cell: Cell, site: Site) -> None:
        """Refuse, with a SiteError, a cell that the site can never run."""

    def plan(self, cell: Cell, site: Site, command: Sequence[str] = WORKER_COMMAND) -> Launch:
        """How an attempt at `cell` will be launched; changes nothing."""

    def hours(self, cells: Sequence[Cell], site: Site) -> CostEstimate:
        """The most that the cells can cost on the site."""

    def preview(self, folder: SweepFolder, cells: Sequence[Cell], site: Site) -> str:
        """What `launch` would hand over, word for word; changes nothing."""

    def launch(self, folder: SweepFolder, launches: Iterable[tuple[Attempt, Launch]]) -> None:
        """Make attempts pending and see to it that they start; called under the sweep's submit lock."""

    def interrupted(self, folder: SweepFolder) -> bool:
        """Whether a `launch` was cut off in a way that its attempts' files do not show."""

    def resume(self, folder: SweepFolder) -> None:
        """See to it that pending attempts start; called under the sweep's submit lock."""

    def works_on(self, folder: SweepFolder) -> bool:
        """Whether pending attempts will start without `resume`."""

    def fates(self, attempts: Sequence[Attempt]) -> Mapping[Attempt, AttemptState]:
        """Of attempts without an outcome those of which more is known than their files say."""

    def cancel(self, attempts: Sequence[Attempt], *, checkpoint: bool = False) -> None:
        """Ask for the end of pending or running attempts; may return before they have ended.

        With `checkpoint` the ranks of those that run save one first.
        """


LAUNCHERS: Mapping[str, Launcher] = {"local": LocalLauncher(), "slurm": SlurmLauncher()}
