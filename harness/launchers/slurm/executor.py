"""submitit's Slurm executor with manifests instead of pickles, and no signal unless the profile has one.

Imported only when something is submitted: submitit is slow to import.
"""

from __future__ import annotations

import re
from pathlib import Path

import submitit


class ManifestExecutor(submitit.SlurmExecutor):
    """Writes submission files and reads job ids; the jobs read what to run from their manifest."""

    def __init__(self, manifest: Path) -> None:
        super().__init__(folder=manifest)

    @classmethod
    def affinity(cls) -> int:
        """Always available: `--dry-run` must work without srun."""
        return 2

    def text(self, command: str) -> str:
        """The batch script."""
        text = str(self._make_submission_file_text(command, ""))
        return text if self.parameters["signal_delay_s"] else re.sub(r"#SBATCH --signal=.*\n", "", text)

    def command(self, script: Path) -> list[str]:
        """The command line of sbatch."""
        return list(self._make_submission_command(script))

    def job_id(self, output: str) -> str:
        """The job id in the output of sbatch."""
        return str(self._get_job_id_from_submission_command(output))
