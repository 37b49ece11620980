"""MkDocs events: fills in what is made from code, and adds pages that are files elsewhere in the repository.

Nothing generated is stored. A field without a description, a link to nothing or an unreadable formula raises,
and `mkdocs build --strict` fails.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from command_pages import cli_reference  # noqa: E402  found through the line above
from distance_pages import distance_reference  # noqa: E402
from field_pages import MODELS, field_table, option_tables  # noqa: E402
from figure_pages import gallery  # noqa: E402
from formulas import with_formulas  # noqa: E402
from links import ASSETS, INCLUDED, rewritten  # noqa: E402
from paper_pages import papers_reference  # noqa: E402

GENERATED: dict[str, Callable[[], str]] = {
    "workload options": option_tables,
    "commands": cli_reference,
    "papers": papers_reference,
    "distance": distance_reference,
    "gallery": gallery,
    **{f"fields {name}": partial(field_table, model) for name, model in MODELS.items()},
}
"""What `{{ name }}` on a line of a page stands for."""

_MARK = re.compile(r"^\{\{ (.+) \}\}$", re.MULTILINE)
_INFO = re.compile(r"^(```\w+)(?: [a-z ]+)$", re.MULTILINE)  # words after the language are for tests


def on_config(config: Any) -> Any:
    """List all pages of a folder that the navigation names with a slash at its end."""
    config.nav = [_with_folders(entry, Path(config.docs_dir)) for entry in config.nav]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add pages kept elsewhere in the repository, and the files that pages show."""
    for source, page in INCLUDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for folder, pattern in ASSETS:
        for path in sorted((ROOT / folder).glob(pattern)):
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site, draw formulas, and fill in what is made from code."""
    del config, files
    path = page.file.src_uri
    written = with_formulas(rewritten(_INFO.sub(r"\1", markdown), path), path)
    return _MARK.sub(lambda mark: GENERATED[mark[1]](), written)


def _with_folders(entry: Any, docs: Path) -> Any:
    """An entry of the navigation: a page, or a title with a page, a list of entries or a folder."""
    if isinstance(entry, str):
        return entry
    ((title, below),) = entry.items()
    if isinstance(below, list):
        return {title: [_with_folders(one, docs) for one in below]}
    if below.endswith("/"):
        return {title: sorted(str(path.relative_to(docs)) for path in (docs / below).glob("*.md"))}
    return entry
