"""Test the states of the control plane's rules and the members of groups: every store behaves alike."""

from __future__ import annotations

import pytest

from baton.contract.jobs.history import EventType
from baton.contract.worker.control import Directive
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.transaction import DirectLease, Put, SteerLease, update_job
from functions.domain.records import (
    Attempt,
    Event,
    MemberRecord,
    MemberValue,
    RulesRecord,
    RuleStateRecord,
    ScalingRecord,
)
from functions.storage.dynamodb.items.documents import MAX_DOCUMENT_BYTES
from tests.conformance.store_kit import NOW, TENANT, claim, submission, submit
from tests.kits.clouds.store_sets import Cloud

RULES = RulesRecord(revision=1, text="rules: []", created_at=NOW)


def rule_state(version: int, **more: object) -> RuleStateRecord:
    fields = {"version": version, "revision": 1, "state": "eNqrVipLLSpWslIwAtIA", "at": NOW, **more}
    return RuleStateRecord.model_validate(fields)


def test_a_watched_job_begins_with_a_standing_that_is_due(cloud: Cloud) -> None:
    change = submission(rules=RULES, watched=True)
    cloud.jobs.apply(change)
    job = change.job
    assert cloud.jobs.get(job.id) == job and job.watched and job.waiting_since == NOW
    assert (
        cloud.jobs.read(RuleStateRecord, job.id)
        == RuleStateRecord(version=1, next_at=NOW)
        == change.records(RuleStateRecord)[0]
    )
    assert job.id in cloud.jobs.due_rules(NOW, limit=1000)
    assert job.id not in cloud.jobs.due_rules(NOW - 1, limit=1000)
    assert job.id not in cloud.jobs.due_timers(NOW + 10**6, limit=1000)
    assert job.id not in cloud.jobs.due_retentions(NOW + 10**6, limit=1000)
    held = claim(cloud, job)
    assert held.lease.watched and cloud.leases.get(job.id) == held.lease
    assert cloud.leases.heartbeat(held.fence(), None, None).watched


def test_a_job_without_such_rules_has_none(cloud: Cloud) -> None:
    job = submit(cloud, rules=RULES)
    assert cloud.jobs.read(RuleStateRecord, job.id) is None
    assert job.id not in cloud.jobs.due_rules(NOW + 10**6, limit=1000)
    assert not claim(cloud, job).lease.watched


@pytest.mark.parametrize("alone", [True, False])
def test_each_version_is_written_once_and_only_upon_the_one_before(cloud: Cloud, alone: bool) -> None:
    job = submit(cloud)

    def write(record: RuleStateRecord) -> None:
        nonlocal job
        if alone:
            cloud.jobs.put(Put(owner=job.id, record=record))
        else:
            change = update_job(job, NOW).put(record).with_event(EventType.RULE_FIRED, NOW, rule="a")
            cloud.jobs.apply(change)
            job = change.job

    for wrong in (2, 7):
        with pytest.raises(WriteConflict):
            write(rule_state(wrong))
    assert cloud.jobs.read(RuleStateRecord, job.id) is None
    write(rule_state(1, next_at=NOW + 5))
    assert cloud.jobs.read(RuleStateRecord, job.id) == rule_state(1, next_at=NOW + 5)
    for wrong in (1, 3):
        with pytest.raises(WriteConflict):
            write(rule_state(wrong))
    member = MemberRecord(values=[MemberValue(metric="loss", step=5, value="nan")], expires_at=NOW)
    write(rule_state(2, next_at=NOW + 9, member=member, errors=2))
    assert cloud.jobs.read(RuleStateRecord, job.id) == rule_state(2, next_at=NOW + 9, member=member, errors=2)
    assert job.id not in cloud.jobs.due_rules(NOW + 8, limit=1000)
    assert job.id in cloud.jobs.due_rules(NOW + 9, limit=1000)
    write(rule_state(3))
    assert job.id not in cloud.jobs.due_rules(NOW + 10**6, limit=1000)


def test_what_conflicts_leaves_neither_standing_nor_events(cloud: Cloud) -> None:
    job = submit(cloud)
    cloud.jobs.put(Put(owner=job.id, record=rule_state(1)))
    change = update_job(job, NOW).put(rule_state(1)).with_event(EventType.RULE_FIRED, NOW, rule="a")
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(change)
    late = update_job(job.model_copy(update={"rev": 9}), NOW).put(rule_state(2))
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(late)
    assert cloud.jobs.get(job.id) == job
    assert cloud.jobs.read(RuleStateRecord, job.id) == rule_state(1)
    assert len(cloud.jobs.history(Event, job.id, limit=10).items) == 1


