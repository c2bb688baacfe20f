"""Each public name of the package `baton` loads, and its three lists of names agree."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module

import pytest

import baton


@pytest.mark.parametrize("name", baton.__all__)
def test_a_public_name_loads(name: str) -> None:
    assert getattr(baton, name) is getattr(import_module(baton._MODULES[name]), name)


def test_the_lists_of_names_agree() -> None:
    """Type checkers read the imports, `import *` reads `__all__`, and `__getattr__` reads the table of modules."""
    blocks = [one for one in ast.parse(inspect.getsource(baton)).body if isinstance(one, ast.If)]
    imports = [one for block in blocks for one in block.body if isinstance(one, ast.ImportFrom)]
    assert {alias.name: one.module for one in imports for alias in one.names} == baton._MODULES
    assert sorted(baton.__all__) == sorted(baton._MODULES)


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'baton' has no attribute 'Trainer'"):
        _ = baton.Trainer
