"""Measure one tick with many machines and waiting jobs over DynamoDB: requests, CPU time, memory, room in Lambda.

The emulated cloud predicts no times of AWS. Therefore the time in Lambda is computed: each request by DynamoDB's usual
answer time, and the CPU time by the share of a processor that a function of 512 MiB has.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from bench.harness.figures import Figure
from bench.harness.plane import TENANT, Plane
from cdk.resources.functions import MEMORY_MIB
from functions.domain.checkpoints.packs import SWEEPER_TIMEOUT_S
from functions.fleet.lifecycle import COST_STORED_EVERY_S
from functions.fleet.records import Machine, Offer, StoredFleet
from functions.fleet.ticks.tick import LEAST_TIME_S
from functions.storage.dynamodb.fleet import DynamoFleetStore

MACHINES, JOBS, FLEETS = 1000, 10_000, 4
TICKS_AN_HOUR = 60
ANSWER_S = (0.005, 0.010)
"""Answer time of DynamoDB: usual, and slow."""
CPU_SHARE = 0.29
"""Share of a processor of a function of 512 MiB (bench/costs/cost_model.py)."""
TICK_S = SWEEPER_TIMEOUT_S - LEAST_TIME_S
"""Time of a tick in which providers are still called."""


def measure(endpoint_url: str, *, machines: int = MACHINES, jobs: int = JOBS) -> list[Figure]:
    """Fill the tables, run two ticks in processes of their own, and return the figures.

    The first tick is the longest one can be: the cost of every machine is due to be stored, and jobs need machines.
    """
    plane = Plane(endpoint_url, "scale-")
    store = DynamoFleetStore(plane.dynamodb, plane.prefix)
    now = plane.context.clock.now()
    for number in range(FLEETS):
        plane.fill(jobs // FLEETS, queue=f"q{number}")
        fleet = _fleet(number, machines // FLEETS, now)
        store.put_fleet(fleet)
        for at in range(machines // FLEETS):
            store.update_machine(_machine(fleet, f"{store.deployment()}-f{number}-{at:012d}", now))
    found, quiet = run_tick(endpoint_url, plane.prefix), run_tick(endpoint_url, plane.prefix)
    if not found["finished"] or sum(found["machines"].values()) < machines:
        raise RuntimeError(f"the tick did not look after all machines: {found}")
    requests = sum(found["requests"].values())
    usual, slow = (requests * answer_s + found["cpu_s"] / CPU_SHARE for answer_s in ANSWER_S)
    storing = 3600 / COST_STORED_EVERY_S
    hourly = storing * requests + (TICKS_AN_HOUR - storing) * sum(quiet["requests"].values())
    name = f"tick that stores {machines} machines, {jobs} waiting jobs"
    return [
        Figure(name=f"{name}: requests", unit="requests", rounds=[requests], details=found),
        Figure(name=f"{name}: CPU time", unit="s", rounds=[found["cpu_s"]]),
        Figure(name=f"{name}: peak memory", unit="MiB", rounds=[found["peak_mib"]], at_most=MEMORY_MIB, counted=True),
        Figure(name=f"{name}: in Lambda, 5 ms a request", unit="s", rounds=[usual], at_most=TICK_S, counted=True),
        Figure(name=f"{name}: in Lambda, 10 ms a request", unit="s", rounds=[slow], at_most=TICK_S, counted=True),
        Figure(
            name="the next tick: requests", unit="requests", rounds=[sum(quiet["requests"].values())], details=quiet
        ),
        Figure(name="the next tick: CPU time", unit="s", rounds=[quiet["cpu_s"]]),
        Figure(name="ticks: requests per machine-hour", unit="requests", rounds=[hourly / machines]),
    ]


def run_tick(endpoint_url: str, prefix: str) -> dict[str, Any]:
    """Run `bench.fleet.tick_process` and return its figures."""
    command = [sys.executable, "-m", "bench.fleet.tick_process", endpoint_url, prefix]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the tick failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _fleet(number: int, machines: int, now: int) -> StoredFleet:
    document = {
        "name": f"f{number}",
        "providers": ["loopback"],
        "max": machines + 10,
        "queues": [f"q{number}"],
        "max_usd_per_hour": 1,
        "budget": {"total_usd": 100_000, "per_day_usd": 10_000},
    }
    spec = FleetSpec.model_validate(document)
    return StoredFleet(tenant=TENANT, spec=spec, version=1, created_at=now - 9000, updated_at=now - 9000)


def _machine(fleet: StoredFleet, token: str, now: int) -> Machine:
    offer = Offer(
        provider="loopback",
        ref=f"o-{token}",
        machine_ref=f"h-{token}",
        gpu_model="RTX 4090",
        vram_gib=24,
        disk_gib=200,
        usd_per_hour=0.4,
    )
    return Machine(
        id=token,
        tenant=fleet.tenant,
        fleet=fleet.spec.name,
        version=1,
        state=State.BUSY,
        since=now - 3600,
        offer=offer,
        cap_usd_per_hour=1,
        handle=f"handle-{token}",
        requested_at=now - 3900,
        created_at=now - 3900,
        enrolled_at=now - 3700,
        claimed_at=now - 3600,
        seen_at=now - 30,
        job_id="146683a1-cb76-4702-9fef-fcccd32594f1",
        ends_by=now + 40_000,
        usd_per_hour=0.4,
        spent_usd=0.4,
        priced_until=now - COST_STORED_EVERY_S,
        reserved_usd=0.39,
    )
