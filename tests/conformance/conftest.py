"""Fixtures of the conformance suite: every store runs the same tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from functions.local.emulator import Emulator
from tests.kits.api.served_api import ServedApi, served_api
from tests.kits.clouds.second_store import SecondStore
from tests.kits.clouds.store_sets import Cloud, MinistackClients, memory_cloud, moto_cloud


@pytest.fixture(scope="session")
def ministack_clients(emulator: Emulator) -> MinistackClients:
    """Return clients for the emulator of the session."""
    return MinistackClients.of(emulator)


@pytest.fixture(scope="session")
def second_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondStore]:
    """Run a second S3 server."""
    with SecondStore(tmp_path_factory.mktemp("second") / "store") as running:
        yield running


@pytest.fixture(scope="module")
def served(emulator: Emulator) -> Iterator[ServedApi]:
    """Serve the control plane over HTTP."""
    with served_api(emulator) as running:
        yield running


@pytest.fixture
def ministack(emulator: Emulator, ministack_clients: MinistackClients) -> Cloud:
    """Return stores on the emulated cloud."""
    emulator.check()
    return ministack_clients.cloud()


@pytest.fixture(params=["memory", "moto", pytest.param("ministack", marks=pytest.mark.emulator)])
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """Return the stores, on each of their implementations in turn."""
    if request.param == "memory":
        yield memory_cloud()
    elif request.param == "moto":
        with moto_cloud() as made:
            yield made
    else:
        yield request.getfixturevalue("ministack")
