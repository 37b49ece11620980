"""Registry of launchers, which start the ranks of attempts. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from harness.runs.attempt_outcome import State

if TYPE_CHECKING:
    from harness.cell import Cell
    from harness.launchers.cost import CostEstimate
    from harness.launchers.launch import Launch
    from harness.launchers.site_profile import Site
    from harness.runs.store import Attempt, SweepFolder


@dataclass(frozen=True)
class AttemptState:
    """State of an attempt without an outcome.

    Attributes:
        state: None if the attempt's files have the right one.
        cause: one sentence for the user.
        failed_nodes: hosts that failed while the attempt ran.
        sure: whether the attempt has certainly ended, so that the reader may write its outcome.
    """

    state: State | None
    cause: str
    sure: bool = False
    failed_nodes: tuple[str, ...] = ()


class Launcher(Protocol):
    """What `submit`, `status` and `cancel` need from a launcher.

    A call gets all of its attempts at once, as folders, so that a cluster's launcher can make arrays of them
    and query its scheduler once. Whatever a launcher starts writes the attempt's outcome last.

    Attributes:
        poll_seconds: how long a watcher waits between two calls of `attempt_states`; 0 if they cost nothing.
    """

    poll_seconds: float

    def check(self, cell: Cell, site: Site) -> None:
        """Raise a SiteError for a cell that the site can never run."""

    def plan(self, cell: Cell, site: Site, command: Sequence[str] = ...) -> Launch:
        """How an attempt at `cell` will be launched; changes nothing."""

    def estimate_cost(self, cells: Sequence[Cell], site: Site) -> CostEstimate:
        """Upper bound of what the cells cost on the site."""

    def preview(self, folder: SweepFolder, cells: Sequence[Cell], site: Site) -> str:
        """The commands or scripts that `launch` would submit, literally; changes nothing."""

    def launch(self, folder: SweepFolder, launches: Iterable[tuple[Attempt, Launch]]) -> None:
        """Make attempts pending and have them start; the caller holds the sweep's submit lock.

        Raises:
            OSError: the disk is full, for example; nothing was started, so the caller withdraws all.
        """

    def interrupted(self, folder: SweepFolder) -> bool:
        """Whether a `launch` was interrupted in a way that its attempts' files do not show."""

    def finish_submission(self, folder: SweepFolder, *, shared_runs: bool) -> None:
        """Have pending attempts start; the caller holds the sweep's submit lock.

        With `shared_runs` also those that other users may have written.
        """

    def starts_pending(self, folder: SweepFolder) -> bool:
        """Whether pending attempts will start without `finish_submission`."""

    def attempt_states(self, attempts: Sequence[Attempt]) -> Mapping[Attempt, AttemptState]:
        """States of attempts without an outcome, where they differ from the attempts' files."""

    def cancel(self, attempts: Sequence[Attempt], *, checkpoint: bool = False) -> None:
        """Request the end of pending or running attempts; may return before they have ended.

        With `checkpoint` running ranks save one first.
        """


class _OnFirstUse:
    """A launcher that is imported when it is first used; `plan` and most calls of `status` use none."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    @cached_property
    def _launcher(self) -> Launcher:
        return cast("Launcher", getattr(import_module(self._module), self._name)())

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._launcher, attribute)


LAUNCHERS: Mapping[str, Launcher] = {
    "local": cast("Launcher", _OnFirstUse("harness.launchers.local", "LocalLauncher")),
    "slurm": cast("Launcher", _OnFirstUse("harness.launchers.slurm.launcher", "SlurmLauncher")),
}
