"""Downloads from npm's registry, once per session, before a test waits for them.

Where the registry cannot be reached, pytest keeps the failure of the fixture: each test that needs the download fails
at once, with the reason in one line.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def cdk_command_line() -> None:
    """Install the CDK command line."""
    from cdk.tool.command_line import ToolError, install

    try:
        install()
    except ToolError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def kelpie_packages() -> None:
    """Install the packages of Kelpie's mirror."""
    from bench.checkpoints.rivals.kelpie_mirror import install

    try:
        install()
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)
