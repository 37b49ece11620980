"""Promise: a damaged sweep or site is accepted as something valid, or refused in one line; never a "
"traceback."""

from collections import Counter
from pathlib import Path
from random import Random

import yaml

from harness.cell import Cell
from harness.errors import SiteError, SweepError
from harness.launchers.site_profile import read_site
from harness.study.sweep import read_sweep
from tests.mutations import COUNT, mutated

SWEEPS = (
    "jobs/sweeps/demo.yaml",
    "jobs/sweeps/gpt.yaml",
    "jobs/sweeps/multi30k.yaml",
    "jobs/papers/sc20/full/intervals.yaml",
    "jobs/papers/tpds22/scenes/maskrcnn.yaml",
    "jobs/papers/nlcg/embedded/batch.yaml",
    "jobs/sweeps/headline/pilot.yaml",
)
SITES = sorted(map(str, Path("jobs/sites").glob("*.yaml")))


def outcomes(paths, read, error, folder: Path, count: int, seed: int) -> Counter[str]:
    texts = [Path(path).read_text() for path in paths]
    files = [(text, yaml.safe_load(text)) for text in texts]
    random, found, path = Random(seed), Counter(), folder / "mutated.yaml"  # noqa: S311  no secret
    for number in range(count):
        text, content = random.choice(files)
        if "repeats" in content:
            content["repeats"] = 1
        damaged = mutated(content, text, random)
        path.write_bytes(damaged)
        try:
            read(path)
            found["accepted"] += 1
        except error as refused:
            message = str(refused)
            assert message.startswith(f"{path}"), (number, message)
            assert len(message.splitlines()) == 1, (number, message)
            assert len(message) < 1_500, (number, message)
            assert "Value error" not in message, (number, message)  # pydantic's own words
            found["refused"] += 1
        except BaseException:
            print(f"mutation {number}: {damaged[:2000]!r}")
            raise
    return found


def sweep(path: Path) -> None:
    cells = read_sweep(path).cells
    assert cells
    for cell in cells[:3]:
        assert Cell.model_validate_json(cell.model_dump_json()).id == cell.id


def test_a_damaged_sweep_is_cells_or_one_line(tmp_path):
    found = outcomes(SWEEPS, sweep, SweepError, tmp_path, COUNT, seed=COUNT)
    assert found["refused"] > found["accepted"] > 0


def test_a_damaged_site_is_a_site_or_one_line(tmp_path):
    found = outcomes(SITES, lambda path: read_site(str(path)), SiteError, tmp_path, COUNT, seed=COUNT)
    assert found["refused"] > found["accepted"] > 0
