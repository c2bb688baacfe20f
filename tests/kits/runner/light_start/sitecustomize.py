"""Make a Python process of a test start sooner: Python imports this module from PYTHONPATH."""

import deferred_compiler  # noqa: F401 - the import has the effect
