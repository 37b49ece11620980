"""A rank that trains, and then lists the modules that it has loaded and the CPU seconds that it took."""

import importlib
import json
import os
import resource
import sys
from pathlib import Path

from harness.training import worker

if __name__ == "__main__":
    if os.environ.get("COMPILER") == "loaded":
        importlib.import_module("torch._dynamo")
    end = worker.exit_at_once

    def list_and_end(code: int) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seen = {"seconds": used.ru_utime + used.ru_stime, "modules": sorted(sys.modules)}
        attempt, rank = sys.argv[1], sys.argv[sys.argv.index("--rank") + 1]
        Path(attempt, f"loaded-{rank}.json").write_text(json.dumps(seen))
        end(code)

    worker.exit_at_once = list_and_end
    worker.main()
