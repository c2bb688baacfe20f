"""The writes after which a tick of the fleets' controller follows, on the streams of the emulated DynamoDB."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState
from functions.local.emulator import Emulator
from functions.local.triggers.stream_feed import StreamFeed, matches
from functions.storage.stream import FILTER, NUDGES, is_transition
from functions.storage.tables import FLEET, JOBS, Table
from tests.functional.api.test_machines import beat, claim, enroll, events, prepare
from tests.kits.api.fleets import machine_of, make_machine, write
from tests.kits.api.harness import Api, emulated_api
from tests.kits.api.stream_records import OTHER_WRITES, other_record, stream_record

pytestmark = pytest.mark.emulator


class Nudged:
    """A feed of the controller; `count` tells the records that nudged since the last call."""

    def __init__(self, emulator: Emulator, api: Api, table: Table) -> None:
        described = emulator.client("dynamodb").describe_table(TableName=table.name(api.context.settings.table_prefix))
        self._found: list[dict[str, Any]] = []
        self._feed = StreamFeed(
            self._handle,
            emulator.client("dynamodbstreams"),
            described["Table"]["LatestStreamArn"],
            filters=NUDGES[table.suffix],
            repeats=False,
        )

    def _handle(self, event: dict[str, Any], _context: object) -> dict[str, Any]:
        self._found += event["Records"]
        return {}

    def count(self) -> int:
        self._found.clear()
        self._feed.tick()
        return len(self._found)


def test_a_job_nudges_when_it_becomes_claimable(emulator: Emulator) -> None:
    api = emulated_api(emulator)
    nudged = Nudged(emulator, api, JOBS)
    job = api.submit(queue="nudged")["id"]
    assert nudged.count() == 1
    held = api.claim(queue="nudged")
    held.commit(100).ok()
    held.heartbeat(step=101).ok()
    assert nudged.count() == 0
    held.release().ok()
    assert nudged.count() == 1
    for command, nudges in (("pause", 0), ("resume", 1), ("stop", 0), ("retry", 1)):
        api.post(f"/job/{job}/{command}").ok()
        assert nudged.count() == nudges, command
    api.claim(queue="nudged", machine_id="m-2").fail().ok()
    assert nudged.count() == 0, "it waits for the end of its backoff"
    api.clock.advance(3600)
    api.sweep()
    assert nudged.count() == 1


def test_a_worker_nudges_and_the_controller_does_not(emulator: Emulator) -> None:
    api = emulated_api(emulator)
    nudged = Nudged(emulator, api, FLEET)
    token = prepare(api)
    assert nudged.count() == 1, "a document"
    key = enroll(api, token).ok()["api_key"]
    assert nudged.count() == 1, "an enrolment"
    held = claim(api)
    beat(api, key, held.id)
    beat(api, key, held.id)
    assert nudged.count() == 0
    beat(api, key)
    assert nudged.count() == 1, "its job has ended"
    draining = machine_of(api, "m1").model_copy(update={"state": MachineState.DRAINING, "job_id": "j", "version": 5})
    write(api, machine=draining, events=[draining.event])
    assert nudged.count() == 0, "the controller has decided this itself"
    assert beat(api, key)["state"] == "terminating"
    assert (nudged.count(), len(events(api))) == (1, 6)
    other = make_machine("m2", MachineState.TERMINATING)
    write(api, machine=other, events=[other.event])
    assert nudged.count() == 0
    api.post("/fleets/nights/stop").ok()
    assert nudged.count() == 1


@pytest.mark.parametrize("name", ["INSERT", "MODIFY", "REMOVE"])
def test_the_local_filter_is_lambda_s(name: str) -> None:
    records = [stream_record(1, name=name), *(other_record(sk, name=name) for sk in OTHER_WRITES)]
    assert [matches(record, FILTER) for record in records] == [is_transition(record) for record in records]
    assert not matches({"eventName": None, "dynamodb": {"NewImage": {}}}, NUDGES["jobs"][0])
