"""Promise: the run folder is read for what Kronscale wrote there, and what else lies there does no harm."""

from harness.checkpoint.shelf import Shelf
from harness.store import Attempt, CellFolder


def test_a_copy_beside_attempts_or_checkpoints_is_neither(tmp_path):
    folder = CellFolder(tmp_path)
    for name in (
        "attempt-1",
        "attempt-10",
        "attempt-2",
        "attempt-2.bak",
        "attempt-",
        "attempt-01",
        "attempt-old",
    ):
        (tmp_path / name).mkdir()
    assert [attempt.number for attempt in folder.attempts()] == [1, 2, 10]
    attempt = folder.latest()
    for name in ("step-00000120", "step-00000240", "step-00000240.bak", "step-x"):
        saved = attempt.path / "checkpoints" / name
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text("{}")
    assert [saved.step for saved in Shelf(attempt).newest_first()] == [240, 120]
    assert folder.new_attempt() == Attempt(tmp_path / "attempt-11")
