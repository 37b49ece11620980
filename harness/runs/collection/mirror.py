"""A copy of another host's folder of runs, kept up to date by rsync over SSH."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from harness.errors import StoreError

MIRRORS = ".collect"

_FILTERS = (
    "- /*/jobs/", "- /*/report/", "- checkpoints/", "- submitit/", "- rendezvous.json", "- cancel",
    "- *.lock", "- .*",
)  # fmt: skip
_PARTIAL = ".partial"  # of a file whose transfer was interrupted; hidden files are not read
_VANISHED = 24  # rsync's exit code if files went away meanwhile, as those of live runs do


def is_remote(source: str) -> bool:
    """Whether a source is on another host, `host:path`, as rsync decides it."""
    before, colon, _ = source.partition(":")
    return bool(colon) and "/" not in before and not Path(source).exists()


def mirrored(source: str, runs: Path, *, logs: bool, checksum: bool) -> Path:
    """Bring the copy of a remote folder of runs up to date; only what changed is transferred.

    rsync compares the checksum of every file that it transfers. An interrupted transfer is continued.

    Args:
        source: `host:path`, a folder of runs or that of one sweep.
        runs: holds the copy, in `.collect`.
        logs: whether the ranks' logs are copied.
        checksum: whether also files of equal size and time are compared, by their content.

    Raises:
        StoreError: rsync is missing or failed.
    """
    host, _, path = source.partition(":")
    if not host or host.startswith("-") or not path:
        raise StoreError(f"{source!r} must be host:path, such as my-cluster:kronscale/results/runs")
    if shutil.which("rsync") is None:
        raise StoreError(
            f"rsync is not installed here; install it, or copy {source} and give the copy's path"
        )
    name = re.sub(r"[^A-Za-z0-9.-]", "-", host).strip(".") or "host"
    mirror = runs / MIRRORS / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    mirror.mkdir(parents=True, exist_ok=True, mode=0o700)
    filters = [*_FILTERS, *(() if logs else ("- logs/",))]
    words = [
        "rsync", "--recursive", "--times", "--protect-args", "--prune-empty-dirs", "--delete",
        f"--partial-dir={_PARTIAL}", *(f"--filter={one}" for one in filters),
        *(["--checksum"] if checksum else []), "--", f"{source.rstrip('/')}/", f"{mirror}/",
    ]  # fmt: skip
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, _VANISHED):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[0] if lines else "no message"
        raise StoreError(f"{source} could not be copied: rsync ended with {done.returncode}: {reason}")
    return mirror
