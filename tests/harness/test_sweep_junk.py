"""Promise: whatever replaces a part of a sweep file, it is read as cells or gives an error of one line."""

import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import SweepError
from harness.study.sweep import read_sweep

SWEEP = {
    **yaml.safe_load(Path("jobs/sweeps/demo.yaml").read_text()),
    "workload": {"name": "digits", "options": {"width": 16}},
    "zip": [{"training.epochs": [1, 2], "optimizer.lr": [0.1, 0.2]}],
}


def parts(value, place=()):
    """The way to every part below `value`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inside:
        yield (*place, key)
        yield from parts(below, (*place, key))


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 10**30), st.floats(), st.text(max_size=3),
    st.sampled_from([[], {}, [[]], [{}], [None], ["sgd"], {"name": "sgd"}, {"a": {"b": 1}}, "two\nlines"]),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(place=st.sampled_from(list(parts(SWEEP))), junk=JUNK)
def test_junk_is_never_a_traceback(tmp_path_factory, place, junk):
    content = copy.deepcopy(SWEEP)
    part = content
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = copy.deepcopy(junk)
    path = tmp_path_factory.getbasetemp() / "junk.yaml"
    path.write_text(yaml.safe_dump(content))
    try:
        assert read_sweep(path).cells
    except SweepError as error:
        message = str(error)
        assert message.startswith(f"{path}:")
        assert "\n" not in message
        assert "Value error" not in message
        assert "http" not in message
