"""What a commit may rely on, and what retention does about a pack that nothing of its job names any more."""

from __future__ import annotations

from typing import Any

import pytest

from contract.errors import ErrorCode
from functions.domain import packs as rules
from functions.domain.change import CondemnPack, Forget, ReleasePack
from functions.domain.errors import Refusal
from functions.domain.packs import DEAD_AFTER_S, FUNCTION_TIMEOUT_S, Sighting
from functions.domain.records import PackRecord
from tests.factories import JOB_ID, NOW, TENANT, make_job, make_pack, make_record

PACK = make_pack()


def item(**fields: Any) -> PackRecord:
    return PackRecord(**{"tenant": TENANT, **PACK.model_dump(), **fields})


CONDEMNED = {"condemned_at": NOW, "condemned_by": "x#1"}


@pytest.mark.parametrize(
    ("record", "needed"),
    [
        (None, True),
        (item(jobs={JOB_ID}), False),
        (item(jobs={JOB_ID, "other"}), False),
        (item(jobs={"other"}), True),
        (item(jobs={JOB_ID}, doubted=True), True),
        (item(jobs={"other"}, doubted=True, size_bytes=7), True),
        (item(**CONDEMNED, gone=True), True),
        (item(**CONDEMNED, gone=True, size_bytes=7), True),
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
        "gone": item(**CONDEMNED, gone=True),
        "condemned": item(**CONDEMNED),
        "condemned long ago": item(condemned_at=NOW - DEAD_AFTER_S, condemned_by="x#1"),
    }
    packs = {name: make_pack(name) for name in seen}
    parting = rules.parting(JOB_ID, [Sighting(packs[name], record) for name, record in seen.items()], NOW)
    assert set(parting.writes) == {
        CondemnPack(pack=packs["mine"], seen=seen["mine"], at=NOW),
        ReleasePack(blake3=packs["shared"].blake3),
        CondemnPack(pack=packs["absent"], seen=None, at=NOW),
        CondemnPack(pack=packs["gone"], seen=seen["gone"], at=NOW),
        CondemnPack(pack=packs["condemned long ago"], seen=seen["condemned long ago"], at=NOW),
    }
    assert parting.busy == {packs["condemned"].blake3}


def test_a_round_fits_into_a_transaction_and_raises_the_rev() -> None:
    job = make_job(rev=7)
    forgotten = [Forget(record=make_record(step), now=NOW) for step in range(50)]
    writes = [ReleasePack(blake3=str(number)) for number in range(120)]
    first, left = rules.let_go(job, forgotten, writes)
    assert (first.seen_rev, first.job) == (7, job.model_copy(update={"rev": 8}))
    assert 1 + len(first.forgotten) + len(first.packs) == 100 and len(left) == 71
    second, left = rules.let_go(first.job, [], left)
    assert (second.seen_rev, second.job.rev, len(second.packs), left) == (8, 9, 71, [])
