"""Runs pytest again and again, each time in a fork of this process, which has imported the libraries.

Importing torch, pandas and scipy takes longer than most tests of a mutant. Nothing of this project is
imported here. A request is a line of JSON: `folder`, `arguments`, `output` (a file) and `seconds`; the answer
is the exit code, or `null` after that many seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

LIBRARIES = (
    "torch", "torch.distributed", "pandas", "scipy.stats", "scipy.special", "matplotlib.figure",
    "pyarrow.parquet", "pytest", "hypothesis", "pydantic", "yaml", "typer", "rich.console",
    "jinja2", "psutil",
)  # fmt: skip
_POLL_SECONDS = 0.05


def main() -> None:
    """Answer requests until there are no more; ends its tests if it is interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(1))
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(request: dict[str, Any]) -> int | None:
    child = os.fork()
    if child == 0:
        _test(request["folder"], request["arguments"], request["output"])
    ends = time.monotonic() + request["seconds"]
    try:
        while time.monotonic() < ends:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(_POLL_SECONDS)
        return None
    finally:
        _kill_group(child)  # and what its tests have left behind
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _test(folder: str, arguments: list[str], output: str) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    code = 70
    try:
        with open(os.devnull) as nothing, open(output, "w") as file:  # noqa: PTH123
            for source, target in ((nothing, 0), (file, 1), (file, 2)):
                os.dup2(source.fileno(), target)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = folder  # for what the tests start; before the installed project
        sys.path[0], sys.argv = folder, ["pytest", *arguments]
        import pytest  # noqa: PLC0415  loaded above

        code = int(pytest.main(arguments))
        sys.stdout.flush()
    except BaseException:  # nothing may return into the server's loop
        traceback.print_exc()
    os._exit(code)


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    main()
