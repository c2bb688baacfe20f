"""Test the references of jobs to packs: every store answers alike, in every state and after every earlier read."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from baton.contract.checkpoints.manifest import Pack
from functions.domain.checkpoints import packs as rules
from functions.domain.checkpoints.packs import CondemnPack, PackSnapshot, PackWrite, ReleasePack
from functions.domain.records import PackRecord
from tests.conformance.store_kit import NOW, TENANT
from tests.kits.api.factories import CRC64, digest, make_pack
from tests.kits.clouds.store_sets import Cloud

OTHER_CRC = "AAAAAAAAAAA="


def a_pack(**fields: object) -> Pack:
    return make_pack(uuid.uuid4().hex, **fields)


def read(cloud: Cloud, pack: Pack, tenant: str = TENANT) -> PackRecord | None:
    return cloud.packs.get_many(tenant, [pack.blake3]).get(pack.blake3)


def sighting(cloud: Cloud, pack: Pack) -> PackSnapshot:
    return PackSnapshot(pack, read(cloud, pack))


def hold(cloud: Cloud, job_id: str, pack: Pack) -> None:
    assert cloud.packs.add_references(TENANT, job_id, [sighting(cloud, pack)])


def let_go(cloud: Cloud, job_id: str, write: PackWrite) -> bool:
    """False if it was refused."""
    refused = cloud.packs.remove_references(TENANT, job_id, [write])
    assert refused <= {write.pack.blake3}
    return not refused


def condemn(cloud: Cloud, pack: Pack, at: int = NOW) -> bool:
    return let_go(cloud, "whoever", CondemnPack(pack=pack, seen=read(cloud, pack), at=at))


def release(cloud: Cloud, job_id: str, pack: Pack) -> bool:
    seen = read(cloud, pack)
    assert seen is not None
    return let_go(cloud, job_id, ReleasePack(pack=pack, seen=seen))


def referenced_by(pack: Pack, *jobs: str, **fields: object) -> PackRecord:
    """The item of a pack."""
    return PackRecord(tenant=TENANT, **pack.model_dump(), jobs=frozenset(jobs), **fields)  # type: ignore[arg-type]


def plain(record: PackRecord | None) -> PackRecord | None:
    """Return the record without its version, which differs in each write."""
    return record.model_copy(update={"version": None}) if record else None


def test_a_pack_lives_through_all_its_states(cloud: Cloud) -> None:
    one, two, pack = "one", "two", a_pack()
    seen: list[PackRecord | None] = []

    def expect(record: PackRecord | None) -> None:
        found = read(cloud, pack)
        assert plain(found) == record
        seen.append(found)

    expect(None)
    hold(cloud, one, pack)
    expect(referenced_by(pack, one))
    hold(cloud, one, pack)
    expect(referenced_by(pack, one))
    hold(cloud, two, pack)
    expect(referenced_by(pack, one, two))
    cloud.packs.mark_suspect(TENANT, one, [pack.blake3])
    expect(referenced_by(pack, one, two, doubted=True))
    assert seen[-1] is not None and seen[-2] is not None and seen[-1].version == seen[-2].version
    hold(cloud, one, pack)
    expect(referenced_by(pack, one, two))
    assert release(cloud, one, pack)
    expect(referenced_by(pack, two))
    assert condemn(cloud, pack)
    expect(referenced_by(pack, condemned_at=NOW))
    assert condemn(cloud, pack, NOW + 1)
    expect(referenced_by(pack, condemned_at=NOW + 1))
    hold(cloud, one, pack)
    expect(referenced_by(pack, one))
    versions = [record.version for record in seen if record is not None]
    assert len(set(versions)) == len(versions) - 1, "each write another one, but for the doubt"


def test_packs_are_read_by_tenant_and_digest(cloud: Cloud) -> None:
    packs = [a_pack(size_bytes=n) for n in range(120)]
    assert cloud.packs.add_references(TENANT, "me", [PackSnapshot(pack, None) for pack in packs])
    wanted = [*(pack.blake3 for pack in packs), digest("nobody's"), packs[0].blake3]
    found = cloud.packs.get_many(TENANT, wanted)
    assert {key: plain(record) for key, record in found.items()} == {p.blake3: referenced_by(p, "me") for p in packs}
    assert cloud.packs.get_many(TENANT, wanted, consistent=False) == found
    assert cloud.packs.get_many("rival", wanted) == {}
    assert cloud.packs.get_many(f"{TENANT}#x", wanted) == {}
    assert cloud.packs.get_many(TENANT, []) == {} and cloud.packs.add_references(TENANT, "me", [])


def test_what_is_not_held_is_not_doubted(cloud: Cloud) -> None:
    pack, absent = a_pack(), a_pack()
    hold(cloud, "me", pack)
    cloud.packs.mark_suspect(TENANT, "another", [pack.blake3, absent.blake3])
    assert (plain(read(cloud, pack)), read(cloud, absent)) == (referenced_by(pack, "me"), None)
    assert condemn(cloud, pack)
    cloud.packs.mark_suspect(TENANT, "me", [pack.blake3])
    assert plain(read(cloud, pack)) == referenced_by(pack, condemned_at=NOW)


def test_each_write_is_by_itself(cloud: Cloud) -> None:
    mine, shared, absent = a_pack(), a_pack(), a_pack()
    hold(cloud, "me", mine)
    hold(cloud, "me", shared)
    writes = [CondemnPack(pack=pack, seen=read(cloud, pack), at=NOW) for pack in (mine, shared, absent)]
    hold(cloud, "another", shared)
    assert cloud.packs.remove_references(TENANT, "me", writes) == {shared.blake3}
    assert plain(read(cloud, mine)) == referenced_by(mine, condemned_at=NOW)
    assert plain(read(cloud, shared)) == referenced_by(shared, "me", "another")
    assert plain(read(cloud, absent)) == referenced_by(absent, condemned_at=NOW)
    assert cloud.packs.remove_references(TENANT, "me", []) == set()


def test_the_broom_is_told_of_condemned_packs_alone(ministack: Cloud) -> None:
    pack = a_pack()
    place = {"pk": f"PACK#{TENANT}#{pack.blake3}", "sk": "PACK"}
    hold(ministack, "me", pack)
    assert "ttl" not in ministack.raw("jobs", **place)
    assert condemn(ministack, pack)
    assert ministack.raw("jobs", **place)["ttl"] == {"N": str(NOW + rules.CONDEMNED_RETENTION_S)}
    hold(ministack, "me", pack)
    assert "ttl" not in ministack.raw("jobs", **place)


def test_an_item_of_an_earlier_version_is_held_and_let_go_alike(ministack: Cloud) -> None:
    """An item that an earlier release wrote has no `version` until its next write, and behaves as any other."""
    pack, other = a_pack(), a_pack()
    for one in (pack, other):
        hold(ministack, "me", one)
        ministack.dynamodb.update_item(
            TableName=f"{ministack.prefix}jobs",
            Key={"pk": {"S": f"PACK#{TENANT}#{one.blake3}"}, "sk": {"S": "PACK"}},
            UpdateExpression="REMOVE version SET condemned_by = :mark",
            ExpressionAttributeValues={":mark": {"S": "j#1"}},
        )
    seen = read(ministack, pack)
    assert seen == referenced_by(pack, "me")
    assert condemn(ministack, pack)
    assert not let_go(ministack, "me", CondemnPack(pack=pack, seen=seen, at=NOW))
    seen = read(ministack, other)
    hold(ministack, "me", other)
    assert not let_go(ministack, "me", CondemnPack(pack=other, seen=seen, at=NOW))


# Everything that may have been read, against everything that may be there at the moment of writing.

ME, OTHER = "me", "other"


def states(cloud: Cloud) -> dict[str, Callable[[Pack], None]]:
    """Return the actions that bring a fresh pack into each state."""

    def held(*jobs: str, pack: Pack, doubted: bool = False, **declared: object) -> None:
        for job_id in jobs:
            seen = PackSnapshot(pack.model_copy(update=declared), read(cloud, pack))
            assert cloud.packs.add_references(TENANT, job_id, [seen])
        if doubted:
            cloud.packs.mark_suspect(TENANT, jobs[0], [pack.blake3])

    def condemned(pack: Pack, times: int = 1) -> None:
        assert all(condemn(cloud, pack) for _ in range(times))

    return {
        "absent": lambda pack: None,
        "mine": lambda pack: held(ME, pack=pack),
        "mine, anew": lambda pack: held(ME, ME, pack=pack),
        "another's": lambda pack: held(OTHER, pack=pack),
        "shared": lambda pack: held(ME, OTHER, pack=pack),
        "of other bytes": lambda pack: held(OTHER, pack=pack, crc64nvme=OTHER_CRC),
        "of another size": lambda pack: held(OTHER, pack=pack, size_bytes=7),
        "doubted": lambda pack: held(OTHER, pack=pack, doubted=True, crc64nvme=OTHER_CRC),
        "mine, doubted": lambda pack: held(ME, pack=pack, doubted=True),
        "condemned": condemned,
        "condemned again": lambda pack: condemned(pack, times=2),
    }


STATES = tuple(states(None))  # type: ignore[arg-type]


# A cloud for each row: moto copies all its tables with every transaction.
@pytest.mark.parametrize("was", STATES)
def test_a_write_is_refused_exactly_when_the_rules_say_so(cloud: Cloud, was: str) -> None:
    before = a_pack()
    made = states(cloud)
    made[was](before)
    found = read(cloud, before)
    for now in STATES:
        write_between(cloud, found, made[now], unchanged=now == was)


def write_between(cloud: Cloud, found: PackRecord | None, make: Callable[[Pack], None], *, unchanged: bool) -> None:
    """A pack is as `make` makes it, after it was read as `found`: the conditions are those of the rules."""
    pack = a_pack()
    # The record that was read, as if of this pack, with a version that no write of this pack has.
    seen = found.model_copy(update={"blake3": pack.blake3, "version": "another's"}) if found else None
    make(pack)
    current = read(cloud, pack)
    if unchanged:
        seen = current
    order = CondemnPack(pack=pack, seen=seen, at=NOW + 1)
    assert rules.may_release(order, current) == unchanged
    if not unchanged:
        assert not let_go(cloud, ME, order)
        assert seen is None or not let_go(cloud, ME, ReleasePack(pack=pack, seen=seen))
        assert read(cloud, pack) == current
    elif current is not None and len(current.jobs) > 1:
        assert release(cloud, ME, pack)
        assert plain(read(cloud, pack)) == referenced_by(pack, *current.jobs - {ME})
        return
    holdable = rules.may_reference(PackSnapshot(pack, seen), current)
    assert cloud.packs.add_references(TENANT, ME, [PackSnapshot(pack, seen)]) == holdable
    after = rules.referenced_record(TENANT, ME, pack, current, "") if holdable else current
    assert plain(read(cloud, pack)) == plain(after)
    if unchanged:
        assert not holdable or not let_go(cloud, ME, order), "it has been held since"
        order = CondemnPack(pack=pack, seen=read(cloud, pack), at=NOW + 1)
        assert let_go(cloud, ME, order)
        assert plain(read(cloud, pack)) == plain(rules.released_record(TENANT, ME, order, after, ""))


def test_the_rules_of_the_grid_are_the_ones_meant() -> None:
    """A job may hold a pack that is still as the job read the pack; a pack condemned or changed since is refused."""
    pack = make_pack()
    plain = {"tenant": TENANT, **pack.model_dump()}
    held = PackRecord(**plain, jobs={ME}, version="1")
    condemned = PackRecord(**plain, condemned_at=1, version="2")
    again = condemned.model_copy(update={"version": "3"})
    doubted = held.model_copy(update={"doubted": True})
    other = held.model_copy(update={"crc64nvme": OTHER_CRC})
    seen = {"absent": None, "held": held, "condemned": condemned, "doubted": doubted}
    expected = {
        ("absent", None): True,
        ("absent", held): False,
        ("absent", condemned): False,
        ("held", held): True,
        ("held", None): False,
        ("held", condemned): False,
        ("held", doubted): False,
        ("held", other): False,
        ("condemned", condemned): True,
        ("condemned", again): False,
        ("condemned", held): False,
        ("doubted", doubted): True,
        ("doubted", other.model_copy(update={"doubted": True})): True,
        ("doubted", held): False,
        ("doubted", condemned): False,
    }
    assert {key: rules.may_reference(PackSnapshot(pack, seen[key[0]]), key[1]) for key in expected} == expected
    assert other.crc64nvme != CRC64
