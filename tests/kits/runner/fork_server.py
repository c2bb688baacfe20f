"""Fork server of `multiprocessing`, which a process has once: the server loads what all tests of the run need."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_modules = ["tests.kits.runner.light_start.deferred_compiler"]


def fork_context(*modules: str) -> ForkServerContext:
    """Return a context whose server imports the modules, and those of all callers before its start.

    `modules`: full names, since in Python 3.11 the server does not get the path of the tests. Call this where the tests
    are imported, since a server that runs imports nothing more.
    """
    _modules.extend(modules)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_modules)
    return context
