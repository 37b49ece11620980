"""Starts a study folder: a sweep, a site profile, a README and a .gitignore."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from harness.errors import UserError

_FILES = {
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "jobs/sweeps/first.yaml": "first.yaml",
    "jobs/sites/my-cluster.yaml": "my-cluster.yaml",
}
"""Files of the study, each with its template."""


def start_study(folder: Path) -> list[Path]:
    """Write the files of a new study into `folder`, which is made if needed.

    Returns:
        The files, in the order in which a reader needs them.

    Raises:
        UserError: one of them exists; nothing is written.
        OSError: the folder cannot be written.
    """
    there = [name for name in _FILES if (folder / name).exists()]
    if there:
        raise UserError(f"{folder / there[0]} exists; give a new folder, or remove it: nothing was written")
    templates = resources.files("harness.study") / "template"
    written = []
    for name, template in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (templates / template).read_text(encoding="utf-8")
        path.write_text(text.replace("{name}", folder.resolve().name) if template == "README.md" else text)
        written.append(path)
    return written
