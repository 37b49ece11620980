"""Promise: names and prose use the field's terms; retired private words do not come back."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".j2"}
# Generated or historical text, and this list itself.
LEFT_OUT = (
    "CHANGELOG.md",
    "results/",
    "tests/test_words.py",
    "docs/lab-notebook/",
    "docs/decisions/before-0.1.0.md",
)
# word: where it may stand all the same, as a file format or in its ordinary technical meaning
RETIRED = {
    r"drawers?": None,
    r"tenants?": None,
    r"tether\w*": None,
    r"fates?": None,
    r"shel(f|ves)": None,
    r"outlook": None,
    r"doorkeeper": None,
    r"unsaid": None,
    r"unheard": None,
    r"guilt\w*": None,
    r"hear|hears|heard": None,
    r"telling": None,
    r"standing": None,
    r"hops?": None,
    r"CutBases": None,
    r"Begun": None,
    r"presences?": None,
    r"refusals?": None,
    r"wish(es|ed)?": None,
    r"pulses?": r"\"\.pulse\"",  # of a stored heartbeat's name
    r"ballast": None,
    r"gangs?": None,
    r"lanes?": None,
    r"leases?|leased": None,
    r"tickets?": None,
    r"seals?|sealed": r"KIND|\"kind\"|\bseals: ",  # a stored record's kind, and a key of stored outcomes
    r"claims?": r"\"claim(_job)?\"|`claim(_job)?`|^analysis/|^tests/analysis/|^jobs/|^docs/generator/|\.md:",
    r"verdicts?": r"^analysis/|^jobs/experiments/|^docs/generator/|^tests/(analysis|path|docs)/|compare\.py|"
    r"report\.py|"
    r"test_cli\.py|\.md:",  # a column
    r"floors?": r"floor\(|[\"'`](layer_)?floors?[\"'`]|eigenvalue floor|our floor at",
    r"margins": r"\.margins\(|subplots_adjust",
}


@functools.cache
def lines() -> list[str]:
    """`path:line: text` of the lines under version control that people read, with a word in question."""
    any_word = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in SUFFIXES and not name.startswith(LEFT_OUT) and path.is_file():
            text = path.read_text(encoding="utf-8").splitlines()
            numbered = enumerate(text, 1)
            found += [f"{name}:{number}: {line}" for number, line in numbered if any_word.search(line)]
    return found


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_stands_nowhere_but_in_file_formats(word):
    pattern, allowed = re.compile(rf"\b({word})\b", re.IGNORECASE), RETIRED[word]
    if word == "Begun":
        pattern = re.compile(r"\bBegun\b")
    hits = [line for line in lines() if pattern.search(line.split(": ", 1)[1])]
    assert [line for line in hits if allowed is None or not re.search(allowed, line)] == []
