"""Which site a command uses: the one that is named, else the one that the sweep was last submitted to."""

from __future__ import annotations

from collections.abc import Sequence

from harness.cell import Cell
from harness.errors import NoSiteError, SiteError, StoreError
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site, read_site
from harness.runs.store import Attempt, SweepFolder

FIRST = "local"
"""The site of a sweep that has never been submitted, where none is named."""


def chosen_site(name: str | None, folder: SweepFolder, cells: Sequence[Cell] | None = None) -> Site:
    """The site to use for a sweep.

    Args:
        name: of the profile, or its path, as `--site` or KRONSCALE_SITE give it; None if neither does.
        folder: of the sweep.
        cells: whose launches count; None for all that are stored.

    Raises:
        SiteError: there is no such profile, or the profile of the last submission's name is of another
            launcher now.
    """
    if name is not None:
        return read_site(name)
    last = last_launch(folder, cells)
    return read_site(FIRST) if last is None else _profile_of(last)


def last_launch(folder: SweepFolder, cells: Sequence[Cell] | None = None) -> Launch | None:
    """The newest launch of the sweep that nobody else can have written; None before the first."""
    if not folder.path.is_dir():
        return None
    names = {path.name for path in folder.path.iterdir()}
    if cells is None:
        stored = list(folder.cell_folders())
    else:
        stored = [folder.cell_folder(cell) for cell in cells if cell.id in names]
    newest: tuple[float, Attempt] | None = None
    for cell_folder in stored:
        for attempt in cell_folder.attempts()[::-1]:
            if (at := _submitted_at(attempt)) is not None:
                newest = (at, attempt) if newest is None or at > newest[0] else newest
                break
    return _read(newest[1]) if newest is not None else None


def _submitted_at(attempt: Attempt) -> float | None:
    try:
        at = (attempt.read("launch.json") or {}).get("submitted_at")
    except StoreError:
        return None
    return float(at) if isinstance(at, int | float) else None


def _read(attempt: Attempt) -> Launch | None:
    try:
        return Launch.read_to_execute(attempt, shared_runs=False)  # a profile has commands
    except (StoreError, FileNotFoundError):
        return None


def _profile_of(last: Launch) -> Site:
    """The profile of the last submission as it is now, or as it was if there is no file of its name."""
    name = last.site.name
    try:
        now = read_site(name)
    except NoSiteError:
        return last.site
    if now.launcher != last.launcher:
        raise SiteError(
            f"the last submission was to site {name} with launcher {last.launcher}, and the profile {name} "
            f"found from here has launcher {now.launcher}: name the site with --site"
        )
    return now
