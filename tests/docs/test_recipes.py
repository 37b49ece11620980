"""Promise: every recipe trains as the plain loop does, on one rank and on two, and resumes exactly."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC
from tests.docs.blocks import BLOCKS

STEPS = 6
START, *OTHERS = [block for block in BLOCKS if "recipe" in block.words]
NAMES = "plain", "trainer", "accelerate", "lightning", "distributed", "compile"
RECIPES = {name: block.text for name, block in zip(NAMES, OTHERS, strict=True)}
"""In the order of the page."""

NEEDS = {
    "trainer": ("transformers", "accelerate"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
}
CLIPS = {
    "trainer": {"before": 0.5},
    "accelerate": {"before": 0.5},
    "lightning": {"after": 0.5},
    "distributed": {"after": 0.5, "warmed": True},
}
"""What each loop does around K-FAC that the plain one does not."""

IN_ORDER = {
    "lightning": [
        ("logger=False,", "logger=False, use_distributed_sampler=False,"),
        (
            "TensorDataset(inputs, labels)",
            "TensorDataset(inputs[rank::world_size], labels[rank::world_size])",
        ),
    ]
}
"""On several ranks Lightning shuffles training data that comes in order; these changes keep it."""


def needs(name: str) -> pytest.MarkDecorator:
    missing = [each for each in NEEDS.get(name, ()) if importlib.util.find_spec(each) is None]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}")


def cases(*names: str) -> list[Any]:
    return [pytest.param(name, marks=needs(name)) for name in names]


def begun() -> dict[str, Any]:
    """The names that the page's first block gives to all recipes."""
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(START.text, str(START), "exec"), names)  # noqa: S102  our own pages
    return names


def plain(
    steps: int = STEPS, before: float | None = None, after: float | None = None, *, warmed: bool = False
) -> list[Tensor]:
    """The parameters after a loop of this file's own."""
    with in_float64():
        names = begun()
        model: nn.Module = names["model"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6) if warmed else None
        kfac = KFAC(model, names["config"], lr=optimizer)
        for step in range(steps):
            part = slice(16 * (step % STEPS), 16 * (step % STEPS) + 16)
            optimizer.zero_grad()
            functional.cross_entropy(model(names["inputs"][part]), names["labels"][part]).backward()
            if before is not None:
                assert nn.utils.clip_grad_norm_(model.parameters(), before) > before or step > 2
            kfac.step()
            if after is not None:
                nn.utils.clip_grad_norm_(model.parameters(), after)
            optimizer.step()
            if warmup is not None:
                warmup.step()
        return [parameter.detach() for parameter in model.parameters()]


def trained(rank: int, world_size: int, name: str, folder: str, *changes: tuple[str, str]) -> list[Tensor]:
    """The parameters of the page's model after a recipe, whose text is changed in places."""
    text = RECIPES[name]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    with in_float64(), in_folder(folder), as_launched(rank, world_size):
        names = begun()
        model = names["model"]
        names |= {"rank": rank, "world_size": world_size}
        exec(compile(text, name, "exec"), names)  # noqa: S102
        return [parameter.detach() for parameter in model.parameters()]


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def in_folder(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def as_launched(rank: int, world_size: int) -> Iterator[None]:
    """The variables that torchrun sets, and none of what a recipe leaves behind."""
    before = dict(os.environ)
    if world_size > 1:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {key: str(value) for key, value in own.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GROUP_RANK": "0"}
        os.environ |= {"TORCHELASTIC_RUN_ID": "none"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        with contextlib.suppress(ImportError):
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state(reset_partial_state=True)


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.slow  # the libraries of the recipes take seconds to import
@pytest.mark.parametrize(
    "name",
    [*cases("plain", "trainer", "accelerate", "lightning"), pytest.param("compile", marks=needs("compile"))],
)
def test_on_one_rank_a_recipe_ends_with_the_parameters_of_the_plain_loop(name, tmp_path, monkeypatch):
    torch._dynamo.reset()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiled(model, backend="aot_eager"))  # no C++
    assert_equal(trained(0, 1, name, str(tmp_path)), plain(**CLIPS.get(name, {})))


@pytest.mark.parametrize("name", cases("trainer", "accelerate", "lightning", "distributed"))
def test_on_two_ranks_a_recipe_ends_with_the_parameters_of_the_plain_loop(name, tmp_path, world):
    for got in world(2).run(trained, name, str(tmp_path), *IN_ORDER.get(name, ())):
        assert_equal(got, plain(**CLIPS[name]))
    if name == "distributed":  # and resumed after three of six steps
        resumed = tmp_path / "resumed"
        resumed.mkdir()
        world(2).run(trained, name, str(resumed), ("FOLDER = 6", "FOLDER = 3"))
        for got in world(2).run(trained, name, str(resumed)):
            assert_equal(got, plain(**CLIPS[name]))


LATER = {
    "trainer": (6, [("trainer.train()", "trainer.train(resume_from_checkpoint=True)")]),
    "accelerate": (
        12,
        [("for x, y in loader:", 'accelerator.load_state("checkpoints")\nfor x, y in loader:')],
    ),
    "lightning": (
        12,
        [
            ("max_epochs=1", "max_epochs=2"),
            ("(model), loader)", '(model), loader, ckpt_path="checkpoints/last.ckpt")'),
        ],
    ),
}
"""What a run after an interruption says in the place of the page, and how many steps both have taken."""


@pytest.mark.slow
@pytest.mark.parametrize("name", cases("trainer", "accelerate", "lightning"))
def test_a_run_that_resumes_ends_with_the_parameters_of_one_that_was_not_interrupted(name, tmp_path):
    steps, changes = LATER[name]
    trained(0, 1, name, str(tmp_path))
    for last in (4, 6) if name == "trainer" else ():
        shutil.rmtree(tmp_path / "checkpoints" / f"checkpoint-{last}")
    assert_equal(trained(0, 1, name, str(tmp_path), *changes), plain(steps, **CLIPS[name]))
