"""LeaseStore: what every implementation does alike; above all, the condition it writes under is `Fence.admits`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from baton.contract.jobs.job import JobState
from baton.contract.jobs.policy import Policy
from baton.contract.worker.control import Directive
from functions.domain.errors import FenceBroken
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.lease_expiry import ReclaimWatermark
from functions.domain.jobs.lease_fence import LEASE_RETENTION_S, REPROOF_WINDOW_S, REVOKED, Fence
from functions.domain.jobs.transaction import CheckLease, CloseLease, OpenLease, ReopenLease, Transaction, update_job
from functions.domain.records import Claimant, Job, Lease
from functions.domain.table_keys import DUE_BUCKET_S
from tests.conformance.store_kit import NOW, TENANT, Held, claim, progress_at, submit
from tests.kits.clouds.store_sets import Cloud


def test_a_heartbeat_prolongs_the_lease_and_stores_progress(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    progress = progress_at(120, NOW + 30)
    lease = cloud.leases.heartbeat(held.fence(NOW + 30), progress, "training")
    expected = held.lease.model_copy(
        update={"expires_at": NOW + 30 + held.lease.duration_s, "progress": progress, "phase": "training"}
    )
    assert lease == expected
    assert cloud.leases.get(held.job.id) == expected
    # An empty one, as original clients send it, keeps what was reported.
    lease = cloud.leases.heartbeat(held.fence(NOW + 60), None, None)
    assert lease == expected.model_copy(update={"expires_at": NOW + 60 + held.lease.duration_s})
    assert cloud.jobs.get(held.job.id) == held.job


def test_a_heartbeats_answer_carries_the_directive(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    cloud.jobs.apply(rules.pause(held.job, message="", now=NOW))
    lease = cloud.leases.heartbeat(held.fence(), None, None)
    assert (lease.directive, lease.directive_reason) == (Directive.PAUSE, "paused_by_user")


def test_a_heartbeat_for_no_lease_is_refused(cloud: Cloud) -> None:
    job = submit(cloud)
    fence = Fence(job_id=job.id, tenant=TENANT, now=NOW)
    with pytest.raises(FenceBroken) as broken:
        cloud.leases.heartbeat(fence, None, None)
    assert broken.value.lease is None
    assert cloud.leases.get(job.id) is None


def test_a_heartbeat_after_the_end_shows_how_it_ended(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    cloud.jobs.apply(rules.cancel(held.job, held.attempt, message="", now=NOW))
    with pytest.raises(FenceBroken) as broken:
        cloud.leases.heartbeat(held.fence(), None, None)
    closed = held.lease.model_copy(update={"closed": "canceled"})
    assert broken.value.lease == closed
    assert cloud.leases.get(held.job.id) == closed


def test_an_expired_lease_can_be_proved_again_for_a_while(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    ends_at = held.lease.expires_at
    with pytest.raises(FenceBroken) as broken:
        cloud.leases.heartbeat(held.fence(ends_at + REPROOF_WINDOW_S), None, None)
    assert broken.value.lease == held.lease
    lease = cloud.leases.heartbeat(held.fence(ends_at + REPROOF_WINDOW_S - 1), None, None)
    assert lease.expires_at == ends_at + REPROOF_WINDOW_S - 1 + held.lease.duration_s


def lease_of(job: Job, **more: Any) -> Lease:
    fields: dict[str, Any] = {
        "job_id": job.id,
        "tenant": job.tenant,
        "epoch": 2,
        "expires_at": NOW + 90,
        "duration_s": 90,
        "heartbeat_interval_s": 30,
    }
    return Lease(**{**fields, **more})


def opened(cloud: Cloud, **more: Any) -> tuple[Job, Lease]:
    """A job with a lease row as given."""
    job = submit(cloud)
    lease = lease_of(job, **more)
    closed, lease = lease.closed, lease.model_copy(update={"closed": ""})
    change = update_job(job, NOW).also(OpenLease(lease=lease))
    cloud.jobs.apply(change)
    job = change.job
    if closed:
        change = update_job(job, NOW).also(
            CloseLease(job_id=job.id, tenant=TENANT, epoch=lease.epoch, now=NOW, closed=closed)
        )
        cloud.jobs.apply(change)
    stored = cloud.leases.get(job.id)
    assert stored is not None
    return change.job, stored


CLAIMANT = Claimant(key_id="k", source_address="192.0.2.1", progress_by=NOW + 10_000)
SILENT = CLAIMANT.model_copy(update={"progress_by": NOW + 89})
SHAPES: list[dict[str, Any]] = [
    {"token_sha256": "a" * 64, "machine_id": "m-1"},
    {"token_sha256": "a" * 64},
    {"machine_id": "m-1"},
    {"machine_id": "m-1", "claimant": CLAIMANT},
    {"claimant": CLAIMANT},
    {"machine_id": "m-1", "claimant": SILENT},
    {},
    {"token_sha256": "a" * 64, "closed": "canceled"},
    {"machine_id": "m-1", "closed": "released"},
]
CLAIMED: dict[str, Any] = {"tenant": TENANT, "key_id": "k", "source_address": "192.0.2.1"}
PROOFS: list[dict[str, Any]] = [
    *(
        {"tenant": TENANT, "epoch": epoch, "token_sha256": token, "machine_id": machine}
        for epoch, token, machine in itertools.product((None, 2, 3), (None, "a" * 64, "b" * 64), (None, "m-1", "m-2"))
    ),
    *(
        {**CLAIMED, "epoch": epoch, "machine_id": machine, "heartbeat": beat}
        for epoch, machine, beat in itertools.product((None, 2), (None, "m-1"), (False, True))
    ),
    {**CLAIMED, "epoch": 3},
    {**CLAIMED, "machine_id": "m-2", "heartbeat": True},
    {**CLAIMED, "source_address": "192.0.2.2", "epoch": 2},
    {**CLAIMED, "source_address": "192.0.2.2", "heartbeat": True},
    {**CLAIMED, "source_address": None, "heartbeat": True},
    {**CLAIMED, "key_id": "other", "heartbeat": True},
    {"tenant": "other", "token_sha256": "a" * 64, "machine_id": "m-1"},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape) or "bare")
def test_every_fence_is_judged_as_the_rules_judge_it(cloud: Cloud, shape: dict[str, Any]) -> None:
    job, lease = opened(cloud, **shape)
    outcomes = set()
    for proof, now in itertools.product(PROOFS, (NOW + 89, NOW + 90)):
        fence = Fence(job_id=job.id, now=now, **proof)
        admitted = fence.admits(lease)
        change = update_job(job, NOW).also(CheckLease(fence=fence))
        if admitted:
            cloud.jobs.apply(change)
            job = change.job
        else:
            with pytest.raises(FenceBroken) as broken:
                cloud.jobs.apply(change)
            assert broken.value.lease == lease
        outcomes.add(admitted)
    assert cloud.jobs.get(job.id) == job
    assert cloud.leases.get(job.id) == lease
    # A lease without token, machine and claimant admits no write: the store has nothing to compare.
    assert outcomes == ({False} if "closed" in shape or not shape else {True, False})


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape) or "bare")
def test_every_heartbeat_is_judged_as_the_rules_judge_it(cloud: Cloud, shape: dict[str, Any]) -> None:
    _, lease = opened(cloud, **shape)
    last = lease.expires_at + REPROOF_WINDOW_S
    # The refused ones first: an accepted one moves the lease.
    instants = (last, NOW + 89)
    for now, proof in itertools.product(instants, PROOFS):
        fence = Fence(job_id=lease.job_id, now=now, **proof)
        if fence.admits(lease, reproof_window_s=REPROOF_WINDOW_S):
            lease = cloud.leases.heartbeat(fence, None, None)
            assert lease.expires_at == now + 90
        else:
            with pytest.raises(FenceBroken) as broken:
                cloud.leases.heartbeat(fence, None, None)
            assert broken.value.lease == lease
    assert cloud.leases.get(lease.job_id) == lease


def test_progress_puts_off_the_end_of_an_original_clients_heartbeats(cloud: Cloud) -> None:
    job, lease = opened(cloud, machine_id="m-1", claimant=SILENT)
    fence = Fence(job_id=job.id, tenant=TENANT, now=NOW + 89, machine_id="m-1")
    beat = replace(fence, heartbeat=True)
    with pytest.raises(FenceBroken):
        cloud.leases.heartbeat(beat, None, None)
    change = update_job(job, NOW).also(CheckLease(fence=fence, progress_by=NOW + 500))
    cloud.jobs.apply(change)
    shown = lease.model_copy(update={"claimant": SILENT.model_copy(update={"progress_by": NOW + 500})})
    assert cloud.leases.get(job.id) == shown
    assert cloud.leases.heartbeat(beat, None, None).claimant == shown.claimant
    refused = replace(fence, machine_id="m-2")
    with pytest.raises(FenceBroken):
        cloud.jobs.apply(update_job(change.job, NOW).also(CheckLease(fence=refused, progress_by=NOW + 999)))


@pytest.mark.parametrize("shape", SHAPES[:6], ids=lambda shape: "-".join(shape) or "bare")
def test_a_worker_ends_its_own_attempt_only(cloud: Cloud, shape: dict[str, Any]) -> None:
    job, lease = opened(cloud, **shape)
    proofs = [Fence(job_id=job.id, now=NOW, **proof) for proof in PROOFS]

    def closing(fence: Fence, epoch: int) -> Transaction:
        close = CloseLease(job_id=job.id, tenant=TENANT, epoch=epoch, now=NOW, closed="complete", fence=fence)
        return update_job(job, NOW).also(close)

    admitted = [fence for fence in proofs if fence.admits(lease)]
    refused = [closing(fence, 2) for fence in proofs if not fence.admits(lease)]
    refused += [closing(fence, 3) for fence in admitted]
    for change in refused:
        with pytest.raises(FenceBroken) as broken:
            cloud.jobs.apply(change)
        assert broken.value.lease == lease
    assert cloud.leases.get(job.id) == lease
    cloud.jobs.apply(closing(admitted[0], 2))
    assert cloud.leases.get(job.id) == lease.model_copy(update={"closed": "complete"})


def test_a_lease_is_replaced_by_a_later_attempt_only(cloud: Cloud) -> None:
    job, lease = opened(cloud)
    for epoch in (1, 2):
        with pytest.raises(FenceBroken) as broken:
            cloud.jobs.apply(update_job(job, NOW).also(OpenLease(lease=lease_of(job, epoch=epoch))))
        assert broken.value.lease == lease
    later = lease_of(job, epoch=3, progress=progress_at(7), phase="training", stop_at=NOW + 9)
    cloud.jobs.apply(update_job(job, NOW).also(OpenLease(lease=later)))
    assert cloud.leases.get(job.id) == later
    assert cloud.leases.get_many([job.id, "unknown", job.id]) == {job.id: later}
    assert cloud.leases.get_many([]) == {}


def test_leases_of_many_jobs_are_read_at_once(cloud: Cloud) -> None:
    # More than one BatchGetItem can ask for; moto takes its time.
    held = [claim(cloud, submit(cloud)) for _ in range(13 if cloud.kind == "moto" else 103)]
    found = cloud.leases.get_many([one.job.id for one in held])
    assert found == {one.job.id: one.lease for one in held}
    assert cloud.jobs.get_many([one.job.id for one in held]) == [one.job for one in held]


def due_ids(cloud: Cloud, now: int) -> list[str]:
    """Return the ids of all due leases in the order of the index."""
    return [job_id for page in cloud.leases.due_pages(now, size=5) for job_id in page]


def test_every_lease_that_ran_out_is_due_and_none_much_too_early(cloud: Cloud) -> None:
    policy = Policy(heartbeat_interval_s=30)
    held: list[Held] = [claim(cloud, submit(cloud, policy=policy), now=NOW + 40 * n) for n in range(12)]
    for one in held[::2]:
        cloud.leases.heartbeat(one.fence(NOW + 450), None, None)
    ends = {one.job.id: one.lease.expires_at for one in held} | {one.job.id: NOW + 540 for one in held[::2]}
    for now in range(NOW - 300, NOW + 700, 50):
        due = set(due_ids(cloud, now))
        assert {job_id for job_id, end in ends.items() if end <= now} <= due
        assert due <= {job_id for job_id, end in ends.items() if end <= now + DUE_BUCKET_S}


def test_due_leases_come_in_pages_which_skip_none_when_leases_end_meanwhile(cloud: Cloud) -> None:
    held = {one.job.id: one for one in (claim(cloud, submit(cloud)) for _ in range(7))}
    seen: list[str] = []
    sizes = []
    for page in cloud.leases.due_pages(NOW + 700, size=3):
        sizes.append(len(page))
        seen += page
        for one in (held[job_id] for job_id in page):
            cloud.jobs.apply(rules.interrupt(one.job, one.attempt, one.lease, now=NOW + 700))
    assert sizes == [3, 3, 1]
    assert sorted(seen) == sorted(held)
    assert due_ids(cloud, NOW + 700) == []


def test_a_lease_that_ended_is_not_due(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    end = held.lease.expires_at
    assert due_ids(cloud, end) == [held.job.id]
    cloud.jobs.apply(rules.complete(held.job, held.attempt, held.fence(), artifacts=[], progress=None, now=NOW))
    assert due_ids(cloud, end) == []


def test_most_heartbeats_leave_the_index_alone(ministack: Cloud) -> None:
    held = claim(ministack, submit(ministack))
    places = []
    for second in range(0, 4 * DUE_BUCKET_S, 360):
        ministack.leases.heartbeat(held.fence(NOW + second), None, None)
        places.append(ministack.raw("heartbeats", pk=held.job.id)["due_at"]["N"])
    assert len(set(places)) in (4, 5)


def test_the_broom_is_told_only_of_leases_that_ended(ministack: Cloud) -> None:
    held = claim(ministack, submit(ministack))
    ministack.leases.heartbeat(held.fence(), None, None)
    assert "ttl" not in ministack.raw("heartbeats", pk=held.job.id)
    ministack.jobs.apply(rules.cancel(held.job, held.attempt, message="", now=NOW + 5))
    row = ministack.raw("heartbeats", pk=held.job.id)
    assert row["ttl"] == {"N": str(NOW + 5 + LEASE_RETENTION_S)}
    assert not {"due_pk", "due_at"} & set(row)
    canceled = ministack.jobs.get(held.job.id)
    assert canceled is not None
    again = rules.retry(canceled, chosen=None, keep_checkpoint=True, reset_counters=True, now=NOW + 6)
    ministack.jobs.apply(again)
    claim(ministack, again.job, now=NOW + 7)
    assert "ttl" not in ministack.raw("heartbeats", pk=held.job.id)


def test_the_watch_is_kept_by_one(cloud: Cloud) -> None:
    assert cloud.leases.reclaim_watermark() is None
    first = ReclaimWatermark(seen_at=NOW)
    assert cloud.leases.save_reclaim_watermark(first, seen=None)
    assert not cloud.leases.save_reclaim_watermark(ReclaimWatermark(seen_at=NOW + 1), seen=None)
    assert cloud.leases.reclaim_watermark() == first
    second = ReclaimWatermark(seen_at=NOW + 60, since=NOW)
    assert cloud.leases.save_reclaim_watermark(second, seen=first)
    assert not cloud.leases.save_reclaim_watermark(ReclaimWatermark(seen_at=NOW + 61), seen=first)
    assert cloud.leases.reclaim_watermark() == second
    # The watermark lies among the leases, and is no lease.
    assert due_ids(cloud, NOW * 2) == []


def _revoked(cloud: Cloud) -> tuple[Held, Job]:
    """A job whose machine is taken for lost, and how it waits."""
    held = claim(cloud, submit(cloud))
    change = rules.interrupt(held.job, held.attempt, held.lease, now=held.lease.expires_at)
    cloud.jobs.apply(change)
    return held, change.job


def _reopening(job: Job, fence: Fence, duration_s: int = 90) -> Transaction:
    change = update_job(job, fence.now, state=JobState.RUNNING)
    newest = {"rules_revision": 3, "commands_seq": 2, "watched": True}
    return change.also(ReopenLease(fence=fence, duration_s=duration_s, **newest))


def test_a_revoked_lease_is_given_back_to_its_bearer_with_the_newest_rules_and_commands(cloud: Cloud) -> None:
    held, waiting = _revoked(cloud)
    now = held.lease.expires_at + 10
    cloud.jobs.apply(_reopening(waiting, held.fence(now)))
    reopened = {"expires_at": now + 90, "rules_revision": 3, "commands_seq": 2, "watched": True}
    assert cloud.leases.get(held.job.id) == held.lease.model_copy(update=reopened)
    assert cloud.leases.heartbeat(held.fence(now + 5), None, None).expires_at == now + 5 + held.lease.duration_s
    later = now + DUE_BUCKET_S + 90
    assert held.job.id in [job_id for page in cloud.leases.due_pages(later, size=100) for job_id in page]


@pytest.mark.parametrize(
    "shape", [one for one in SHAPES if "closed" not in one], ids=lambda one: "-".join(one) or "bare"
)
def test_every_recovery_is_judged_as_the_rules_judge_it(cloud: Cloud, shape: dict[str, Any]) -> None:
    job, lease = opened(cloud, **shape, closed=REVOKED)
    outcomes = set()
    ends = {NOW + 90, SILENT.progress_by} if shape.get("claimant") is SILENT else {NOW + 90}
    for proof, now in itertools.product(PROOFS, [NOW + 90 + REPROOF_WINDOW_S, *(end - 1 for end in ends)]):
        fence = Fence(job_id=job.id, now=now, **proof)
        recovers = fence.recovers(lease)
        if recovers:
            cloud.jobs.apply(_reopening(job, fence))
            job, lease = opened(cloud, **shape, closed=REVOKED)
        else:
            with pytest.raises(FenceBroken) as broken:
                cloud.jobs.apply(_reopening(job, fence))
            assert broken.value.lease == lease
        outcomes.add(recovers)
    assert cloud.leases.get(job.id) == lease
    assert outcomes == ({True, False} if {"token_sha256", "machine_id"} & shape.keys() else {False})


def test_a_revoked_lease_is_given_back_to_nobody_else(cloud: Cloud) -> None:
    held, waiting = _revoked(cloud)
    now = held.lease.expires_at + 10
    wrong = [
        replace(held.fence(now), token_sha256="0" * 64),
        replace(held.fence(now), tenant="other"),
        replace(held.fence(now), epoch=held.lease.epoch + 1),
        held.fence(held.lease.expires_at + REPROOF_WINDOW_S),
    ]
    for fence in wrong:
        with pytest.raises(FenceBroken) as broken:
            cloud.jobs.apply(_reopening(waiting, fence))
        assert broken.value.lease == held.lease.model_copy(update={"closed": "interrupted"})
    next_one = claim(cloud, waiting, now=now)
    with pytest.raises(FenceBroken) as broken:
        cloud.jobs.apply(_reopening(next_one.job, held.fence(now)))
    assert broken.value.lease == next_one.lease == cloud.leases.get(held.job.id)
