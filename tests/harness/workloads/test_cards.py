"""Promise: a login node reads the registry and every card without torch."""

import subprocess
import sys

PROGRAM = """\
import pkgutil, sys
from importlib import import_module
sys.modules["torch"] = None  # an import of it fails
import harness.workloads, harness.workloads.cards
for module in pkgutil.iter_modules(harness.workloads.cards.__path__, "harness.workloads.cards."):
    import_module(module.name)
print(sum(card.examples({}) > 0 for card in harness.workloads.WORKLOADS.values()))
"""


def test_registry_and_cards_import_no_torch():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "5\n"  # of bert, gpt and multi30k only the text tells
