"""Promise: kfac_core opens no file or socket, starts no process, reads no environment and prints nothing.

Whoever takes it out takes its tests along: they import nothing of this project but the two of them.
"""

import ast
import sys
from pathlib import Path

import kfac_core

ROOT = Path(kfac_core.__file__).parent
# Of the standard library, what cannot reach outside of the process.
HARMLESS = {
    "__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "difflib", "enum", "functools",
    "heapq", "importlib", "inspect", "itertools", "logging", "math", "numbers", "operator", "re", "sys",
    "threading", "time", "types", "typing", "warnings", "weakref", "datetime", "zlib",
}  # fmt: skip
# mpi.py yields its time slice while it polls, and asks the loaded MPI library whether it is CUDA-aware.
EXCEPTIONS = {("collectives/mpi.py", "os"), ("collectives/mpi.py", "ctypes")}
CALLS = {"open", "print", "input", "exec", "eval"}


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def called(tree: ast.AST) -> set[str]:
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {node.func.id for node in nodes if isinstance(node.func, ast.Name)}


def test_no_module_can_reach_outside_of_the_process():
    reached = set()
    for path in ROOT.rglob("*.py"):
        name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
        standard = imported(tree) & set(sys.stdlib_module_names)
        reached |= {(name, module) for module in standard - HARMLESS}
        assert not called(tree) & CALLS, name
    assert reached == EXCEPTIONS


def test_the_library_imports_torch_and_itself_and_mpi4py_only():
    foreign = set()
    for path in ROOT.rglob("*.py"):
        foreign |= imported(ast.parse(path.read_text())) - set(sys.stdlib_module_names)
    assert foreign == {"torch", "kfac_core", "mpi4py"}


def test_its_tests_import_nothing_else_of_this_project():
    seen = set()
    for path in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            seen |= {".".join(name.split(".")[: 2 if name.startswith("tests") else 1]) for name in names}
    ours = {"kfac_core", "tests", "harness", "analysis", "jobs"}
    assert {name for name in seen if name.partition(".")[0] in ours} == {"kfac_core", "tests.kfac_core"}
