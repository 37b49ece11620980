"""MkDocs events: adds the pages that come from code and from other files of the repository.

Nothing generated is stored. A field without a description, a link to nothing or an unreadable formula raises,
and `mkdocs build --strict` fails.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from command_pages import cli_reference  # noqa: E402  found through the line above
from field_pages import site_reference, sweep_reference  # noqa: E402
from formulas import with_formulas  # noqa: E402
from links import ASSETS, INCLUDED, rewritten  # noqa: E402
from paper_pages import papers_reference  # noqa: E402

_INFO = re.compile(r"^(```\w+)(?: [a-z ]+)$", re.MULTILINE)  # words after the language are for tests

GENERATED = {
    "reference/sweep.md": sweep_reference,
    "reference/site.md": site_reference,
    "reference/cli.md": cli_reference,
    "reference/papers.md": papers_reference,
}


def on_files(files: Files, config: Any) -> Files:
    """Add generated pages, pages kept elsewhere in the repository, and the files that pages show."""
    for page, generate in GENERATED.items():
        files.append(File.generated(config, page, content=generate()))
    for source, page in INCLUDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for folder, pattern in ASSETS:
        for path in sorted((ROOT / folder).glob(pattern)):
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site, and draw formulas."""
    del config, files
    path = page.file.src_uri
    if path in GENERATED:
        return markdown
    return with_formulas(rewritten(_INFO.sub(r"\1", markdown), path), path)
