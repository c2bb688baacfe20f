"""Every store under one set of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from functions.local.emulator import Emulator
from tests.kits.api.served_api import ServedApi, served_api
from tests.kits.clouds.second_store import SecondStore
from tests.kits.clouds.store_sets import Cloud, MinistackClients, memory_cloud, moto_cloud


@pytest.fixture(scope="session")
def ministack_clients(emulator: Emulator) -> MinistackClients:
    """Clients for the emulator of this session."""
    return MinistackClients.of(emulator)


@pytest.fixture(scope="session")
def second_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondStore]:
    """Another S3 server, running."""
    with SecondStore(tmp_path_factory.mktemp("second") / "store") as running:
        yield running


@pytest.fixture(scope="module")
def served(emulator: Emulator) -> Iterator[ServedApi]:
    """The control plane, over HTTP."""
    with served_api(emulator) as running:
        yield running


@pytest.fixture
def ministack(emulator: Emulator, ministack_clients: MinistackClients) -> Cloud:
    """Stores on the emulated cloud."""
    emulator.check()
    return ministack_clients.cloud()


@pytest.fixture(params=["memory", "moto", pytest.param("ministack", marks=pytest.mark.emulator)])
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """The stores, on each of what can be beneath them."""
    if request.param == "memory":
        yield memory_cloud()
    elif request.param == "moto":
        with moto_cloud() as made:
            yield made
    else:
        yield request.getfixturevalue("ministack")
