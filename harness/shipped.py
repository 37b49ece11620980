"""Files that come with the package: site profiles, sweeps, papers, published numbers.

They are looked up by the paths that they have in the repository, such as `jobs/sites/local.yaml`. The user's
own file of that path, below the working directory, comes first. The wheel has them in its folder
`harness/shipped_files/`; a checkout has them in `jobs/` and `results/` beside the packages.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

_IN_WHEEL = "shipped_files"


def shipped_root() -> Path:
    """The folder in which the shipped `jobs/` and `results/` are."""
    package = Path(str(resources.files("harness")))
    in_wheel = package / _IN_WHEEL
    return in_wheel if in_wheel.is_dir() else package.parent


def find(path: Path) -> Path:
    """`path` if it exists, else the shipped file of that path; `path` again if there is neither."""
    if path.is_absolute() or path.exists():
        return path
    shipped = shipped_root() / path
    return shipped if ".." not in path.parts and shipped.exists() else path


def find_all(folder: Path, pattern: str) -> dict[Path, Path]:
    """Files below `folder` that match, by their path relative to it; own files come before shipped ones."""
    roots = [folder] if folder.is_absolute() else [shipped_root() / folder, folder]
    return dict(sorted((path.relative_to(root), path) for root in roots for path in root.glob(pattern)))
