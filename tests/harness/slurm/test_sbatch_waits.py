"""Promise: sbatch that waits for the controller is seen to wait, and not for ever. No Slurm runs here."""

import pytest

from harness.errors import SiteError
from harness.launchers.slurm import sbatch
from harness.launchers.slurm.scheduler import NoAnswerError

pytestmark = pytest.mark.ranks  # starts processes

WAITS = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"


@pytest.fixture
def fake_sbatch(tmp_path, monkeypatch):
    """Put a program named sbatch first on the path."""

    def install(script):
        program = tmp_path / "sbatch"
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return install


def test_an_sbatch_that_waits_is_shown_and_ended(fake_sbatch, make_site, monkeypatch, capsys):
    monkeypatch.setattr(sbatch, "_PATIENCE_SECONDS", 0.5)
    fake_sbatch(f"echo '{WAITS}' >&2; exec sleep 60")
    with pytest.raises(NoAnswerError, match=rf"sbatch waited for more than 0.5 s and was ended: {WAITS}"):
        sbatch.rehearse("#!/bin/bash", make_site())
    assert capsys.readouterr().err == f"{WAITS} (for at most 0.5 s)\n"


def test_an_sbatch_that_is_let_in_after_a_while_submits(fake_sbatch, make_site, capsys):
    fake_sbatch(f"cat; echo '{WAITS}' >&2; echo 'sbatch: Job 7 to start' >&2")
    assert sbatch.rehearse("#!/bin/bash", make_site()).endswith("sbatch: Job 7 to start")
    assert capsys.readouterr().err.startswith(WAITS)


def test_an_sbatch_that_refuses_without_reading_is_no_broken_pipe(fake_sbatch, make_site):
    fake_sbatch("exec <&-; echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(SiteError, match="sbatch refused: sbatch: error: invalid partition"):
        sbatch.rehearse("#!/bin/bash\n" + "#" * 1_000_000, make_site())
