"""Promise: a rank's last step and phase can be read whatever moment it was killed in."""

import itertools

import pytest

from harness.runs.heartbeat import HeartbeatWriter, read_heartbeat
from harness.runs.store import Attempt

PHASES = ("forward", "backward", "precondition_comm")


@pytest.fixture
def written(tmp_path):
    """Contents of the file before and after each phase change, and what each says."""
    path = tmp_path / "rank-00000.heartbeat"
    writer = HeartbeatWriter(path)
    contents, said = [path.read_bytes()], [read_heartbeat(path)]
    for number, phase in enumerate(itertools.islice(itertools.cycle(PHASES), 5)):
        writer.step, writer.total_steps = 255 << 8 * number, 10**6 + number
        writer.write(phase)
        contents.append(path.read_bytes())
        said.append(read_heartbeat(path))
    return path, contents, said


def test_a_heartbeat_says_what_was_written_last(written):
    _, _, said = written
    assert [one.phase for one in said] == ["start", *PHASES, *PHASES[:2]]
    assert [one.step for one in said] == [-1, *(255 << 8 * number for number in range(5))]
    assert [one.total_steps for one in said] == [0, *(10**6 + number for number in range(5))]
    assert [one.time for one in said] == sorted(one.time for one in said)


@pytest.mark.parametrize("forward", [True, False])
def test_a_write_that_was_cut_short_leaves_the_last_or_the_one_before(written, forward):
    path, contents, said = written
    pairs = zip(itertools.pairwise(contents[-3:]), itertools.pairwise(said[-3:]), strict=True)
    for (before, after), allowed in pairs:
        for cut in range(len(before) + 1):  # also the 8 bytes that a memory copy may write at once
            torn = after[:cut] + before[cut:] if forward else before[:cut] + after[cut:]
            path.write_bytes(torn)
            assert read_heartbeat(path) in allowed


def test_a_slot_that_was_damaged_is_not_read(written):
    path, contents, said = written
    for position in range(len(contents[-1])):
        damaged = bytearray(contents[-1])
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        assert read_heartbeat(path) in said[-2:]
    path.write_bytes(bytes(len(contents[-1])))
    assert read_heartbeat(path) is None


def test_a_file_with_the_name_of_an_older_version_is_read(written):
    path, _, said = written
    path.rename(path.with_suffix(".pulse"))
    assert Attempt(path.parent).last_heartbeat(0) == said[-1]
