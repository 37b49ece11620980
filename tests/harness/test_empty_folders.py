"""Promise: folders without a cell cost one look-up each; none of them is listed, whatever their number.

100,000 of them took `status` 7 s and `report` 21 s when each was listed several times.
"""

import sys
from collections import Counter

import pytest

from analysis.records.cache import fingerprint
from harness.cli import main
from harness.runs.store import SweepFolder

EMPTY = 300
_seen: Counter[str] | None = None


def _count(event: str, arguments: tuple[object, ...]) -> None:
    if _seen is not None and event in ("os.listdir", "os.scandir"):
        _seen[str(arguments[0])] += 1


sys.addaudithook(_count)


@pytest.fixture
def runs(tmp_path):
    for number in range(EMPTY):
        (tmp_path / "runs" / "many" / f"sgd-p1-s{number}-{number:010x}").mkdir(parents=True)
    return tmp_path / "runs"


@pytest.mark.parametrize("command", ["fingerprint", "stored", "status", "status many"])
def test_a_folder_without_a_cell_is_not_listed(command, runs, monkeypatch, capsys):
    counted: Counter[str] = Counter()
    monkeypatch.setattr(sys.modules[__name__], "_seen", counted)
    if command == "fingerprint":
        fingerprint(runs / "many")
    elif command == "stored":
        assert not list(SweepFolder(runs / "many").stored())
    else:
        assert main([*command.split(), "--runs", str(runs)]) == 0
    monkeypatch.setattr(sys.modules[__name__], "_seen", None)
    assert 0 < counted[str(runs / "many")] <= 5
    assert not [path for path in counted if path.startswith(f"{runs / 'many'}/")]
    capsys.readouterr()
