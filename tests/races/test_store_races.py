"""Races on the emulated cloud, with real threads in several processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.contract.jobs.job import JobState
from baton.contract.jobs.policy import Policy
from functions.domain.checkpoints.packs import PackSnapshot
from functions.domain.errors import FenceBroken, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.records import Attempt, Event, Lease, TransferGrant
from functions.local.emulator import Emulator
from tests.conformance.store_kit import NOW, TENANT, claim, submit
from tests.kits.api.factories import make_pack
from tests.kits.clouds.store_sets import Cloud, MinistackClients

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

PROCESSES = 2
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clients(emulator: Emulator) -> MinistackClients:
    return MinistackClients.of(emulator)


@pytest.fixture
def cloud(emulator: Emulator, clients: MinistackClients) -> Iterator[Cloud]:
    yield clients.cloud()
    emulator.check()


def raced(cloud: Cloud, race: str, threads: int, **order: Any) -> list[dict[str, Any]]:
    """The answers of all threads of all processes, started at the same moment."""
    running = []
    try:
        for number in range(PROCESSES):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.races.store_racer"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            running.append(process)
            assert process.stdin is not None
            base = {"endpoint_url": cloud.dynamodb.meta.endpoint_url, "prefix": cloud.prefix, "seed": number}
            process.stdin.write(json.dumps({**base, "race": race, "threads": threads, **order}) + "\n")
            process.stdin.flush()
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        answers = []
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in running:
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0
            answers += json.loads(output)
        return answers
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("count", "shards"), [(400, 1), (200, 4)])
def test_64_claimers_get_each_job_exactly_once(cloud: Cloud, count: int, shards: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        jobs = list(pool.map(lambda n: submit(cloud, now=NOW + n, shard=n % shards), range(count)))
    answers = raced(cloud, "claim", threads=64 // PROCESSES, shards=shards)
    claimed = [tuple(one) for answer in answers for one in answer["claimed"]]
    assert Counter(job_id for job_id, _, _ in claimed) == {job.id: 1 for job in jobs}
    holders = {job_id: machine for job_id, _, machine in claimed}
    stored = cloud.jobs.get_many([job.id for job in jobs])
    leases = cloud.leases.get_many([job.id for job in jobs])
    for job in stored:
        assert (job.state, job.epoch, job.rev) == (JobState.RUNNING, 1, 2)
        attempt = cloud.jobs.read(Attempt, job.id, 1)
        assert attempt is not None
        assert attempt.machine_id == leases[job.id].machine_id == holders[job.id]
    assert cloud.members("ready") == set()
    conflicts = sum(answer["conflicts"] for answer in answers)
    print(f"{conflicts / count:.2f} conflicts per claim")
    if shards == 1:
        # Most are lost at the start, when all choose at once, and at the end, when few jobs are left.
        assert conflicts <= count


def test_a_token_is_redeemed_once(cloud: Cloud) -> None:
    names = [f"token-{n}" for n in range(60)]
    for name in names:
        grant = TransferGrant(
            token_sha256=name, purpose="download", tenant=TENANT, bucket="training-data", key="k", expires_at=NOW + 9
        )
        cloud.tokens.put_grant(grant)
    answers = raced(cloud, "redeem", threads=12, tokens=names)
    assert Counter(name for answer in answers for name in answer["redeemed"]) == dict.fromkeys(names, 1)
    assert all(cloud.tokens.get_grant(name) is None for name in names)


def test_a_pack_is_held_or_condemned_and_never_both(cloud: Cloud) -> None:
    job = submit(cloud)
    packs = [make_pack(f"pack {number}") for number in range(60)]
    assert cloud.packs.add_references(TENANT, job.id, [PackSnapshot(pack, None) for pack in packs])
    seen = cloud.packs.get_many(TENANT, [pack.blake3 for pack in packs])
    answers = raced(
        cloud,
        "packs",
        threads=3,
        job_id=job.id,
        packs=[pack.model_dump() for pack in packs],
        seen=[record.model_dump(mode="json") for record in seen.values()],
    )
    (condemned,) = (set(answer["done"]) for answer in answers if answer["job"] is None)
    found = cloud.packs.get_many(TENANT, seen)
    for pack in packs:
        holders = {answer["job"] for answer in answers if answer["job"] and pack.blake3 in answer["done"]}
        record = found[pack.blake3]
        if pack.blake3 in condemned:
            assert holders == set() and record.condemned_at is not None and not record.jobs
        else:
            assert record.condemned_at is None and record.jobs == holders | {job.id}
            assert holders, "nobody got it"
    assert condemned, "they have not met"
    print(f"{len(condemned)} of {len(packs)} condemned")


def both(*acts: Callable[[], object]) -> list[object]:
    """Run `acts` at the same moment; return their answers, or the refusals of the store."""
    start = threading.Barrier(len(acts))

    def act(one: Callable[[], object]) -> object:
        start.wait()
        try:
            return one()
        except (WriteConflict, FenceBroken) as refused:
            return refused

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(act, acts))


def test_complete_and_interrupt_exclude_each_other(cloud: Cloud) -> None:
    winners: Counter[str] = Counter()
    for _ in range(40):
        held = claim(cloud, submit(cloud))
        end = held.lease.expires_at
        # By its own clock the worker is just in time, by the sweeper's it is not.
        complete = rules.complete(held.job, held.attempt, held.fence(end - 1), artifacts=[], progress=None, now=end - 1)
        interrupt = rules.interrupt(held.job, held.attempt, held.lease, now=end)
        outcomes = both(lambda c=complete: cloud.jobs.apply(c), lambda c=interrupt: cloud.jobs.apply(c))  # type: ignore[misc]
        assert sorted(type(outcome).__name__ for outcome in outcomes) in (
            ["FenceBroken", "NoneType"],
            ["NoneType", "WriteConflict"],
        )
        won, change = ("complete", complete) if outcomes[0] is None else ("interrupted", interrupt)
        winners[won] += 1
        assert cloud.jobs.get(held.job.id) == change.job
        assert cloud.jobs.read(Attempt, held.job.id, 1) == change.attempt
        lease = cloud.leases.get(held.job.id)
        assert lease is not None
        assert lease.closed == won
        assert len(cloud.jobs.history(Event, held.job.id, limit=9).items) == 2 + len(change.events)
    assert sum(winners.values()) == 40


def test_heartbeat_and_interrupt_exclude_each_other(cloud: Cloud) -> None:
    for _ in range(40):
        held = claim(cloud, submit(cloud))
        end = held.lease.expires_at
        interrupt = rules.interrupt(held.job, held.attempt, held.lease, now=end)
        prolonged, interrupted = both(
            lambda h=held, e=end: cloud.leases.heartbeat(h.fence(e), None, None),  # type: ignore[misc]
            lambda c=interrupt: cloud.jobs.apply(c),  # type: ignore[misc]
        )
        lease = cloud.leases.get(held.job.id)
        if interrupted is None:
            assert isinstance(prolonged, FenceBroken)
            assert lease == held.lease.model_copy(update={"closed": "interrupted"})
            assert cloud.jobs.get(held.job.id) == interrupt.job
        else:
            assert isinstance(prolonged, Lease)
            assert lease == prolonged
            assert cloud.jobs.get(held.job.id) == held.job


def test_no_heartbeat_outlives_a_cancel(cloud: Cloud) -> None:
    for _ in range(10):
        cancel_between_heartbeats(cloud)


def cancel_between_heartbeats(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud, policy=Policy(heartbeat_interval_s=10)))
    canceled = threading.Event()
    beating = threading.Barrier(4)

    def beat() -> tuple[Lease | None, bool]:
        """The lease that the last heartbeat saw, and whether one was accepted that was sent after the cancel."""
        beating.wait()
        while True:
            sent_after = canceled.is_set()
            try:
                lease = cloud.leases.heartbeat(held.fence(), None, None)
            except FenceBroken as broken:
                return broken.lease, False
            if sent_after:
                return lease, True

    def cancel() -> None:
        beating.wait()
        for _ in range(50):
            try:
                cloud.jobs.apply(rules.cancel(held.job, held.attempt, message="", now=NOW))
            except WriteConflict:
                continue
            canceled.set()
            return
        raise AssertionError("the cancel never came through")

    with ThreadPoolExecutor(4) as pool:
        beats = [pool.submit(beat) for _ in range(3)]
        pool.submit(cancel).result()
        found = [one.result() for one in beats]
    closed = held.lease.model_copy(update={"closed": "canceled"})
    assert found == [(closed, False)] * 3
    assert cloud.leases.get(held.job.id) == closed
