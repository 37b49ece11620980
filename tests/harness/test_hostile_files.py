"""Promise: a file that is deep, huge, endless or no file gives an error of one line, and quickly.

Sweeps, sites and papers are read by the same code.
"""

import os
import socket
from pathlib import Path

import pytest

from harness.errors import SiteError, SweepError
from harness.launchers.site_profile import read_site
from harness.study.sweep import read_sweep
from harness.yaml_files.document import read_value

KIB = 1024
DEEP = 200_000

TEXTS = {
    "lists in lists": (
        "sweep: " + "[" * DEEP + "]" * DEEP, "has more than 256 KiB, the most that is allowed",
    ),
    "lists in lists of fewer bytes": (
        "a: " + "[" * 100_000, ":1: nested too deep; at most 32 levels are allowed",
    ),
    "blocks in blocks": ("- " * 100_000, ":1: nested too deep; at most 32 levels are allowed"),
    "indented blocks": (
        "\n".join(" " * level + "a:" for level in range(600)), ":33: nested too deep; at most 32 levels are "
        "allowed",
    ),
    "depth through aliases": (
        "k0: &k0 [1]\n" + "\n".join(f"k{level}: &k{level} [*k{level - 1}]" for level in range(1, 2_000)),
        ":1: nested too deep; at most 32 levels are allowed",
    ),
    "a mapping that is a key": ("? {a: 1}\n: 2", ":1: key (a list) must be text"),
    "aliases of aliases": (
        "\n".join(f"k{level}: &k{level} [{', '.join([f'*k{level - 1}'] * 9)}]" if level else "k0: &k0 [1]"
                  for level in range(12)),
        ":1: has more than 100,000 values, the most that is allowed",
    ),
    "a number of 5,000 digits": ("repeats: " + "9" * 5_000, "digits; at most 18 are allowed"),
    "a number beyond 64 bits": ("repeats: 9223372036854775808", "digits; at most 18 are allowed"),
    "an exclude of 5 MB": (
        "exclude:\n" + "- {method: sgd, world_size: 1}\n" * 170_000, "has more than 256 KiB, the most that "
        "is allowed",
    ),
    "a key of two lines": ('"a\\nb": 1', ":1: a b is not a k"),
    "a key of 100,000 characters": (
        f"{'k' * 1000}: 1", f"{'k' * 200}... (1000 characters) is not a k",
    ),
    "bytes that are no text": (b"sweep: \xff\xfe", "cannot be read as text"),
    "a NUL": (b"sweep: \x00", "not readable as YAML"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "reader"), [*((case, "sweep") for case in TEXTS), ("a NUL", "site")])
def test_a_hostile_text_is_one_short_line(case, reader, tmp_path):
    content, message = TEXTS[case]
    path = tmp_path / "x.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = error_line(path, reader)
    assert message in found
    assert len(found) < 1_000


@pytest.mark.parametrize("reader", ["site"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device"])
def test_what_is_no_file_is_refused_and_not_waited_for(kind, reader, tmp_path, monkeypatch):
    path = tmp_path / "x.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    else:
        path.symlink_to("/dev/zero")
    assert error_line(path, reader).startswith(f"{path}: ")


def test_whole_numbers_keep_their_value():
    for text, value in (
        ("-012", -12),
        ("+1_000", 1000),
        ("000", 0),
        ("0" * 6_000 + "7", 7),
        ("9" * 18, 10**18 - 1),
    ):
        assert read_value(text, "--set x", SweepError) == value


def error_line(path: Path, reader: str) -> str:
    error = SweepError if reader == "sweep" else SiteError
    with pytest.raises(error) as raised:
        read_sweep(path) if reader == "sweep" else read_site(str(path))
    message = str(raised.value)
    assert len(message.splitlines()) == 1
    return message
