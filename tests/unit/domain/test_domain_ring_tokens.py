"""Tokens for rings: they follow from a lease, lead back to nothing, and live about as long as it."""

from __future__ import annotations

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import ring_secret, ring_token
from baton.contract.worker.calls import WorkQuery
from functions.domain.access.api_keys import token_digest
from functions.domain.access.ring_tokens import RING_TOKEN_GRACE_S, authenticate_ring_token, is_ring_token, parse_job_id
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.job_selection import with_rings
from functions.domain.jobs.lease_fence import REPROOF_WINDOW_S
from functions.domain.jobs.transaction import OpenLease, Transaction
from functions.domain.records import Lease, Spec

JOB = "146683a1-cb76-4702-9fef-fcccd32594f1"
NOW = 1_790_000_000
LEASE_TOKEN = "lease-token"
TOKEN = ring_token(JOB, LEASE_TOKEN)


class Leases:
    """A store of one lease that records the job ids of its reads."""

    def __init__(self, lease: Lease | None) -> None:
        self._lease = lease
        self.asked: list[str] = []

    def get(self, job_id: str) -> Lease | None:
        self.asked.append(job_id)
        return self._lease if self._lease and self._lease.job_id == job_id else None


def claimed(*rings: str) -> Transaction:
    spec = Spec(command=["train"], rings=list(rings))
    job = rules.submit(job_id=JOB, tenant="acme", spec=spec, queue="default", shard=0, priority=50, now=NOW).job
    change = rules.claim(job, WorkQuery(), token_sha256=token_digest(LEASE_TOKEN), key_id="k", now=NOW)
    return with_rings(change, token_digest(ring_secret(LEASE_TOKEN)))


def lease(*rings: str, **more: object) -> Lease:
    change = claimed(*rings)
    assert isinstance(change.lease, OpenLease)
    return change.lease.lease.model_copy(update=more)


def test_a_lease_opens_the_rings_that_its_job_names() -> None:
    found = authenticate_ring_token(Leases(lease("shapes", "faces")), TOKEN, NOW)
    assert not isinstance(found, ErrorCode)
    assert (found.tenant, list(found.rings)) == ("acme", ["shapes", "faces"])
    assert is_ring_token(TOKEN) and parse_job_id(TOKEN) == JOB


def test_the_lease_of_a_job_without_rings_has_nothing_more_than_before() -> None:
    held = lease()
    assert (held.ring_token_sha256, held.rings) == (None, [])
    assert authenticate_ring_token(Leases(held), TOKEN, NOW) is ErrorCode.KEY_UNKNOWN


@pytest.mark.parametrize(
    "presented",
    ["", "batonring", "batonring__", f"batonring_{JOB}", f"batonring_{JOB}_", f"batonring_{JOB}_{'0' * 64}", TOKEN[:-1],
     TOKEN.upper(), f"{TOKEN}\n", ring_token(JOB, "another lease"), ring_token(JOB[:-1] + "2", LEASE_TOKEN)],
)  # fmt: skip
def test_what_is_not_the_token_is_unknown(presented: str) -> None:
    assert authenticate_ring_token(Leases(lease("shapes")), presented, NOW) is ErrorCode.KEY_UNKNOWN


def test_nobody_is_looked_up_for_what_names_no_job() -> None:
    leases = Leases(lease("shapes"))
    for presented in ("batonring_x_y", f"batonring_{JOB}_short", "baton_k3f9a7c2_0123456789abcdef"):
        authenticate_ring_token(leases, presented, NOW)
    assert leases.asked == []


def test_it_ends_with_the_attempt_and_outlives_a_silence_as_the_lease_does() -> None:
    assert RING_TOKEN_GRACE_S == REPROOF_WINDOW_S
    held = lease("shapes")
    assert authenticate_ring_token(Leases(lease("shapes", closed="released")), TOKEN, NOW) is ErrorCode.KEY_REVOKED
    last = held.expires_at + RING_TOKEN_GRACE_S
    assert not isinstance(authenticate_ring_token(Leases(held), TOKEN, last - 1), ErrorCode)
    assert authenticate_ring_token(Leases(held), TOKEN, last) is ErrorCode.KEY_EXPIRED


def test_the_lease_token_is_not_in_it_and_only_its_digest_is_kept() -> None:
    secret = ring_secret(LEASE_TOKEN)
    assert secret != token_digest(LEASE_TOKEN) and LEASE_TOKEN not in TOKEN
    assert lease("shapes").ring_token_sha256 == token_digest(secret) != secret
