"""Promise: a site's variables and options of Slurm can be set as they are, or its profile is refused."""

import json

import pytest

from harness.errors import SiteError
from harness.launchers.site_profile import read_site


@pytest.mark.parametrize(
    ("variables", "words"),
    [({"": "1"}, "environment='' is no name of a variable"), ({"A=B": "1"}, "environment='A=B' is no name"),
     ({"A\0": "1"}, r"environment='A\\x00' is no name"), ({"A": "x\0y"}, r"A='x\\x00y' contains NUL")],
)  # fmt: skip
def test_a_name_or_value_that_no_variable_can_have_is_refused(tmp_path, variables, words):
    path = tmp_path / "here.yaml"
    path.write_text(json.dumps({"environment": variables}))
    with pytest.raises(SiteError, match=words):
        read_site(str(path))


def test_other_variables_are_read(tmp_path):
    path = tmp_path / "here.yaml"
    path.write_text(json.dumps({"environment": {"NCCL_DEBUG": "a=b", "EMPTY": ""}}))
    assert read_site(str(path)).environment == {"NCCL_DEBUG": "a=b", "EMPTY": ""}


@pytest.mark.parametrize(
    ("options", "words"),
    [({"sbatch": {"time": 30}}, "sbatch='time' is set by timeout_minutes: change that, and remove this"),
     ({"sbatch": {"signal": "USR2@60"}}, "sbatch='signal' is set by slurm.signal_seconds: change that, and "
      "remove this"),
     ({"mpi": "pmix-v4"}, "mpi='pmix-v4' must have lower-case letters, digits and '_' only, as srun "
      "--mpi=list prints them"),
     ({"mpi": "pmix_v4\n"}, r"mpi='pmix_v4\n' must have lower-case letters, digits and '_' only, as srun "
      "--mpi=list prints them")],
)  # fmt: skip
def test_an_option_of_slurm_that_would_not_do_what_it_says_is_refused(tmp_path, options, words):
    path = tmp_path / "there.yaml"
    path.write_text(json.dumps({"launcher": "slurm", "slurm": {"ranks_per_node": 4, **options}}))
    with pytest.raises(SiteError) as error:
        read_site(str(path))
    assert str(error.value) == f"{path}:1: slurm.{words}"
