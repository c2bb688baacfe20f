"""Test the fence of writes, the claim that opens a lease, and the directives of heartbeats."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.worker.control import Directive
from functions.domain.access.api_keys import token_digest
from functions.domain.jobs.lease_expiry import ReclaimWatermark, is_reclaimable, update_watermark
from functions.domain.jobs.lease_fence import REPROOF_WINDOW_S, Fence, directive_for
from functions.domain.records import Lease
from tests.kits.api.factories import CLAIMANT, JOB_ID, NOW, TENANT, TOKEN, make_fence, make_held, make_job, make_lease

LIVE = make_lease()
ORIGINAL = make_lease(token=None)
ANONYMOUS = make_lease(token=None, machine_id=None)

CLAIMED: dict[str, Any] = {"key_id": CLAIMANT.key_id, "source_address": CLAIMANT.source_address}

ADMITTED: dict[str, tuple[Lease, Fence]] = {
    "the token": (LIVE, make_fence()),
    "the token, from another machine id": (LIVE, make_fence(machine_id="m-9")),
    "the token and the epoch": (LIVE, make_fence(epoch=1)),
    "the last second": (LIVE, make_fence(now=LIVE.expires_at - 1)),
    "an original client with its machine": (ORIGINAL, make_fence(token=None, machine_id="m-1")),
    "an original client with its machine, elsewhere": (
        ORIGINAL,
        make_fence(token=None, machine_id="m-1", **CLAIMED | {"source_address": "192.0.2.2"}),
    ),
    "an empty heartbeat of the claimant": (ORIGINAL, make_fence(token=None, heartbeat=True, **CLAIMED)),
    "a heartbeat where no machine is known": (ANONYMOUS, make_fence(token=None, heartbeat=True, **CLAIMED)),
    "a write of the attempt where no machine is known": (ANONYMOUS, make_fence(token=None, epoch=1, **CLAIMED)),
    "the same from a client that says later which machine it is": (
        ANONYMOUS,
        make_fence(token=None, epoch=1, machine_id="m-1", **CLAIMED),
    ),
}

REFUSED: dict[str, tuple[Lease | None, Fence, ErrorCode]] = {
    "no lease": (None, make_fence(), ErrorCode.JOB_NOT_RUNNING),
    "another tenant": (LIVE, make_fence(tenant="other"), ErrorCode.JOB_NOT_RUNNING),
    "no token": (LIVE, make_fence(token=None), ErrorCode.LEASE_REQUIRED),
    "no token but the machine": (LIVE, make_fence(token=None, machine_id="m-1"), ErrorCode.LEASE_REQUIRED),
    "a wrong token": (LIVE, make_fence(token="wrong"), ErrorCode.LEASE_LOST),
    "a wrong token from the machine": (LIVE, make_fence(token="wrong", machine_id="m-1"), ErrorCode.LEASE_LOST),
    "an earlier epoch": (make_lease(epoch=2), make_fence(epoch=1), ErrorCode.LEASE_LOST),
    "the token of an earlier attempt": (make_lease(epoch=2, token="second"), make_fence(), ErrorCode.LEASE_LOST),
    "expired": (LIVE, make_fence(now=LIVE.expires_at), ErrorCode.LEASE_EXPIRED),
    "canceled": (make_lease(closed="canceled"), make_fence(), ErrorCode.JOB_CANCELED),
    "complete": (make_lease(closed="complete"), make_fence(), ErrorCode.LEASE_LOST),
    "revoked": (make_lease(closed="interrupted"), make_fence(), ErrorCode.LEASE_EXPIRED),
    "revoked an hour ago": (
        make_lease(closed="interrupted"),
        make_fence(now=LIVE.expires_at + REPROOF_WINDOW_S),
        ErrorCode.LEASE_LOST,
    ),
    "revoked, and a wrong token": (make_lease(closed="interrupted"), make_fence(token="wrong"), ErrorCode.LEASE_LOST),
    "closed and expired": (
        make_lease(closed="released"),
        make_fence(now=LIVE.expires_at + 9),
        ErrorCode.LEASE_LOST,
    ),
    "another machine": (ORIGINAL, make_fence(token=None, machine_id="m-2"), ErrorCode.LEASE_LOST),
    "another machine's heartbeat": (
        ORIGINAL,
        make_fence(token=None, machine_id="m-2", heartbeat=True, **CLAIMED),
        ErrorCode.LEASE_LOST,
    ),
    "a write without the machine": (ORIGINAL, make_fence(token=None, epoch=1, **CLAIMED), ErrorCode.LEASE_LOST),
    "the machine, but another attempt": (
        ORIGINAL,
        make_fence(token=None, machine_id="m-1", epoch=2),
        ErrorCode.LEASE_LOST,
    ),
    "an empty heartbeat from another address": (
        ORIGINAL,
        make_fence(token=None, heartbeat=True, **CLAIMED | {"source_address": "192.0.2.2"}),
        ErrorCode.LEASE_LOST,
    ),
    "an empty heartbeat with another key": (
        ORIGINAL,
        make_fence(token=None, heartbeat=True, **CLAIMED | {"key_id": "other"}),
        ErrorCode.LEASE_LOST,
    ),
    "a write that names no attempt, where no machine is known": (
        ANONYMOUS,
        make_fence(token=None, **CLAIMED),
        ErrorCode.LEASE_LOST,
    ),
    "a write of the attempt with another key": (
        ANONYMOUS,
        make_fence(token=None, epoch=1, **CLAIMED | {"key_id": "other"}),
        ErrorCode.LEASE_LOST,
    ),
    "a lease of which nothing is known": (
        make_lease(token=None, machine_id=None, claimant=None),
        make_fence(token=None, epoch=1),
        ErrorCode.LEASE_LOST,
    ),
    # A lease-aware machine wakes up while an original client, which has no token, holds the job.
    "a token where the lease has none": (ORIGINAL, make_fence(), ErrorCode.LEASE_LOST),
    "a token where nothing is known of the holder": (ANONYMOUS, make_fence(), ErrorCode.LEASE_LOST),
    "a token and the right machine, but no lease with a token": (
        ORIGINAL,
        make_fence(machine_id="m-1"),
        ErrorCode.LEASE_LOST,
    ),
}


@pytest.mark.parametrize(("lease", "fence"), ADMITTED.values(), ids=ADMITTED)
def test_admitted(lease: Lease, fence: Fence) -> None:
    assert fence.admits(lease)
    assert fence.bears(lease)


@pytest.mark.parametrize(("lease", "fence", "code"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_reason(lease: Lease | None, fence: Fence, code: ErrorCode) -> None:
    assert not fence.admits(lease)
    refusal = fence.refusal(lease)
    assert refusal.code is code
    assert TOKEN not in refusal.message
    assert token_digest(TOKEN) not in refusal.message


@pytest.mark.parametrize(("lease", "fence"), ADMITTED.values(), ids=ADMITTED)
@pytest.mark.parametrize("closed", ["complete", "failed", "interrupted", "released", "canceled", "paused"])
def test_a_closed_lease_admits_nobody(lease: Lease, fence: Fence, closed: str) -> None:
    after = lease.model_copy(update={"closed": closed})
    assert not fence.admits(after, reproof_window_s=REPROOF_WINDOW_S)
    assert fence.bears(after)


@pytest.mark.parametrize(
    ("late_s", "admitted"), [(0, True), (1, True), (REPROOF_WINDOW_S - 1, True), (REPROOF_WINDOW_S, False)]
)
def test_an_expired_lease_may_be_proved_again_for_a_while(late_s: int, admitted: bool) -> None:
    fence = make_fence(now=LIVE.expires_at + late_s)
    assert fence.admits(LIVE, reproof_window_s=REPROOF_WINDOW_S) is admitted
    assert not fence.admits(LIVE)


ENDED = {
    "canceled": Directive.CANCEL,
    "failed": Directive.CANCEL,
    "paused": Directive.PAUSE,
    "": None,
    "complete": None,
    "interrupted": None,
    "released": None,
}


@pytest.mark.parametrize(("closed", "directive"), ENDED.items())
def test_the_bearer_is_told_what_became_of_its_lease(closed: str, directive: Directive | None) -> None:
    lease = make_lease(closed=closed)
    assert make_fence().ended_directive(lease) is directive
    # Long after the end, too: the machine was away.
    assert make_fence(now=NOW + 10**6).ended_directive(lease) is directive


@pytest.mark.parametrize(
    "fence",
    [make_fence(token="wrong"), make_fence(token=None), make_fence(tenant="other"), make_fence(epoch=2)],
)
def test_nobody_else_is(fence: Fence) -> None:
    assert fence.ended_directive(make_lease(closed="canceled")) is None
    assert fence.ended_directive(None) is None


def test_original_clients_are_told_by_status_instead() -> None:
    assert make_fence(token=None).ended_directive(make_lease(token=None, closed="canceled")) is None


@pytest.mark.parametrize(
    ("fields", "now", "told"),
    [
        ({}, NOW, Directive.CONTINUE),
        ({"stop_at": NOW + 61}, NOW, Directive.CONTINUE),
        ({"stop_at": NOW + 60}, NOW, Directive.CHECKPOINT),
        ({"stop_at": NOW + 60}, NOW + 200, Directive.CHECKPOINT),
        ({"directive": Directive.PAUSE, "stop_at": NOW + 60}, NOW, Directive.PAUSE),
        ({"directive": Directive.CANCEL}, NOW, Directive.CANCEL),
    ],
)
def test_directive(fields: dict[str, Any], now: int, told: Directive) -> None:
    assert directive_for(make_lease(**fields), now)[0] is told


def test_the_reason_travels_with_the_directive() -> None:
    lease = make_lease(directive=Directive.PAUSE, directive_reason="paused_by_user")
    assert directive_for(lease, NOW) == (Directive.PAUSE, "paused_by_user")


def test_a_claim_opens_a_lease_of_three_intervals() -> None:
    held = make_held(make_job(policy={"heartbeat_interval_s": 20}, epoch=6, checkpoint_step=300, rev=9), now=NOW + 5)
    assert (held.job.epoch, held.lease.epoch, held.attempt.epoch) == (7, 7, 7)
    assert (held.lease.duration_s, held.lease.expires_at) == (60, NOW + 65)
    assert held.lease.token_sha256 == token_digest(TOKEN)
    assert held.attempt.resumed_step == 300
    assert held.job.started_at == NOW + 5
    assert held.fence.admits(held.lease)


def test_a_later_claim_keeps_the_first_start_and_clears_the_way_here() -> None:
    held = make_held(make_job(started_at=NOW - 100, stale=True, epoch=1))
    assert held.job.started_at == NOW - 100
    assert (held.job.stale, held.job.reason) == (False, None)


def test_a_worker_without_an_id_is_not_called_undefined() -> None:
    held = make_held(token=None, machine_id=None)
    assert (held.lease.machine_id, held.attempt.machine_id, held.lease.token_sha256) == (None, None, None)


def test_the_digest_is_of_the_token_alone() -> None:
    assert token_digest("a") == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    assert Fence(job_id=JOB_ID, tenant=TENANT, now=NOW, token_sha256=token_digest(TOKEN)).admits(LIVE)


WATCHED = ReclaimWatermark(seen_at=NOW, since=7)
MINUTE_UNSEEN_S = 75


@pytest.mark.parametrize(
    ("before", "now", "served", "after"),
    [
        (None, NOW, True, ReclaimWatermark(seen_at=NOW, since=0)),
        (None, NOW, False, ReclaimWatermark(seen_at=0, since=NOW)),
        # The clock of another sweeper is behind.
        (WATCHED, NOW - 5, True, WATCHED),
        (WATCHED, NOW + MINUTE_UNSEEN_S, True, ReclaimWatermark(seen_at=NOW + MINUTE_UNSEEN_S, since=7)),
        (WATCHED, NOW + MINUTE_UNSEEN_S + 1, True, ReclaimWatermark(seen_at=NOW + 76, since=NOW + 76)),
        # An API that did not answer counts as away until the sweep that finds it answering.
        (WATCHED, NOW + 60, False, ReclaimWatermark(seen_at=0, since=NOW + 60)),
        (ReclaimWatermark(seen_at=0, since=NOW), NOW + 60, False, ReclaimWatermark(seen_at=0, since=NOW + 60)),
        (ReclaimWatermark(seen_at=0, since=NOW), NOW + 60, True, ReclaimWatermark(seen_at=NOW + 60, since=NOW + 60)),
    ],
)
def test_the_watch(before: ReclaimWatermark | None, now: int, served: bool, after: ReclaimWatermark) -> None:
    assert update_watermark(before, now, sweep_interval_s=60, served=served) == after


LONG = make_lease(duration_s=600, heartbeat_interval_s=200)


@pytest.mark.parametrize(
    ("lease", "watch", "now", "revoked"),
    [
        # A sweeper that runs each second leaves outages of up to 2 s unseen: 3 + 30 + 40 s are less than the lease.
        (LIVE, ReclaimWatermark(seen_at=NOW, since=0), NOW + 89, False),
        (LIVE, ReclaimWatermark(seen_at=NOW, since=0), NOW + 90, True),
        (make_lease(closed="complete"), ReclaimWatermark(seen_at=NOW, since=0), NOW + 1000, False),
        # The API does not answer.
        (LIVE, ReclaimWatermark(seen_at=0, since=NOW), NOW + 1000, False),
        # After an outage each worker has the time of one call and one pause.
        (LIVE, ReclaimWatermark(seen_at=NOW, since=NOW + 500), NOW + 539, False),
        (LIVE, ReclaimWatermark(seen_at=NOW, since=NOW + 500), NOW + 540, True),
    ],
)
def test_when_a_lease_is_revoked(lease: Lease, watch: ReclaimWatermark, now: int, revoked: bool) -> None:
    assert is_reclaimable(lease, watch, now, sweep_interval_s=1) is revoked


@pytest.mark.parametrize(("lease", "grace_s"), [(LIVE, 56), (LONG, 0)])
def test_a_sweeper_that_runs_each_minute_spares_expired_leases(lease: Lease, grace_s: int) -> None:
    kept = ReclaimWatermark(seen_at=NOW, since=0)
    assert not is_reclaimable(lease, kept, lease.expires_at + grace_s - 1, sweep_interval_s=60)
    assert is_reclaimable(lease, kept, lease.expires_at + grace_s, sweep_interval_s=60)
