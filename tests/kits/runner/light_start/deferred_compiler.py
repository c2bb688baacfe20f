"""Defer the import of torch's compiler, which costs each process 1.7 s of a core and which no training of ours uses.

torch's optimizers import the compiler to exclude their methods from compilation. Any other use loads the compiler.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class DeferredCompiler(ModuleType):
    """Stand-in for `torch._dynamo` with what optimizers use."""

    @staticmethod
    def disable(function: Callable[..., Any], *_: Any, **_options: Any) -> Callable[..., Any]:
        """Return the function, which nobody compiles."""
        return function

    @staticmethod
    def graph_break() -> None:
        """Do nothing, as the compiler does outside of a compilation."""

    def __getattr__(self, name: str) -> Any:
        # `inspect` asks all modules for their file; a submodule's import asks for the path.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


sys.modules[NAME] = DeferredCompiler(NAME)
