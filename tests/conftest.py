"""What all tests share: a clean environment, turns for those that must run alone, and the emulated cloud on demand."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

# The same examples in every run, and no failure because a machine is slow: the first text that is drawn builds tables
# for seconds where nothing is cached.
settings.load_profile("ci")

# Before anything is imported: neither a person's settings nor a real account may leak into a test.
for _name in [name for name in os.environ if name.startswith(("BATON_", "AWS_", "SALAD_"))]:
    del os.environ[_name]
os.environ.update(
    {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
)

# A shell starts what it puts into the background with Ctrl-C ignored, and so would every process of the tests be.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.kits.clouds.emulator import emulator  # noqa: E402, F401 - a fixture
from tests.kits.runner.alone import turn  # noqa: E402
from tests.kits.runner.downloads import cdk_command_line, kelpie_packages  # noqa: E402, F401 - fixtures
from tests.kits.runner.reports import without_surrogates  # noqa: E402

# Hypothesis also draws literals of all loaded modules, and no setting disables that. Without this line, the draws of a
# test depend on the tests that ran before.
_NO_CONSTANTS = Constants()
providers._get_local_constants = lambda: _NO_CONSTANTS


def pytest_collection_finish() -> None:
    """Exclude all modules and collected tests from garbage collection.

    They live until the end, and there are millions of objects. Without this line, each `gc.collect()` of a library
    takes about a second; Hugging Face's Trainer calls it after each training.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Whoever waits for its turn is not timed yet: first of all wrappers, pytest-timeout's too."""
    with turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, object], object]:
    """A worker's reports are sent as UTF-8, and what a test has logged or printed may be none: names of files."""
    return without_surrogates((yield))
