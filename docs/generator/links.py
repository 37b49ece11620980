"""Links between pages: relative links of the repository become links of the site."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]

INCLUDED = {
    "results/README.md": "records.md",
    "kfac_core/README.md": "library.md",
    "harness/launchers/slurm/README.md": "slurm.md",
    "harness/workloads/embedded/README.md": "data-terms.md",
    "harness/workloads/embedded/wikitext-2/README.md": "data-terms-wikitext.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "results/cifar10.md": "results/cifar10.md",
    "results/core_options.md": "results/core_options.md",
    "results/coverage.md": "results/coverage.md",
    "results/mpi_against_gloo.md": "results/mpi_against_gloo.md",
    "results/mutants.md": "results/mutants.md",
    "results/nlcg_large_batch.md": "results/nlcg_large_batch.md",
    "results/state_by_world.md": "results/state_by_world.md",
    "results/peers/README.md": "results/peers.md",
    "results/prediction/shaped_links.md": "results/shaped_links.md",
    "results/prediction/validation.md": "results/prediction_validation.md",
    "results/prediction/spd_kfac.md": "results/spd_kfac.md",
    "results/headline/README.md": "results/headline.md",
    "results/headline/2020/README.md": "results/headline-2020.md",
    "results/published/README.md": "results/published.md",
    "results/figures/README.md": "results/in-small.md",
    **{
        str(report.relative_to(ROOT)): f"results/{report.parent.name}.md"
        for report in sorted(ROOT.glob("results/figures/*/report.md"))
    },
}
"""Files of the repository that are pages of the site, by their page."""

ASSETS = (
    ("results", "*.csv"),
    ("results/demo", "*.png"),
    ("results/figures", "**/*.png"),
    ("results/figures", "**/*.csv"),
    ("results/headline", "**/*.png"),
    ("results/headline", "**/*.csv"),
    ("results/instrument", "*.csv"),
    ("results/prediction", "*.png"),
    ("results/prediction", "*.csv"),
    ("jobs/sweeps", "*.yaml"),
)
"""Files that pages show or link, with the same path on the site as in the repository."""

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"^(```+|~~~+).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)


class BrokenLinkError(ValueError):
    """A link to a file that the repository does not have."""


def source_of(page: str) -> str:
    """The file of the repository that is a page of the site."""
    sources = {page_of: source for source, page_of in INCLUDED.items()}
    return sources.get(page, f"docs/{page}")


def rewritten(markdown: str, page: str) -> str:
    """Text of a page with links to files of the repository as links of the site.

    A link to a file that is not on the site becomes its path.

    Raises:
        BrokenLinkError: the file does not exist.
    """
    source = source_of(page)

    def one(match: re.Match[str]) -> str:
        path, anchor = _split(match["target"])
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        repository_path = _resolved(source, path)
        target = _page(repository_path)
        if target is None:
            if not (ROOT / repository_path).exists():
                raise BrokenLinkError(f"{source}: links to {path}, but there is no {repository_path}")
            shown = match["text"]
            return shown if repository_path in shown else f"{shown} (`{repository_path}`)"
        relative = os.path.relpath(target, PurePosixPath(page).parent)
        return f"{match['image']}[{match['text']}]({relative}{anchor})"

    return "".join(part if is_code else LINK.sub(one, part) for is_code, part in _parts(markdown))


def broken_links(source: str) -> Iterator[str]:
    """Relative links of a Markdown file to files that do not exist."""
    text = (ROOT / source).read_text(encoding="utf-8")
    for is_code, part in _parts(text):
        for match in () if is_code else LINK.finditer(part):
            path, _ = _split(match["target"])
            if not path or "://" in path:
                continue
            repository_path = _resolved(source, path)
            if not (ROOT / repository_path).exists():
                yield f"{source}: {path}"


def _parts(markdown: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces, each with whether it is code; inline code inside a link's text stays with it."""
    position = 0
    for match in _CODE.finditer(markdown):
        if not match[0].startswith(("```", "~~~")):
            continue
        yield False, markdown[position : match.start()]
        yield True, match[0]
        position = match.end()
    yield False, markdown[position:]


def _split(target: str) -> tuple[str, str]:
    path, sign, anchor = target.partition("#")
    return path, sign + anchor


def _resolved(source: str, path: str) -> str:
    return os.path.normpath(PurePosixPath(source).parent / path)


def _page(repository_path: str) -> str | None:
    """The site's path of a file of the repository; None if it is not on the site."""
    if repository_path in INCLUDED:
        return INCLUDED[repository_path]
    if repository_path.startswith("docs/") and Path(repository_path).suffix:
        return repository_path.removeprefix("docs/")
    path = PurePosixPath(repository_path)
    shown = any(
        path.is_relative_to(folder) and path.match(pattern.removeprefix("**/")) for folder, pattern in ASSETS
    )
    return repository_path if shown and (ROOT / repository_path).is_file() else None
