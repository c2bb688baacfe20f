"""JobStore: the world of an elastic job, which is written under the lease of one of its seats."""

from __future__ import annotations

import pytest

from baton.contract.elastic.data import DataProgress
from baton.contract.elastic.nodes import NodesSpec
from baton.contract.elastic.world import NodeProgram, RoundReport, TensorShape
from functions.domain.errors import FenceBroken, WriteConflict
from functions.domain.jobs import transitions
from functions.domain.jobs.transaction import CheckLease, Put, Transaction, update_job
from functions.domain.records import Spec
from functions.domain.worlds.data_pool import DataRecord
from functions.domain.worlds.seat_ids import seat_ids
from functions.domain.worlds.seats import with_seats
from functions.domain.worlds.world_record import WorldNode, WorldRecord, WorldTensors
from tests.conformance.store_kit import NOW, TENANT, Held, claim, submission, submit
from tests.kits.clouds.store_sets import Cloud

PROGRAM = NodeProgram(torch="2.13.0", engine="wire", codec="int8", parameters=64, model_sha256="9f" * 32)


def world(version: int, **more: object) -> WorldRecord:
    return WorldRecord.model_validate({"version": version, "program": PROGRAM, **more})


def write(job_id: str, held: Held, record: WorldRecord, **fence: object) -> Transaction:
    tensors = WorldTensors(tensors=[TensorShape(name="head", dtype="float32", shape=[2, record.version])])
    puts = [Put(owner=job_id, record=one) for one in (record, tensors)]
    return Transaction((*puts, CheckLease(fence=held.fence(**fence))))


def test_a_world_is_read_back_and_replaced_only_by_the_next_version(cloud: Cloud) -> None:
    job, held = submit(cloud), claim(cloud, submit(cloud))
    assert cloud.jobs.read(WorldRecord, job.id) is None
    node = WorldNode(node="0.1.9f86d081", addresses=["203.0.113.7:47100"], joined_at=NOW, link_mbit_s=0.1)
    first = world(1, members=[node], rounds=[RoundReport(round=1, epoch=1, contributors=2, round_s=61.2)])
    cloud.jobs.apply(write(job.id, held, first))
    assert cloud.jobs.read(WorldRecord, job.id) == first
    for version in (1, 3):
        with pytest.raises(WriteConflict):
            cloud.jobs.apply(write(job.id, held, world(version)))
    cloud.jobs.apply(write(job.id, held, world(2)))
    assert cloud.jobs.read(WorldRecord, job.id) == world(2)
    tensors = cloud.jobs.read(WorldTensors, job.id)
    assert tensors is not None and tensors.tensors[0].shape == [2, 2]
    assert cloud.jobs.get(job.id) == job


def test_leases_of_shards_are_read_back_and_replaced_only_by_the_next_version(cloud: Cloud) -> None:
    job, held = submit(cloud), claim(cloud, submit(cloud))
    trained = DataProgress(finished=[[0, 12], [14, 10**12]], offsets=[[12, 4096]])
    first = DataRecord(version=1, plan_sha256="9f" * 32, trained=trained, leases={"0.1.9f86d081": [[12, 14]]})
    for record in (first, first.model_copy(update={"version": 2, "leases": {}})):
        change = Transaction((Put(owner=job.id, record=record), CheckLease(fence=held.fence())))
        cloud.jobs.apply(change)
        assert cloud.jobs.read(DataRecord, job.id) == record
        with pytest.raises(WriteConflict):
            cloud.jobs.apply(change)


def test_a_world_is_not_written_without_the_seats_lease(cloud: Cloud) -> None:
    job, held = submit(cloud), claim(cloud, submit(cloud))
    with pytest.raises(FenceBroken) as caught:
        cloud.jobs.apply(write(job.id, held, world(1), token_sha256="0" * 64))
    assert caught.value.lease == held.lease
    assert cloud.jobs.read(WorldRecord, job.id) is None


def test_leases_are_read_at_once_and_as_they_are(cloud: Cloud) -> None:
    held = [claim(cloud, submit(cloud)) for _ in range(2)]
    renewed = cloud.leases.heartbeat(held[0].fence(NOW + 9), None, None)
    found = cloud.leases.get_many([one.job.id for one in held], consistent=True)
    assert found == {held[0].job.id: renewed, held[1].job.id: held[1].lease}


def test_seats_are_stored_with_their_job_and_are_in_no_list_of_jobs(cloud: Cloud) -> None:
    change = with_seats(submission(spec=Spec(command=["train"], nodes=NodesSpec(max=64)), queue="together"))
    job = change.job
    cloud.jobs.apply(change)
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(change)
    ids = seat_ids(job.id, 64)
    assert [seat.id for seat in cloud.jobs.get_many([job.id, *ids])] == [job.id, *ids]
    assert {seat.id for seat in cloud.jobs.ready(TENANT, "together", 0, limit=100).items} == set(ids)
    assert [one.id for one in cloud.jobs.list_jobs(TENANT, state=None, limit=100).items] == [job.id]
    assert [one.id for one in cloud.jobs.list_jobs(TENANT, state=job.state, limit=100).items] == [job.id]


def test_an_elastic_job_is_unsettled_until_its_seats_have_ended(cloud: Cloud) -> None:
    change = with_seats(submission(spec=Spec(command=["train"], nodes=NodesSpec(max=1))))
    cloud.jobs.apply(change)
    assert cloud.jobs.unsettled(limit=9) == [change.job.id] and cloud.jobs.due_timers(NOW + 10**6, limit=9) == []
    ended = transitions.cancel(change.job, None, message="", now=NOW).with_job(retention_at=NOW)
    cloud.jobs.apply(ended)
    assert cloud.jobs.unsettled(limit=9) == [change.job.id] and cloud.jobs.due_retentions(NOW, limit=9) == []
    cloud.jobs.apply(update_job(ended.job, NOW, settled=True))
    assert cloud.jobs.unsettled(limit=9) == [] and cloud.jobs.due_retentions(NOW, limit=9) == [change.job.id]
