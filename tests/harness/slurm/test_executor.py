"""Promise: a submitit whose private methods differ from those that we use fails here, not on a cluster."""

import inspect

import pytest
import submitit

PRIVATE = {
    "_make_submission_file_text": ["self", "command", "uid"],
    "_make_submission_command": ["self", "submission_file_path"],
    "_get_job_id_from_submission_command": ["string"],
    "affinity": [],
}


@pytest.mark.parametrize(("name", "parameters"), PRIVATE.items())
def test_submitits_slurm_executor_has_the_methods_that_the_manifest_executor_uses(name, parameters):
    method = getattr(submitit.SlurmExecutor, name, None)
    found = list(inspect.signature(method).parameters) if method is not None else None
    assert found == parameters, (
        f"submitit {submitit.__version__}: SlurmExecutor.{name} must have the parameters {parameters}, "
        f"got {found if method is not None else 'no such method'}; adapt harness/launchers/slurm/executor.py "
        f"or lower the bound of submitit in pyproject.toml"
    )
