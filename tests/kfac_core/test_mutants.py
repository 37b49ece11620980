"""Promise: the code that `make mutants` changes still exists."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_text_of_every_mutant_is_found_once_in_the_library():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "jobs" / "experiments" / "mutants.py")
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    found = {one.name: (ROOT / "kfac_core" / one.path).read_text().count(one.text) for one in mutants.MUTANTS}
    assert len(found) == len(mutants.MUTANTS) >= 26
    assert set(found.values()) == {1}, found
    assert all(one.broken != one.text for one in mutants.MUTANTS)
