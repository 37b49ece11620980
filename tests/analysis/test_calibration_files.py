"""Promise: a damaged calibration is refused in one line that names file, field, got and allowed; no price is
made.

What is accepted gives finite prices that are not negative, of every arm.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from analysis.cost_model.arms import Question, ask
from analysis.cost_model.calibration_file import read_calibration
from analysis.cost_model.errors import CostModelError
from analysis.cost_model.models import read_model
from harness.cli import main
from kfac_core.config import KFACConfig
from tests.mutations import COUNT, mutated

GOOD = json.loads(Path("results/calibrations/spd_kfac_64.json").read_text())
MEASURED = {
    **GOOD,
    "links": {"between": GOOD["links"]["between"], "inside": GOOD["links"]["between"]},
    "ranks_per_node": 4,
    "gemm": {"points": [[1e6, 1e-4], [1e9, 1e-2]]},
    "inverse": {
        "eigen": {"points": [[64.0, 1e-4], [576.0, 0.014], [4096.0, 1.5]]},
        "inverse": GOOD["inverse"]["inverse"],
    },
}

# The way to a value, its replacement (None removes it), and the message after the file's name.
FIELDS = {
    "a negative time": ("gemm points 0 1", -1e-4, "gemm.points[0][1] must be greater than 0, got -0.0001"),
    "no time": ("gemm points 0 1", 0.0, "gemm.points[0][1] must be greater than 0, got 0.0"),
    "an endless time": ("gemm points 0 1", math.inf, "gemm.points[0][1] must be a finite number"),
    "a time that is no number": ("gemm points 0 1", math.nan, "gemm.points[0][1] must be a"),
    "a negative size": ("gemm points 0 0", -5.0, "gemm.points[0][0] must be greater than 0, got -5.0"),
    "unsorted sizes": (
        "gemm points", [[1e9, 1e-2], [1e6, 1e-4]],
        "gemm points must have ascending sizes, each once, got [1000000000.0, 1000000.0]",
    ),
    "a size twice": (
        "gemm points", [[10, 1e-2], [10, 1e-4]],
        "gemm points must have ascending sizes, each once, got [10.0, 10.0]",
    ),
    "no points": ("gemm points", [], "gemm must have points [size, seconds]"),
    "a point of one number": ("gemm points 0", [1.0], "gemm.points[0][1] is missing"),
    "a point of three": ("gemm points 0", [1.0, 2.0, 3.0], "gemm.points[0] must"),
    "points as text": ("gemm points", "fast", "gemm.points must be a"),
    "a curve that is a list": ("gemm", [1], "gemm must be an object, got"),
    "a curve that is nothing": ("gemm", None, "gemm is missing"),
    "a number as text": ("bytes_per_second", "3e11", "bytes_per_second must be a number, got '3e11'"),
    "a negative rate": (
        "bytes_per_second", -1.0,
        "bytes_per_second must be greater than or equal to 1, got -1.0",
    ),
    "no rate": ("bytes_per_second", 0, "bytes_per_second must be greater than or equal to 1, got 0"),
    "true for one": ("bytes_per_second", True, "bytes_per_second must be a number, got True"),
    "a negative latency": (
        "links between all_reduce latency_seconds", -1.0, "links.between.all_reduce.latency_seconds must be",
    ),
    "a link of one rank": (
        "links between all_reduce world_size", 1,
        "links.between.all_reduce.world_size must be greater than or equal to 2, got 1",
    ),
    "half a rank": ("largest_world_size", 2.5, "largest_world_size must be"),
    "no ranks": ("largest_world_size", 0, "largest_world_size must be greater than or equal to 1, got 0"),
    "ranks of no node": ("ranks_per_node", 0, "ranks_per_node must be greater than or equal to 1, got 0"),
    "inside of no node": (
        "ranks_per_node", None,
        "links.inside needs ranks_per_node, the ranks that share them",
    ),
    "no links between nodes": ("links between", None,
    "links must have `between`, for ranks of different nodes"),
    "links without operations": ("links between", {}, "links must have an operation of each kind of wire"),
    "an unknown operation": (
        "links between broadcast", {"world_size": 2}, "links.between.broadcast.[key] must be 'all_reduce'",
    ),
    "an unknown wire": ("links across", {}, "links.across.[key] must be 'between' or 'inside'"),
    "an unknown solver": (
        "inverse cholesky", GOOD["inverse"]["inverse"],
        "inverse.cholesky.[key] must be 'eigen'",
    ),
    "no solver": ("inverse", {}, "inverse must have `eigen` or `inverse`"),
    "an unknown formula": (
        "factor formula", "linear",
        "factor.formula must be 'points', 'power' or 'exponential'",
    ),
    "a law that takes no time": (
        "factor", {"formula": "power"},
        "factor constant and coefficient are both 0: everything would take no time",
    ),
    "points beside a law": ("factor points", [[1, 1]], "factor points have no effect with formula=power"),
    "a negative law": ("factor coefficient", -1e-13, "factor.coefficient must be greater than or equal to 0"),
    "a residual beyond measure": (
        "factor relative_error", 1e4,
        "factor.relative_error must be less than or equal",
    ),
    "facts without a batch": (
        "models resnet50 local_batch_size", None, "models.resnet50.local_batch_size is missing",
    ),
    "facts of no time": (
        "models resnet50 factor_seconds", 0, "models.resnet50.factor_seconds must be greater than 0, got 0",
    ),
    "an unknown key": ("colour", "red", "colour is not a known key"),
    "a name of two lines": ("name", "a\nb", "name must match pattern"),
    "no memory": ("memory_bytes", 0, "memory_bytes must be greater than or equal to 1, got 0"),
    "memory beyond 64 bits": ("memory_bytes", 2**70, "memory_bytes must be less than or equal to"),
}  # fmt: skip

TEXTS = {
    "nothing": (b"", "not JSON: Expecting value"),
    "half of it": (json.dumps(GOOD).encode()[:500], "not JSON: "),
    "bytes that are no text": (b"{\xff\xfe}", "not JSON: 'utf-"),
    "a list": (b"[]", "not a calibration: must be a mapping, got []"),
    "a number": (b"3", "not a calibration: must be a mapping, got 3"),
    "nesting": (b"[" * 200_000, "not JSON: nested too deep"),
    "nesting in the environment": (
        json.dumps({**GOOD, "environment": 0}).encode().replace(b'"environment": 0',
        b'"environment": ' + b"[" * 900),
        "not JSON: ",
    ),
    "a number of 5,000 digits": (b'{"schema": ' + b"1" * 5_000 + b"}", "not JSON: Exceeds the limit"),
    "a key twice": (b'{"schema": 1, "schema": 1}', "not JSON: key 'schema' is given twice"),
    "not a number": (b'{"schema": NaN}', "not JSON: schema=nan must be a finite number"),
    "megabytes": (b" " * (1 << 20) + b"{}", "has more than 1024 KiB, the most that is allowed"),
    "another version": (b'{"schema": true}', "calibration of schema True; this code reads 1"),
    "another library": (b'{"schema": 1, "algorithm": []}', "algorithm=[] is not one of ('gloo', 'nccl')"),
}  # fmt: skip


def error_line(path: Path) -> str:
    with pytest.raises(CostModelError) as error:
        read_calibration(str(path))
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    return message.removeprefix(f"{path}: ").removeprefix("not a calibration: ")


@pytest.mark.parametrize("case", FIELDS)
def test_a_wrong_field_is_named_with_what_is_allowed(case, tmp_path):
    way, value, message = FIELDS[case]
    content = copy.deepcopy(MEASURED)
    *outer, last = (int(part) if part.isdigit() else part for part in way.split())
    part = content
    for key in outer:
        part = part[key]
    if value is None:
        del part[last]
    else:
        part[last] = value
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(content))
    assert message in error_line(path)


@pytest.mark.parametrize("case", TEXTS)
def test_a_text_that_is_no_calibration_is_one_line(case, tmp_path):
    content, message = TEXTS[case]
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    assert error_line(path).startswith(message.removeprefix("not a calibration: "))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / "machine.json"
    os.mkfifo(path)
    assert error_line(path) == "must be a regular file"


def test_the_measured_form_is_accepted(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(MEASURED))
    assert read_calibration(str(path)).inverse["eigen"].at(576) == pytest.approx(0.014)


def test_a_damaged_calibration_is_one_line_or_gives_finite_prices(tmp_path):
    random, found, path = Random(COUNT), Counter(), tmp_path / "machine.json"  # noqa: S311  no secret
    texts = [(json.dumps(one, indent=1), one) for one in (GOOD, MEASURED)]
    model = read_model("resnet20")
    for number in range(COUNT):
        text, content = random.choice(texts)
        damaged = mutated(content, text, random)
        path.write_bytes(damaged)
        try:
            machine = read_calibration(str(path))
            config = KFACConfig(solver="inverse" if "inverse" in machine.inverse else "eigen")
            table = ask(Question(model, config, 8, machine), [4], ["sgd", "comm_opt", "dp_kfac"])
        except CostModelError as error:
            message = str(error)
            assert len(message.splitlines()) == 1, (number, message)
            assert len(message) < 600, (number, message)
            found["refused"] += 1
            continue
        except BaseException:
            print(f"mutation {number}: {damaged[:2000]!r}")
            raise
        for prediction in table[4].values():
            for seconds in prediction.step_seconds.values():
                assert 0 <= seconds.low <= seconds.central <= seconds.high < math.inf, (number, damaged)
        found["accepted"] += 1
    assert found["refused"] > found["accepted"] > 0


QUESTIONS = {
    "--memory-gib inf": "--memory-gib=inf must be a number of GiB > 0 and <= 1048576",
    "--memory-gib 0": "--memory-gib=0 must be a number of GiB > 0 and <= 1048576",
    "--epochs-ratio inf": "--epochs-ratio=inf must be a finite number > 0",
    "--epochs-ratio 0": "--epochs-ratio=0 must be a finite number > 0",
    "--set grad_worker_fraction=0.3": "--set grad_worker_fraction=0.3 gives no whole number of",
    "--set grad_worker_fraction=0.3 --world-size 8": (
        "--set grad_worker_fraction=0.3 gives 2.4 gradient workers in a world of 8; use a fraction that "
        "gives a whole number dividing 8: 1/8, 2/8, 4/8, 8/8 (--world-size 8)"
    ),
    "--set grad_worker_fraction=x": "--set grad_worker_fraction='x' must be a number in (0, 1]",
    "--set grad_worker_fraction=.inf": "--set grad_worker_fraction='.inf' must be a number in (0, 1]",
    "--world-size 10000000": "--world-size 10000000: sizes must be whole numbers from 1 to 100000",
    "--world-size 1,\N{SUPERSCRIPT TWO}": "sizes must be whole numbers from 1 to 100000",
    f"--world-size {'9' * 5000}": "sizes must be whole numbers from 1 to 100000",
    "--local-batch-size 99999999999": "less than or equal to 2147483648",
    "--set damping=[1]": "--set damping must be a number, got [1]",
    "--set skip=3": "--set skip must be a list, got 3",
    "--set overlap_factors=3": "--set overlap_factors must be true or false, got 3",
    "--set strategy=mem_opt": "--set strategy=mem_opt: predict shows every strategy",
    "--calibration /dev/null/x.json": "/dev/null/x.json: cannot be read: Not a directory",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_that_has_no_answer_is_one_line(question, capsys):
    assert main(["predict", "--model", "resnet20", *question.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert QUESTIONS[question] in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.slow
def test_of_the_default_sizes_those_that_a_fraction_divides_are_shown(capsys):
    command = ["predict", "--model", "resnet20", "--set", "grad_worker_fraction=0.25", "--json"]
    assert main(command) == 0
    sizes = {row["world_size"] for row in json.loads(capsys.readouterr().out)["arms"]}
    assert sizes == {2**power for power in range(2, 13)}
