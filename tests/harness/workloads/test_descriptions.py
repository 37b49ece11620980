"""Promise: a login node reads the registry and every description without torch."""

import subprocess
import sys

PROGRAM = """\
import sys
sys.modules["torch"] = None  # an import of it fails
import harness.workloads
print(sum(one.examples({}) > 0 for one in harness.workloads.WORKLOADS.values()))
"""


def test_registry_and_descriptions_import_no_torch():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "5\n"  # of bert, gpt and multi30k only the text tells
