"""`python -m harness.bench.gpu`: the acceptance run, with any Python that has torch and numpy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.bench.gpu.acceptance import Acceptance
from harness.bench.gpu.parts import PARTS
from harness.errors import UserError


def main() -> int:
    """Read the command line and run the parts; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench.gpu",
        description="Acceptance of this project on one GPU, or two. Nothing is downloaded.",
        epilog="Parts: " + "; ".join(f"{name} ({part.about})" for name, part in PARTS.items()),
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal on small sizes")
    parser.add_argument("--parts", default="", help="names, separated by commas; by default all")
    parser.add_argument("--out", type=Path, help="folder of the results; by default results/gpu")
    parser.add_argument("--minutes", type=float, default=25.0, help="limit for all parts together")
    parser.add_argument("--again", action="store_true", help="also run parts that have passed")
    parser.add_argument(
        "--data", help="folder with CIFAR-10's batch files; by default an embedded part of it"
    )
    parser.add_argument("--gpauloski", help="checkout of gpauloski/kfac-pytorch, to measure beside")
    parser.add_argument("--lzhangbv", help="checkout of lzhangbv/kfac_pytorch, to measure beside")
    given = vars(parser.parse_args())
    given["parts"] = tuple(name for name in given["parts"].split(",") if name)
    try:
        return Acceptance(**given).run(lambda line: print(line, flush=True))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
