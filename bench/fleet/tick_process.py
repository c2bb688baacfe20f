"""Run one tick of the fleets' controller in a process of its own, and print what the tick took as JSON.

    python -m bench.fleet.tick_process ENDPOINT PREFIX

The provider is the twin in memory, whose machines are those of the stored records; therefore the figures are those of
the controller and its store. `peak_mib` includes the interpreter, all imports and the twin.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping
from functools import partial

from bench.harness.plane import Plane
from functions.domain.checkpoints.packs import SWEEPER_TIMEOUT_S
from functions.fleet.records import Machine
from functions.fleet.ticks.controller import FleetController
from functions.fleet.ticks.demand import waiting_jobs
from functions.storage.dynamodb.fleet import DynamoFleetStore
from tests.twins.provider import VirtualMachine, VirtualProvider

FREE_OFFERS = 100


class Keys:
    """Keys of machines without a store, which no machine of the bench uses."""

    def issue(self, machine: Machine, expires_at: int) -> tuple[str, Mapping[str, str]]:
        return f"key-{machine.id}", {"BATON_ENROLMENT_TOKEN": "token"}

    def revoke(self, key_id: str) -> None:
        pass


def main(endpoint_url: str, prefix: str) -> None:
    """Run the tick and print the figures."""
    plane = Plane(endpoint_url, prefix, create=False)
    store = DynamoFleetStore(plane.dynamodb, prefix)
    now, provider = int(time.time()), VirtualProvider(slots=FREE_OFFERS)
    provider.now = now
    for fleet in store.fleets():
        for machine in store.machines(fleet.tenant, fleet.spec.name):
            handle = machine.handle or ""
            provider.machines.append(
                VirtualMachine(handle, machine.id, machine.usd_per_hour, machine.since, machine.offer.machine_ref or "")
            )
    controller = FleetController(
        store,
        {provider.name: provider},
        waiting=partial(waiting_jobs, plane.context.jobs, shards=1),
        keys=Keys(),
        now=lambda: now,
        random_token=plane.context.random.token,
        time_left_s=lambda: float(SWEEPER_TIMEOUT_S),
    )
    cpu_before, began = time.process_time(), time.perf_counter()
    with plane.requests() as sent:
        report = controller.tick()
    print(
        json.dumps(
            {
                "wall_s": time.perf_counter() - began,
                "cpu_s": time.process_time() - cpu_before,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "requests": dict(sorted(sent.items())),
                "finished": report.finished,
                "created": report.created,
                "machines": report.machines,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
