"""Promise: examples in the README and the pages work as shown.

Sweeps and profiles are read, `kronscale` commands run in a folder with made-up runs, Python blocks executed.
A word after a block's language limits that: `slow` starts ranks or takes minutes (`test_tutorial.py` runs the
tutorial), `slurm` needs a cluster, `site` differs from site to site: their commands are parsed only. `ranks`
and `mpi`: Python that runs on two ranks; `recipe`: Python that `test_recipes.py` runs.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from harness.cli import command_line, main
from harness.errors import SweepError
from harness.launchers.site_profile import read_site
from harness.runs.store import SweepFolder
from harness.study.sweep import read_sweep
from harness.yaml_files.document import read_document
from kfac_core import KFAC, KFACConfig
from tests.analysis.conftest import Plan, write_run
from tests.docs.blocks import BLOCKS, PAGES, ROOT, WORDS, Block

COMMANDS = [(block, arguments) for block in BLOCKS for arguments in block.commands]
NOT_RUN = {"slow", "slurm", "site"}


def test_blocks_are_found_on_every_page_that_has_commands_and_their_words_are_known():
    assert len(PAGES) > 15
    assert len(COMMANDS) > 30
    assert [str(block) for block in BLOCKS if not block.words <= WORDS] == []
    assert {"README.md", "docs/tutorial.md"} <= {block.page for block, _ in COMMANDS}


@pytest.mark.parametrize(
    ("block", "arguments"), COMMANDS, ids=lambda value: str(value) if isinstance(value, Block) else ""
)
def test_a_command_is_one_that_the_command_line_understands(block, arguments):
    command: Any = command_line()
    context = None
    while hasattr(command, "commands"):
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
        assert arguments[0] in command.commands, f"{block}: no command {arguments[0]}"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    command.make_context(command.name, list(arguments), parent=context)  # raises a usage error
    with pytest.raises(Exception, match="--no-such-option"):
        command.make_context(command.name, ["--no-such-option"], parent=context)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.targets], ids=str)
def test_a_target_of_make_exists(block):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(block.targets) <= targets


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_a_sweep_or_profile_in_a_page_is_read_as_it_stands(block, tmp_path):
    file = tmp_path / "example.yaml"
    file.write_text(block.text)
    content = read_document(file, SweepError).content
    if "sweep" in content:
        assert read_sweep(file).cells
    elif "launcher" in content:
        assert read_site(str(file)).name == "example"
    else:  # a part of a sweep: of the smallest one
        training, optimizer = {"global_batch_size": 64, "epochs": 60}, {"lr": 0.1}
        least = {"sweep": "x", "workload": "digits", "target": {"metric": "accuracy", "at_least": 0.9}}
        method = {"name": "x", **({"kfac": {}} if "kfac" in content else {})}
        least |= {"training": training, "optimizer": optimizer, "world_size": 1, "methods": [method]}
        merged = {**least, **content}
        file.write_text(json.dumps(merged))
        assert read_sweep(file).cells


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the repository's jobs, the sweeps that pages show, and made-up runs of some of them."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(ROOT / "jobs", folder / "jobs", ignore=shutil.ignore_patterns("experiments"))
    for block in BLOCKS:
        if block.language == "yaml" and block.text.startswith("sweep: "):
            name = block.text.split("\n")[0].removeprefix("sweep: ")
            (folder / "jobs" / "sweeps" / f"{name}.yaml").write_text(block.text)
    for name in ("demo", "first", "schedule", "images"):
        runs = SweepFolder(folder / "results" / "runs" / name)
        for cell in read_sweep(folder / "jobs" / "sweeps" / f"{name}.yaml").cells:
            if cell.world_size <= 4:
                attempt = runs.stage(cell).new_attempt()
                write_run(attempt, cell, Plan(epochs=12, misses=()))
                for rank in range(cell.world_size):
                    log = attempt.path / "logs" / f"rank-{rank:05d}.log"
                    log.parent.mkdir(exist_ok=True)
                    log.write_text("made up\n")
    return folder


RUN = [
    pytest.param(block, words, id=f"{block} {' '.join(words)}", marks=[pytest.mark.slow] * ("--out" in words))
    for block, words in COMMANDS
    if not block.words & NOT_RUN
]


@pytest.mark.parametrize(("block", "arguments"), RUN)
def test_a_command_of_a_page_runs(block, arguments, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    assert main(arguments) == 0, capsys.readouterr().err


PYTHON = [block for block in BLOCKS if block.language == "python"]


@pytest.mark.parametrize("block", [one for one in PYTHON if not one.words], ids=str)
def test_a_python_block_runs(block, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    exec(compile(block.text, str(block), "exec"), names_of_a_training_loop())  # noqa: S102  our own pages


def names_of_a_training_loop() -> dict[str, Any]:
    """What a reader's program has before the lines that a page adds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "functional": functional,
        "x": x,
        "y": y,
        "micro_batches": [(x, y), (x, y)],
        "batches": [(x, y), (x, y)],
    }


def on_a_rank(rank: int, world_size: int, text: str) -> float:
    """Runs a block around a DistributedDataParallel model, then a step; the change of the parameters' sum."""
    names = names_of_a_training_loop()
    model = nn.parallel.DistributedDataParallel(names["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names |= {
        "model": model, "optimizer": optimizer, "torch": torch, "KFAC": KFAC,
        "KFACConfig": KFACConfig, "config": KFACConfig.sc20(), "nullcontext": nullcontext,
    }  # fmt: skip
    before = float(sum(one.double().abs().sum() for one in model.parameters()))
    exec(compile(text, "page", "exec"), names)  # noqa: S102  our own pages
    names["loss"] = functional.cross_entropy(
        model(names["micro_batches"][0][0]), names["micro_batches"][0][1]
    )
    optimizer.zero_grad()
    names["loss"].backward()
    names["kfac"].step()
    optimizer.step()
    return float(sum(one.double().abs().sum() for one in model.parameters())) - before


@pytest.mark.parametrize("block", [one for one in PYTHON if "ranks" in one.words], ids=str)
def test_a_python_block_runs_on_two_ranks(block, world):
    changes = world(2).run(on_a_rank, block.text)
    assert changes[0] == pytest.approx(changes[1], abs=1e-9) != 0


@pytest.mark.parametrize("block", [one for one in PYTHON if "mpi" in one.words], ids=str)
def test_a_python_block_runs_on_two_ranks_of_mpi(block, mpi_world):
    changes = mpi_world(2).run(on_a_rank, block.text)
    assert changes[0] == pytest.approx(changes[1], abs=1e-9) != 0
