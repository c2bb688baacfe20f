"""Rules, commands and what workers say of them: what every implementation does alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.contract.jobs.history import EventType
from baton.contract.worker.control import (
    MAX_COMMANDS,
    MAX_DECISIONS,
    MAX_OPERANDS_BYTES,
    MAX_STATUS_CHARS,
    MAX_STATUSES,
    CommandKind,
    RuleStatus,
)
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.transaction import Delete, NoteLease, Put, SteerLease, Transaction, update_job
from functions.domain.records import CommandRecord, ControlRecord, Event, Job, RulesRecord
from tests.conformance.store_kit import NOW, Held, claim, submission, submit
from tests.kits.clouds.store_sets import Cloud


def revision(number: int, text: str = "rules: []") -> RulesRecord:
    return RulesRecord(revision=number, text=text, created_at=NOW + number, created_by="k")


def command(seq: int, **more: object) -> CommandRecord:
    fields = {"seq": seq, "kind": CommandKind.SET, "issued_at": NOW, "expires_at": NOW + seq, **more}
    return CommandRecord.model_validate({"arguments": {"knob": "lr", "factor": 0.1 + 0.2}, **fields})


def said(held: Held, **more: object) -> ControlRecord:
    status = RuleStatus(rule="spike", state="pending", said="3 of 5: 2,31 é", fires=2)
    fields = {"revision": 1, "epoch": held.lease.epoch, "at": NOW, "statuses": [status], **more}
    return ControlRecord.model_validate(fields)


def written(cloud: Cloud, change: Transaction) -> Job:
    cloud.jobs.apply(change)
    return change.job


def test_a_job_may_begin_with_rules(cloud: Cloud) -> None:
    first = revision(1, "rules: [] # é \U0001f600\n")
    job = written(cloud, submission(rules=first))
    assert cloud.jobs.get(job.id) == job and job.rules_revision == 1
    assert cloud.jobs.read(RulesRecord, job.id, 1) == first
    assert cloud.jobs.read(RulesRecord, job.id, 2) is None
    assert claim(cloud, job).lease.rules_revision == 1


def test_revisions_are_listed_newest_first(cloud: Cloud) -> None:
    job, other = submit(cloud), written(cloud, submission(rules=revision(1)))
    assert cloud.jobs.history(RulesRecord, job.id, limit=5).items == []
    for number in (1, 2, 3, 10, 11):
        job = written(cloud, update_job(job, NOW, rules_revision=number).put(revision(number)))
    found, cursor = [], None
    for _ in range(3):
        page = cloud.jobs.history(RulesRecord, job.id, limit=2, cursor=cursor)
        found.append([one.revision for one in page.items])
        cursor = page.cursor
    assert (found, cursor) == ([[11, 10], [3, 2], [1]], None)
    page = cloud.jobs.history(RulesRecord, job.id, limit=2)
    with pytest.raises(Refusal, match="cursor"):
        cloud.jobs.history(RulesRecord, other.id, limit=2, cursor=page.cursor)


def test_commands_are_written_replaced_and_dropped_with_the_job(cloud: Cloud) -> None:
    job, other = submit(cloud), submit(cloud)
    assert cloud.jobs.commands(job.id) == []
    three = (command(1), command(2, key_sha256="a" * 64), command(3, kind=CommandKind.SAVE))
    job = written(cloud, update_job(job, NOW, commands_seq=3).put(*three))
    assert cloud.jobs.commands(job.id) == list(three)
    assert cloud.jobs.commands(job.id, after=1) == list(three[1:])
    assert cloud.jobs.commands(job.id, after=3) == [] == cloud.jobs.commands(other.id)
    done = command(2, status="applied", step=7, message="lr is 0.1")
    job = written(cloud, update_job(job, NOW).put(done).also(Delete(key=CommandRecord.key(job.id, 1))))
    assert cloud.jobs.commands(job.id) == [done, three[2]]


def test_all_commands_that_a_job_may_have_are_read(cloud: Cloud) -> None:
    job = submit(cloud)
    for first in range(1, MAX_COMMANDS + 1, 25):
        some = tuple(command(seq) for seq in range(first, first + 25))
        job = written(cloud, update_job(job, NOW).put(*some))
    assert [one.seq for one in cloud.jobs.commands(job.id)] == list(range(1, MAX_COMMANDS + 1))


def test_a_change_that_conflicts_leaves_nothing_of_all_this(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    written(cloud, update_job(held.job, NOW).put(command(1)))
    late = update_job(held.job, NOW)
    late = late.put(revision(1), command(2), said(held)).also(Delete(key=CommandRecord.key(held.job.id, 1)))
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(late)
    found = (
        cloud.jobs.read(RulesRecord, held.job.id, 1),
        cloud.jobs.commands(held.job.id),
        cloud.jobs.read(ControlRecord, held.job.id),
    )
    assert found == (None, [command(1)], None)


def test_a_lease_is_told_what_is_newest(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    steer = SteerLease(job_id=held.job.id, epoch=1, rules_revision=3, commands_seq=12)
    job = written(cloud, update_job(held.job, NOW).also(steer))
    expected = held.lease.model_copy(update={"rules_revision": 3, "commands_seq": 12})
    assert cloud.leases.get(job.id) == expected
    lease = cloud.leases.heartbeat(held.fence(), None, None)
    assert (lease.rules_revision, lease.commands_seq) == (3, 12)
    other = update_job(job, NOW).also(replace(steer, epoch=2))
    with pytest.raises(FenceBroken) as broken:
        cloud.jobs.apply(other)
    assert broken.value.lease == lease
    ended = written(cloud, rules.cancel(job, held.attempt, message="", now=NOW))
    with pytest.raises(FenceBroken):
        cloud.jobs.apply(update_job(ended, NOW).also(steer))


def test_leases_of_several_seats_are_told_all_or_none(cloud: Cloud) -> None:
    held = [claim(cloud, submit(cloud)) for _ in range(3)]
    job = submit(cloud)

    def steer(seq: int, *epochs: int) -> Transaction:
        leases = [
            SteerLease(job_id=one.job.id, epoch=epoch, rules_revision=0, commands_seq=seq)
            for one, epoch in zip(held, epochs, strict=True)
        ]
        return update_job(job, NOW, commands_seq=seq).also(*leases)

    job = written(cloud, steer(7, 1, 1, 1))
    with pytest.raises(FenceBroken):
        cloud.jobs.apply(steer(8, 1, 2, 1))
    leases = [cloud.leases.get(one.job.id) for one in held]
    assert [lease.commands_seq for lease in leases if lease is not None] == [7, 7, 7]
    assert cloud.jobs.get(job.id) == job


def test_the_next_attempt_begins_with_what_is_newest(cloud: Cloud) -> None:
    job = submit(cloud)
    job = written(cloud, update_job(job, NOW, rules_revision=2, commands_seq=5).put(revision(2)))
    lease = claim(cloud, job).lease
    assert (lease.rules_revision, lease.commands_seq) == (2, 5)
    assert (lease.rules_in_force, lease.rules_rejected) == (0, 0)


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_worker_says_is_written_under_its_fence(cloud: Cloud, alone: bool) -> None:
    held = claim(cloud, submit(cloud))

    def write(record: ControlRecord, lease: NoteLease) -> None:
        if alone:
            cloud.jobs.apply(Transaction((Put(owner=held.job.id, record=record), lease)))
        else:
            job = cloud.jobs.get(held.job.id)
            assert job is not None
            cloud.jobs.apply(update_job(job, NOW).put(record).also(lease))

    note = NoteLease(fence=held.fence(), rules_in_force=1, rules_rejected=2)
    first = said(held, rejected=2, reason="no such metric")
    write(first, note)
    assert cloud.jobs.read(ControlRecord, held.job.id) == first
    expected = held.lease.model_copy(update={"rules_in_force": 1, "rules_rejected": 2})
    assert cloud.leases.get(held.job.id) == expected
    ended_at = held.lease.expires_at
    for wrong in ({"epoch": 2}, {"token_sha256": "0" * 64}, {"tenant": "other"}, {"now": ended_at}):
        with pytest.raises(FenceBroken) as broken:
            write(said(held, step=1), replace(note, fence=held.fence(**wrong)))
        assert broken.value.lease == expected
    assert cloud.jobs.read(ControlRecord, held.job.id) == first
    second = said(held, step=1, statuses=[])
    write(second, NoteLease(fence=held.fence(), rules_in_force=1, rules_rejected=0))
    assert cloud.jobs.read(ControlRecord, held.job.id) == second
    assert cloud.leases.get(held.job.id) == held.lease.model_copy(update={"rules_in_force": 1})


def test_nobody_notes_anything_after_the_end(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    written(cloud, rules.cancel(held.job, held.attempt, message="", now=NOW))
    with pytest.raises(FenceBroken):
        note = NoteLease(fence=held.fence(), rules_in_force=1, rules_rejected=0)
        cloud.jobs.apply(Transaction((Put(owner=held.job.id, record=said(held)), note)))
    assert cloud.jobs.read(ControlRecord, held.job.id) is None


def test_what_a_worker_says_at_its_full_size_is_written_in_one_transaction(cloud: Cloud) -> None:
    """A worker's largest report (ten decisions, all statuses, four-byte characters) fits into one transaction."""
    held = claim(cloud, submit(cloud))
    wide = "\U0001f600"
    operands = {f"{number} " + wide * (MAX_OPERANDS_BYTES // 128 - 8): "-inf" for number in range(32)}
    status = RuleStatus(rule="r" * 64, state="s" * 32, said=wide * MAX_STATUS_CHARS, fires=10**9)
    first = held.job.event_seq + 1
    events = tuple(
        Event(
            seq=first + number,
            type=EventType.RULE_FIRED,
            at=NOW,
            epoch=1,
            data={"number": number + 1, "operands": operands, "message": wide * 1024, "actions": ["a" * 128] * 16},
        )
        for number in range(MAX_DECISIONS)
    )
    control = said(held, statuses=[status] * MAX_STATUSES, reason=wide * 1024)
    job = held.job.model_copy(update={"event_seq": first + MAX_DECISIONS - 1, "decided": MAX_DECISIONS})
    note = NoteLease(fence=held.fence(), rules_in_force=1, rules_rejected=0)
    cloud.jobs.apply(update_job(job, NOW).put(*events, control).also(note))
    assert cloud.jobs.read(ControlRecord, job.id) == control
    found = [one for one in cloud.jobs.history(Event, job.id, limit=1000).items if one.seq >= first]
    assert [one.data["operands"] for one in found] == [operands] * MAX_DECISIONS
