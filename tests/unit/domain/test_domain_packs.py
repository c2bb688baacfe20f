"""What a commit may rely on, and what retention does about a pack that nothing of its job names any more."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.domain.checkpoints import packs as rules
from functions.domain.checkpoints.packs import DEAD_AFTER_S, FUNCTION_TIMEOUT_S, CondemnPack, ReleasePack, Sighting
from functions.domain.errors import Refusal
from functions.domain.jobs.transaction import forget
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
    assert rules.needs_look(JOB_ID, Sighting(PACK, record), NOW) == needed


@pytest.mark.parametrize("declared", [{"size_bytes": 7}, {"crc64nvme": "AAAAAAAAAAA="}])
@pytest.mark.parametrize("holder", [JOB_ID, "other"])
def test_what_was_verified_otherwise_is_refused(declared: dict[str, Any], holder: str) -> None:
    with pytest.raises(Refusal) as refused:
        rules.needs_look(JOB_ID, Sighting(make_pack(**declared), item(jobs={holder})), NOW)
    assert refused.value.code is ErrorCode.CHECKPOINT_CONFLICT


def test_a_pack_under_deletion_is_refused_until_whoever_does_it_must_be_dead() -> None:
    assert DEAD_AFTER_S >= 2 * FUNCTION_TIMEOUT_S
    sighting = Sighting(PACK, item(**CONDEMNED))
    with pytest.raises(Refusal) as refused:
        rules.needs_look(JOB_ID, sighting, NOW + DEAD_AFTER_S - 1)
    assert refused.value.code is ErrorCode.CONFLICT
    assert rules.needs_look(JOB_ID, sighting, NOW + DEAD_AFTER_S)


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
    writes = rules.parting(
        JOB_ID, [Sighting(packs[name], record) for name, record in seen.items()], NOW + FUNCTION_TIMEOUT_S
    )
    assert writes == [
        CondemnPack(pack=packs["mine"], seen=seen["mine"], at=NOW),
        ReleasePack(pack=packs["shared"], seen=item(jobs={JOB_ID, "other"})),
        CondemnPack(pack=packs["absent"], seen=None, at=NOW),
        # He who condemned it may be dead; and to delete twice does no harm.
        CondemnPack(pack=packs["condemned"], seen=seen["condemned"], at=NOW),
        CondemnPack(pack=packs["condemned long ago"], seen=seen["condemned long ago"], at=NOW),
    ]


def test_nothing_is_let_go_that_was_written_since() -> None:
    """Above all not what the very job has come to hold anew: a checkpoint names it by then."""
    before = item(jobs={JOB_ID}, version="v1")
    again = rules.held(TENANT, JOB_ID, PACK, before, "v2")
    assert again.jobs == before.jobs
    for write in (CondemnPack(pack=PACK, seen=before, at=NOW), ReleasePack(pack=PACK, seen=before)):
        assert rules.may_let_go(write, before)
        assert rules.may_let_go(write, before.model_copy(update={"doubted": True}))
        assert not rules.may_let_go(write, again)
        assert not rules.may_let_go(write, None)
    absent = CondemnPack(pack=PACK, seen=None, at=NOW)
    assert rules.may_let_go(absent, None) and not rules.may_let_go(absent, before)


def test_letting_go_raises_the_rev() -> None:
    job = make_job(rev=7)
    forgotten = [forget(job.id, make_record(step), NOW) for step in range(50)]
    change = rules.let_go(job, forgotten)
    assert change.job == job.model_copy(update={"rev": 8})
    assert change.deletes == tuple(forgotten)
