"""Configure all tests: a clean environment, the emulated cloud on demand."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from xdist.remote import Producer

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
from tests.kits.runner.downloads import cdk_command_line, kelpie_packages  # noqa: E402, F401 - fixtures
from tests.kits.runner.order import BothEnds, rank  # noqa: E402
from tests.kits.runner.reports import without_surrogates  # noqa: E402
from tests.kits.runner.rewriting import rewrite_share  # noqa: E402

# Hypothesis also draws literals of all loaded modules, and no setting disables that. Without this line, the draws of a
# test depend on the tests that ran before.
_NO_CONSTANTS = Constants()
providers._get_local_constants = lambda: _NO_CONSTANTS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders whose tests wait first."""
    items.sort(key=lambda item: rank(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> BothEnds | None:
    """Distribute whole files from both ends of this order."""
    return BothEnds(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect no garbage while pytest collects tests, and afterwards exclude all that exists from garbage collection.

    Modules and tests live until the end, and there are millions of objects. Each `gc.collect()` of a library would
    visit them for about a second; Hugging Face's Trainer calls it after each training.
    """
    gc.disable()
    try:
        rewrite_share(session.config)
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, object], object]:
    """Escape text that is no UTF-8 in a worker's report: file names in a test's log or output may have any bytes."""
    return without_surrogates((yield))
