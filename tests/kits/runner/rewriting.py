"""Assertions of the test files, which the workers of pytest-xdist rewrite together.

pytest rewrites the assertions of each file once and keeps the result in `__pycache__`: all files cost a core about 15 s
in a fresh clone. The workers collect the same files in the same order. Without this module, each of them would rewrite
all files at the same time as the others.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.kits.runner.order import TESTS


def rewrite_share(config: pytest.Config) -> None:
    """Rewrite a worker's share of the test files, without execution of a file."""
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    # Not the repository, whose environments have test files of others.
    arguments = (Path(argument).resolve() for argument in config.args)
    folders = (path for path in arguments if path.is_dir() and path.is_relative_to(TESTS))
    paths = sorted(path for folder in folders for path in folder.rglob("test_*.py"))
    for path in paths[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        spec = spec_from_file_location(f"rewritten.{path.stem}", path, loader=config.pluginmanager.rewrite_hook)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        # Without `__import__`, the execution ends at `from __future__ import annotations`. The collection reports a
        # file that is no Python.
        vars(module)["__builtins__"] = {}
        with suppress(ImportError, SyntaxError):
            spec.loader.exec_module(module)
