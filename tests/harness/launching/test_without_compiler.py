"""Promise: ranks train to the same bits without torch's compiler, and load it when it is asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cell import Cell
from harness.launchers import LAUNCHERS
from harness.runs.store import sweep_folder

LISTING_RANK = (sys.executable, str(Path(__file__).with_name("listing_rank.py")))
COMPILER = ("torch._dynamo.", "torch._inductor", "sympy")


@pytest.mark.ranks
def test_ranks_train_without_the_compiler_to_the_same_bits(make_cell, site, tmp_path, start_supervisor):
    kfac = {"strategy": "mem_opt", "damping": 0.01, "factor_update_steps": 1, "inverse_update_steps": 2}
    training = {"global_batch_size": 840, "epochs": 2}
    cell = Cell.model_validate(make_cell(2).model_dump() | {"kfac": kfac, "training": training})
    digests = set()
    for compiler in ("not loaded", "loaded"):
        own = site.model_copy(update={"environment": {"COMPILER": compiler}})
        attempt = sweep_folder("study", tmp_path).stage(cell).new_attempt()
        LAUNCHERS["local"].plan(cell, own, LISTING_RANK).write(attempt)
        outcome = start_supervisor(attempt).outcome()
        assert outcome.state == "COMPLETED", outcome.cause
        digests.add(attempt.read("result.json")["parameters_sha256"])
        for rank in range(2):
            seen = json.loads((attempt.path / f"loaded-{rank}.json").read_text())
            loaded = [name for name in seen["modules"] if name.startswith(COMPILER)]
            print(f"{compiler}: {seen['seconds']:.2f} CPU s, {len(seen['modules'])} modules")
            assert bool(loaded) == (compiler == "loaded"), loaded
    assert len(digests) == 1


USES = {
    "compiled model": "assert torch.compile(model, backend='eager')(x).shape == x.shape\n"
    "assert torch._dynamo.utils.counters['frames']['ok'] == 1",
    "a setting": "import torch._dynamo.config as config, torch._dynamo.eval_frame as frame\n"
    "assert config is torch._dynamo.config is frame.config",
    "a part that the package does not load": "from torch._dynamo.backends.registry import lookup_backend\n"
    "assert torch._dynamo.backends.registry.lookup_backend is lookup_backend",
    "a function that must not be compiled": "from torch import compiler\n"
    "seen = compiler.disable(compiler.is_compiling, reason='no')\n"
    "plain = compiler.disable(recursive=False)(lambda: 1)\n"
    "assert torch.compile(lambda x: (x + plain(), seen()), backend='eager')(x)[1] is False",
    "recomputed activations": "from torch.utils.checkpoint import checkpoint\n"
    "checkpoint(model, x, use_reentrant=False).sum().backward()",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_compiler_is_loaded_when_it_is_asked_for(use):
    code = (
        "import sys, torch; from harness.training.compiler import do_without_compiler\n"
        "do_without_compiler(); model = torch.nn.Linear(3, 3); x = torch.ones(2, 3)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1); optimizer.step(); optimizer.zero_grad()\n"
        f"assert 'torch._dynamo.config' not in sys.modules\n{use}\noptimizer.step()\n"
        "assert torch._dynamo is sys.modules['torch._dynamo'] and torch._dynamo.is_compiling() is False"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
