"""Promise: a site's variables can be set for ranks, or its profile is refused."""

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
