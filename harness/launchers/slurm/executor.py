"""submitit's Slurm executor with claims in place of pickles, and no signal where none is wanted.

Not loaded on a login node before something is submitted: submitit takes a while to import.
"""

from __future__ import annotations

import re
from pathlib import Path

import submitit


class ManifestExecutor(submitit.SlurmExecutor):
    """Writes submission files and reads job numbers; the jobs find their work in their claim."""

    def __init__(self, claim: Path) -> None:
        super().__init__(folder=claim)

    @classmethod
    def affinity(cls) -> int:
        """Usable where srun is not: `--dry-run` shows its text anywhere."""
        return 2

    def text(self, command: str) -> str:
        """What sbatch will get."""
        text = str(self._make_submission_file_text(command, ""))
        return text if self.parameters["signal_delay_s"] else re.sub(r"#SBATCH --signal=.*\n", "", text)

    def command(self, script: Path) -> list[str]:
        """How sbatch is called."""
        return list(self._make_submission_command(script))

    def job_id(self, said: str) -> str:
        """The job's number out of what sbatch printed."""
        return str(self._get_job_id_from_submission_command(said))
