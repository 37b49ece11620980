"""Commands that messages advise. They end their line, so that they can be pasted into a shell as they are."""

from __future__ import annotations

import shlex
from pathlib import Path

from harness.runs.store import DEFAULT_ROOT


def command(verb: str, sweep: Path, *more: str, site: str = "local") -> str:
    """A command on the sweep stored in the folder `sweep`: `kronscale retry demo --runs old/runs`.

    Args:
        verb: of the command line, with what stands before the sweep: `predict --from`.
        sweep: the sweep's folder.
        more: further words.
        site: name or path of the site profile.
    """
    on_site = () if site == "local" else ("--site", site)
    return shlex.join(["kronscale", *verb.split(), sweep.name, *more, *on_site, *runs_option(sweep.parent)])


def runs_option(root: Path) -> tuple[str, ...]:
    """`--runs <root>`; nothing for the default folder."""
    return () if root.resolve() == DEFAULT_ROOT.resolve() else ("--runs", str(root))