def test_a_broken_fence_leaves_the_standing(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    steer = SteerLease(job_id=held.job.id, epoch=9, rules_revision=1, commands_seq=0, watched=True)
    with pytest.raises(FenceBroken):
        cloud.jobs.apply(update_job(held.job, NOW).put(rule_state(1)).also(steer))
    assert cloud.jobs.read(RuleStateRecord, held.job.id) is None


def test_a_standing_that_no_item_can_hold_is_refused_and_nothing_is_written(cloud: Cloud) -> None:
    job = submit(cloud)
    large = rule_state(1, state="y" * MAX_DOCUMENT_BYTES)
    for write in (
        lambda: cloud.jobs.put(Put(owner=job.id, record=large)),
        lambda: cloud.jobs.apply(update_job(job, NOW).put(large)),
    ):
        with pytest.raises(Refusal, match="payload_too_large"):
            write()
    assert cloud.jobs.read(RuleStateRecord, job.id) is None and cloud.jobs.get(job.id) == job


def test_a_lease_is_told_whether_its_job_is_watched(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    for watched in (True, False):
        steer = SteerLease(job_id=held.job.id, epoch=1, rules_revision=1, commands_seq=0, watched=watched)
        job = cloud.jobs.get(held.job.id)
        assert job is not None
        cloud.jobs.apply(update_job(job, NOW).also(steer))
        lease = cloud.leases.get(held.job.id)
        assert lease is not None and lease.watched is watched


def test_a_directive_may_come_with_commands(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    direct = DirectLease(job_id=held.job.id, epoch=1, directive=Directive.PAUSE, reason="r", commands_seq=4)
    cloud.jobs.apply(update_job(held.job, NOW).also(direct))
    told = {"directive": Directive.PAUSE, "directive_reason": "r", "commands_seq": 4}
    assert cloud.leases.get(held.job.id) == held.lease.model_copy(update=told)
    job = cloud.jobs.get(held.job.id)
    assert job is not None
    cloud.jobs.apply(rules.pause(job, message="", now=NOW))
    lease = cloud.leases.get(held.job.id)
    assert lease is not None and lease.commands_seq == 4


def test_a_group_knows_its_jobs_and_no_others(cloud: Cloud) -> None:
    jobs = [submit(cloud).id for _ in range(3)]
    group = f"sweep {jobs[0]} #é"
    assert cloud.jobs.members(TENANT, group) == {}
    records = {
        job: MemberRecord(values=[MemberValue(metric="loss", step=step, value=0.1 + step)], expires_at=NOW + step)
        for step, job in enumerate(jobs)
    }
    for job, record in records.items():
        cloud.jobs.join(TENANT, group, job, record)
    assert cloud.jobs.members(TENANT, group) == records
    newer = MemberRecord(values=[MemberValue(metric="loss", value="inf")], expires_at=NOW + 9)
    cloud.jobs.join(TENANT, group, jobs[1], newer)
    assert cloud.jobs.members(TENANT, group) == {**records, jobs[1]: newer}
    assert cloud.jobs.members("other", group) == {} == cloud.jobs.members(TENANT, group + "2")


def test_a_machine_s_price_is_kept_with_its_attempt(cloud: Cloud) -> None:
    job = submit(cloud)
    held = claim(cloud, job)
    priced = held.attempt.model_copy(update={"price_usd_per_hour": 0.1 + 0.2})
    cloud.jobs.apply(update_job(held.job, NOW, cost_usd=1 / 3, priced_s=7).put(priced))
    assert cloud.jobs.read(Attempt, job.id, 1) == priced
    found = cloud.jobs.get(job.id)
    assert found is not None and (found.cost_usd, found.priced_s) == (1 / 3, 7)


def test_what_rules_decide_on_a_group_is_written_with_their_job_and_only_upon_what_was_seen(cloud: Cloud) -> None:
    job = submit(cloud)
    group = f"sweep {job.id} #é"
    assert cloud.jobs.scaling(TENANT, group) is None

    def record(version: int, *copies: str, name: str = group) -> ScalingRecord:
        return ScalingRecord(version=version, tenant=TENANT, group=name, copies=list(copies), expires_at=NOW + 9)

    def write(*records: ScalingRecord) -> None:
        nonlocal job
        change = (
            update_job(job, NOW)
            .also(*(Put(owner=one.owner, record=one) for one in records))
            .with_event(EventType.RULE_FIRED, NOW, rule="a")
        )
        cloud.jobs.apply(change)
        job = change.job

    with pytest.raises(WriteConflict):
        write(record(2))
    write(record(1, "a"), record(1, "b", name=f"{group}2"))
    assert cloud.jobs.scaling(TENANT, group) == record(1, "a")
    assert cloud.jobs.scaling(TENANT, f"{group}2") == record(1, "b", name=f"{group}2")
    assert cloud.jobs.scaling("other", group) is None
    assert cloud.jobs.members(TENANT, group) == {}, "it is no job of the group"
    for late in (1, 3):
        with pytest.raises(WriteConflict):
            write(record(2, "c", name=f"{group}2"), record(late, "c"))
    assert cloud.jobs.get(job.id) == job, "nothing of that is written"
    assert cloud.jobs.scaling(TENANT, f"{group}2") == record(1, "b", name=f"{group}2")
    write(record(2))
    assert cloud.jobs.scaling(TENANT, group) == record(2)
