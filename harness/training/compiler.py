"""Ranks compile nothing: they do without torch's compiler, until something asks for it.

torch loads torch._dynamo with the first optimizer and the first DistributedDataParallel, only to tell it to
leave them alone: 800 modules and about a second of CPU time on every rank.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_NAME = "torch._dynamo"


def do_without_compiler() -> None:
    """Put off the import of torch's compiler until it is asked for more than to leave something alone."""
    if _NAME not in sys.modules and (spec := find_spec(_NAME)):
        sys.modules[_NAME] = torch._dynamo = module_from_spec(spec)
        torch._dynamo.__class__ = _NotExecuted
        sys.meta_path.insert(0, _Submodules)


class _NotExecuted(ModuleType):
    """The compiler's package, not yet executed; answers what torch asks of it outside compiled code."""

    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    def graph_break(self) -> None:
        """No graph, no break."""

    def disable(self, *arguments: Any, **options: Any) -> Any:
        """A function of torch's own as it is: nothing compiles it. Others may be compiled later."""
        if options == {"wrapping": False}:
            return arguments[0]
        return self.__getattr__("disable")(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            _Submodules.execute_package()
            return getattr(torch._dynamo, name)
        raise AttributeError(name)


class _Submodules:
    """Finder of the compiler's modules: executes the package before them, which loads most of them itself."""

    @classmethod
    def find_spec(cls, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if not name.startswith(_NAME + "."):
            return None
        cls.execute_package()
        module = sys.modules.pop(name, None)  # CPython would load a module again that is there by now
        if module is None:
            return None
        return ModuleSpec(name, cls, loader_state=module)  # type: ignore[arg-type]

    @classmethod
    def execute_package(cls) -> None:
        sys.meta_path.remove(cls)
        package: Any = sys.modules[_NAME]
        package.__class__ = ModuleType
        package.__spec__.loader.exec_module(package)

    @staticmethod
    def create_module(spec: ModuleSpec) -> Any:
        return spec.loader_state

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Nothing: the package has executed it."""
