"""The same state machines on the emulated DynamoDB: fewer steps, the real conditions and transactions."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis.stateful import run_state_machine_as_test

from functions.local.emulator import Emulator
from functions.storage.clients import dynamodb_client
from functions.storage.dynamo_jobs import DynamoJobStore
from functions.storage.dynamo_leases import DynamoLeaseStore
from functions.storage.dynamo_tokens import DynamoTokenStore
from functions.storage.tables import create_tables
from tests.properties.job_machine import JobMachine
from tests.properties.profiles import machine_settings
from tests.properties.tokens_machine import TokenMachine

pytestmark = pytest.mark.emulator

CREDENTIALS = {"region_name": "us-east-1", "aws_access_key_id": "test", "aws_secret_access_key": "test"}


@dataclass(frozen=True)
class DynamoStores:
    """The real stores on tables of their own."""

    jobs: DynamoJobStore
    leases: DynamoLeaseStore
    tokens: DynamoTokenStore


@pytest.fixture
def fresh(emulator: Emulator) -> Callable[[], DynamoStores]:
    client: Any = dynamodb_client(emulator.endpoint_url, **CREDENTIALS)

    def make() -> DynamoStores:
        prefix = f"p{uuid.uuid4().hex[:10]}-"
        create_tables(client, prefix)
        return DynamoStores(
            DynamoJobStore(client, prefix), DynamoLeaseStore(client, prefix), DynamoTokenStore(client, prefix)
        )

    return make


def test_jobs(fresh: Callable[[], DynamoStores]) -> None:
    machine = type("DynamoJobMachine", (JobMachine,), {"fresh": staticmethod(fresh)})
    run_state_machine_as_test(machine, settings=machine_settings(runs=4, steps=25))


def test_tokens(fresh: Callable[[], DynamoStores]) -> None:
    machine = type("DynamoTokenMachine", (TokenMachine,), {"fresh": staticmethod(fresh)})
    run_state_machine_as_test(machine, settings=machine_settings(runs=4, steps=25))
