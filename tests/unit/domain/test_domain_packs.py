"""Test the packs that a commit may reference, and retention of packs that no checkpoint of the job names."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.domain.checkpoints import packs as rules
from functions.domain.checkpoints.packs import DEAD_AFTER_S, FUNCTION_TIMEOUT_S, CondemnPack, PackSnapshot, ReleasePack
from functions.domain.errors import Refusal
from functions.domain.jobs.transaction import delete_checkpoint
from functions.domain.records import PackRecord
from tests.kits.api.factories import JOB_ID, NOW, TENANT, make_job, make_pack, make_record

PACK = make_pack()


def item(**fields: Any) -> PackRecord:
    return PackRecord(**{"tenant": TENANT, **PACK.model_dump(), **fields})


CONDEMNED = {"condemned_at": NOW, "version": "v1"}


@pytest.mark.parametrize(
    ("record", "needed"),
    [
        (None, True),
        (item(jobs={JOB_ID}), False),
        (item(jobs={JOB_ID, "other"}), False),
        (item(jobs={"other"}), True),
        (item(jobs={JOB_ID}, doubted=True), True),
        (item(jobs={"other"}, doubted=True, size_bytes=7), True),
        (item(condemned_at=NOW - DEAD_AFTER_S, version="v1"), True),
        (item(condemned_at=NOW - DEAD_AFTER_S, version="v1", size_bytes=7), True),
    ],
)
def test_only_what_the_job_itself_has_seen_is_not_looked_at(record: PackRecord | None, needed: bool) -> None:
    assert rules.needs_verification(JOB_ID, PackSnapshot(PACK, record), NOW) == needed


@pytest.mark.parametrize("declared", [{"size_bytes": 7}, {"crc64nvme": "AAAAAAAAAAA="}])
@pytest.mark.parametrize("holder", [JOB_ID, "other"])
def test_what_was_verified_otherwise_is_refused(declared: dict[str, Any], holder: str) -> None:
    with pytest.raises(Refusal) as refused:
        rules.needs_verification(JOB_ID, PackSnapshot(make_pack(**declared), item(jobs={holder})), NOW)
    assert refused.value.code is ErrorCode.CHECKPOINT_CONFLICT


def test_a_pack_under_deletion_is_refused_until_whoever_does_it_must_be_dead() -> None:
    assert DEAD_AFTER_S >= 2 * FUNCTION_TIMEOUT_S
    sighting = PackSnapshot(PACK, item(**CONDEMNED))
    with pytest.raises(Refusal) as refused:
        rules.needs_verification(JOB_ID, sighting, NOW + DEAD_AFTER_S - 1)
    assert refused.value.code is ErrorCode.CONFLICT
    assert rules.needs_verification(JOB_ID, sighting, NOW + DEAD_AFTER_S)


def test_a_parting_condemns_releases_or_leaves_alone() -> None:
    seen = {
        "mine": item(jobs={JOB_ID}),
        "shared": item(jobs={JOB_ID, "other"}),
        "another's": item(jobs={"other"}),
        "absent": None,
        "condemned": item(**CONDEMNED),
        "condemned long ago": item(condemned_at=NOW - DEAD_AFTER_S, version="v1"),
    }
    packs = {name: make_pack(name) for name in seen}
    writes = rules.release_plan(
        JOB_ID, [PackSnapshot(packs[name], record) for name, record in seen.items()], NOW + FUNCTION_TIMEOUT_S
    )
    assert writes == [
        CondemnPack(pack=packs["mine"], seen=seen["mine"], at=NOW),
        ReleasePack(pack=packs["shared"], seen=item(jobs={JOB_ID, "other"})),
        CondemnPack(pack=packs["absent"], seen=None, at=NOW),
        # The function that condemned the pack may be dead, and a second deletion does no harm.
        CondemnPack(pack=packs["condemned"], seen=seen["condemned"], at=NOW),
        CondemnPack(pack=packs["condemned long ago"], seen=seen["condemned long ago"], at=NOW),
    ]


def test_nothing_is_let_go_that_was_written_since() -> None:
    """A pack that was written since the read is not released, even by the same job: a new checkpoint may name it."""
    before = item(jobs={JOB_ID}, version="v1")
    again = rules.referenced_record(TENANT, JOB_ID, PACK, before, "v2")
    assert again.jobs == before.jobs
    for write in (CondemnPack(pack=PACK, seen=before, at=NOW), ReleasePack(pack=PACK, seen=before)):
        assert rules.may_release(write, before)
        assert rules.may_release(write, before.model_copy(update={"doubted": True}))
        assert not rules.may_release(write, again)
        assert not rules.may_release(write, None)
    absent = CondemnPack(pack=PACK, seen=None, at=NOW)
    assert rules.may_release(absent, None) and not rules.may_release(absent, before)


def test_letting_go_raises_the_rev() -> None:
    job = make_job(rev=7)
    forgotten = [delete_checkpoint(job.id, make_record(step), NOW) for step in range(50)]
    change = rules.delete_records(job, forgotten)
    assert change.job == job.model_copy(update={"rev": 8})
    assert change.deletes == tuple(forgotten)
