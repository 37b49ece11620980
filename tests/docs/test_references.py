"""Promise: every field, option, command and exported name is explained, and no link leads to nothing."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from dataclasses import dataclass

import pytest
from markdown.extensions.toc import slugify
from pydantic import TypeAdapter, ValidationError

import analysis
import kfac_core
from docs.generator.command_pages import MissingHelpError, _of, commands, parameters
from docs.generator.field_pages import MODELS, MissingDescriptionError, option_rows, rows
from docs.generator.formulas import FormulaError, with_formulas
from docs.generator.links import INCLUDED, BrokenLinkError, broken_links, rewritten
from docs.generator.paper_pages import sizes
from harness.cli import command_line
from harness.errors import SweepError
from harness.workloads import WORKLOADS
from harness.yaml_files.document import read_value
from kfac_core.config import SOLVERS, STRATEGIES
from kfac_core.errors import ConfigError
from tests.docs.blocks import ROOT

# The least that each model needs beside the field in question, and what single fields need beside that.
LEAST = {
    "sweep": {"sweep": "s", "methods": [{"name": "sgd"}]},
    "tuning": {"trials": 2, "study": {"sweep": "s", "seeds": [0]}},
    "study": {"sweep": "s", "seeds": [0]},
    "tuned": {"sweep": "s", "trials": 2, "seeds": [0]},
    "workload": {"name": "digits"},
    "target": {"metric": "accuracy", "at_least": 0.9},
    "training": {"global_batch_size": 64, "epochs": 20},
    "optimizer": {"lr": 0.1},
    "kfac": {"factor_update_steps": 1},
    "kfac.costs": {"inverse_seconds": [[64, 0.1], [128, 0.2]]},
    "schedule": {"initial": 1.0, "factor": 0.5, "at": [1]},
    "decay": {"shape": "linear"},
    "site": {"name": "here"},
    "slurm": {"ranks_per_node": 4},
}
CONTEXT = {
    ("sweep", "tuning"): {"seeds": [1000]},
    ("target", "at_most"): {"at_least": None},
    ("training", "local_batch_size"): {"global_batch_size": None},
    ("decay", "power"): {"shape": "polynomial"},
    ("decay", "every"): {"shape": "step"},
    ("decay", "factor"): {"shape": "step", "every": 2},
    ("kfac", "strategy"): {"grad_worker_fraction": 0.5},
    ("kfac", "grad_worker_fraction"): {"strategy": "hybrid_opt"},
}
FIELDS = [(name, row) for name, model in MODELS.items() for row in rows(model)]


def read(model: str, field: str, value: object) -> object:
    content = {**LEAST[model], **CONTEXT.get((model, field), {}), field: value}
    return TypeAdapter(MODELS[model]).validate_json(json.dumps(content), strict=True)


@pytest.mark.parametrize(("model", "row"), FIELDS, ids=[f"{model}.{row.name}" for model, row in FIELDS])
def test_the_example_of_a_field_is_accepted_its_meaning_is_a_sentence_and_its_range_is_checked(model, row):
    content = read_value(f"{row.name}: {row.example}", "example", SweepError)  # keys may depend on the field
    assert read(model, row.name, content[row.name]) is not None
    assert row.meaning.endswith((".", ")")), row.meaning
    assert row.kind
    if not re.fullmatch(r"`[\[(].*[\])]`", row.allowed):
        assert row.name not in {"damping", "factor_decay", "kl_clip", "initial"}
        return
    low, high = row.allowed.strip("`")[1:-1].split(", ")
    for bound, closed in ((low, row.allowed[1] == "["), (high, row.allowed[-2] == "]")):
        if bound == "inf":
            continue
        value = int(bound) if "whole" in row.kind else float(bound)
        if closed:
            assert read(model, row.name, value) is not None
            value += -1 if bound == low else 1
        with pytest.raises((ValidationError, ConfigError)):
            read(model, row.name, value)


def test_every_option_of_a_workload_has_a_meaning_and_its_upper_bound_is_checked():
    for workload, card in WORKLOADS.items():
        assert {name for name, *_ in option_rows(workload)} == set(card.meanings)
    bounded = [(name, *row) for name in WORKLOADS for row in option_rows(name) if "at most" in row[2]]
    assert len(bounded) > 20
    for name, option, _, allowed, _ in bounded:
        most = int(allowed.rpartition(" ")[2].replace(",", ""))
        with pytest.raises(ValueError, match=option):
            WORKLOADS[name].examples({option: most + 1})


@dataclass
class Unexplained:
    """A model with a field that nothing explains."""

    explained: int = 1
    """Explained. Example: `1`."""

    silent: int = 2


def test_the_options_on_the_page_are_those_that_the_command_line_takes():
    for command in commands():
        known = command_line()
        for word in command.name.split()[1:]:
            known = known.commands[word]
        taken = {name for one in known.params for name in one.opts if name.startswith("-")} - {"--help", "-h"}
        options = [one.shown for one in parameters(command) if one.is_option]
        assert {name.split()[0].split("/")[0] for one in options for name in one.split(", ")} == taken


def test_every_command_and_parameter_has_a_text_and_one_without_stops_the_build():
    found = list(commands())
    assert {"kronscale plan", "kronscale reproduce"} <= {command.name for command in found}
    assert sum(len(list(parameters(command))) for command in found) > 100

    typer = pytest.importorskip("typer")
    silent = typer.Typer()

    @silent.command()
    def one(number: int = 1) -> None:
        pass

    with pytest.raises(MissingHelpError, match="x one has no docstring"):
        list(_of(silent, "x"))
    with pytest.raises(MissingDescriptionError, match=r"Unexplained\.silent"):
        list(rows(Unexplained))


def public_members(thing: object) -> list[tuple[str, object]]:
    members = vars(thing).items()
    return [
        (name, member)
        for name, member in members
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, (property, classmethod)))
    ]


@pytest.mark.parametrize(
    "name", [f"kfac_core.{n}" for n in kfac_core.__all__] + [f"analysis.{n}" for n in analysis.__all__]
)
def test_every_exported_name_and_public_method_has_a_docstring(name):
    package, _, attribute = name.partition(".")
    exported = getattr({"kfac_core": kfac_core, "analysis": analysis}[package], attribute)
    assert inspect.getdoc(exported)
    if inspect.isclass(exported):
        silent = [member for member, value in public_members(exported) if not inspect.getdoc(value)]
        assert silent == []


def markdown_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


def test_no_page_links_to_a_file_or_heading_that_does_not_exist():
    assert [link for path in markdown_files() for link in broken_links(path)] == []
    assert [source for source in INCLUDED if not (ROOT / source).is_file()] == []
    linked = re.findall(r"\]\(([^)#\s]+\.md)#([^)]+)\)", (ROOT / "README.md").read_text())
    assert linked
    for path, anchor in linked:
        text = re.sub(r"^```.*?^```", "", (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert anchor in [slugify(heading, "-") for heading in headings], (path, anchor)


def test_a_link_to_nothing_and_an_unreadable_formula_stop_the_build():
    with pytest.raises(BrokenLinkError, match=re.escape("docs/index.md: links to ../nothing.md")):
        rewritten("see [this](../nothing.md)", "index.md")
    with pytest.raises(FormulaError, match=r"page\.md"):
        with_formulas("$$\n\\nosuchcommand{x}\n$$", "page.md")


def test_links_of_the_repository_become_links_of_the_site():
    assert rewritten("[r](../results/README.md#traffic)", "methods.md") == "[r](records.md#traffic)"
    assert rewritten("[g](../../kfac_core/README.md)", "reference/kfac_core.md") == "[g](../library.md)"
    assert rewritten("[c](../harness/cell.py)", "methods.md") == "c (`harness/cell.py`)"
    assert rewritten("```sh\n[x](y)\n```", "methods.md") == "```sh\n[x](y)\n```"


def test_methods_names_every_strategy_and_solver_and_papers_every_paper_and_size():
    methods = (ROOT / "docs/methods.md").read_text()
    assert [name for name in (*STRATEGIES, *SOLVERS) if f"`{name}`" not in methods] == []
    papers = (ROOT / "docs/papers.md").read_text()
    missing = [pair for pair in sizes() if f"`kronscale reproduce {pair[0]} --size {pair[1]}`" not in papers]
    assert missing == []
    for page, most in (("README.md", 150), ("CHANGELOG.md", 100)):  # what is read first stays short
        assert len((ROOT / page).read_text().splitlines()) <= most
