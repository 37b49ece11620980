"""Lists of seeds, of a sweep and of its tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.cell import MOST_SEEDS
from harness.yaml_files.document import Document, Place


def read_seeds(document: Document, place: Place, seeds: Any) -> list[int]:
    """The seeds that a file lists.

    Raises:
        SweepError: they are not different whole numbers, or one is too large.
    """
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise document.error(place, f" must be a list of different whole numbers >= 0, got {seeds!r}")
    if max(seeds) >= MOST_SEEDS:
        raise document.error(place, f" must be < {MOST_SEEDS}, got {max(seeds)}")
    return list(seeds)


def refuse_shared_seeds(
    document: Document, place: Place, seeds: Sequence[int], others: Sequence[int], whose: str
) -> None:
    """Check that runs which choose settings and runs which judge them share no seed.

    Raises:
        SweepError: they do.
    """
    if shared := sorted(set(seeds) & set(others)):
        raise document.error(
            place, f" share {', '.join(map(str, shared))} with the seeds {whose} "
            f"({', '.join(map(str, others))}); a study needs fresh seeds",
        )  # fmt: skip
