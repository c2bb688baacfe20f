"""Who holds which pack: every store answers alike, in every state and for everything that may have been read."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from contract.manifest import Pack
from functions.domain import packs as rules
from functions.domain.change import CondemnPack, PackWrite, ReleasePack, mark_of
from functions.domain.errors import WriteConflict
from functions.domain.packs import Sighting
from functions.domain.records import Job, PackRecord
from tests.clouds import Cloud
from tests.conformance.store_kit import NOW, TENANT, submit
from tests.factories import CRC64, digest, make_pack

OTHER_CRC = "AAAAAAAAAAA="


def a_pack(**fields: object) -> Pack:
    return make_pack(uuid.uuid4().hex, **fields)


def read(cloud: Cloud, pack: Pack, tenant: str = TENANT) -> PackRecord | None:
    return cloud.packs.get_many(tenant, [pack.blake3]).get(pack.blake3)


def sighting(cloud: Cloud, pack: Pack) -> Sighting:
    return Sighting(pack, read(cloud, pack))


def hold(cloud: Cloud, job_id: str, pack: Pack) -> None:
    assert cloud.packs.hold(TENANT, job_id, [sighting(cloud, pack)])


def write(cloud: Cloud, job: Job, *writes: PackWrite) -> tuple[Job, str]:
    """The job and the mark once it has let packs go."""
    change, left = rules.let_go(job, [], writes)
    assert not left
    cloud.jobs.apply(change)
    return change.job, mark_of(change)


def condemn(cloud: Cloud, job: Job, pack: Pack, at: int = NOW) -> tuple[Job, str]:
    return write(cloud, job, CondemnPack(pack=pack, seen=read(cloud, pack), at=at))


def held_by(pack: Pack, *jobs: str, **fields: object) -> PackRecord:
    """The item of a pack."""
    return PackRecord(tenant=TENANT, **pack.model_dump(), jobs=frozenset(jobs), **fields)  # type: ignore[arg-type]


def test_a_pack_lives_through_all_its_states(cloud: Cloud) -> None:
    one, two, pack = submit(cloud), submit(cloud), a_pack()
    assert read(cloud, pack) is None
    hold(cloud, one.id, pack)
    assert read(cloud, pack) == held_by(pack, one.id)
    hold(cloud, two.id, pack)
    assert read(cloud, pack) == held_by(pack, one.id, two.id)
    cloud.packs.doubt(TENANT, one.id, [pack.blake3])
    assert read(cloud, pack) == held_by(pack, one.id, two.id, doubted=True)
    hold(cloud, one.id, pack)
    assert read(cloud, pack) == held_by(pack, one.id, two.id)
    one, _ = write(cloud, one, ReleasePack(blake3=pack.blake3))
    assert read(cloud, pack) == held_by(pack, two.id)
    two, mark = condemn(cloud, two, pack)
    assert read(cloud, pack) == held_by(pack, condemned_at=NOW, condemned_by=mark)
    assert cloud.jobs.get(two.id) == two
    cloud.packs.mark_gone(TENANT, [pack.blake3], mark, NOW)
    assert read(cloud, pack) == held_by(pack, condemned_at=NOW, condemned_by=mark, gone=True)
    hold(cloud, one.id, pack)
    assert read(cloud, pack) == held_by(pack, one.id)


def test_packs_are_read_by_tenant_and_digest(cloud: Cloud) -> None:
    job = submit(cloud)
    packs = [a_pack(size_bytes=n) for n in range(120)]
    assert cloud.packs.hold(TENANT, job.id, [Sighting(pack, None) for pack in packs])
    wanted = [*(pack.blake3 for pack in packs), digest("nobody's"), packs[0].blake3]
    found = cloud.packs.get_many(TENANT, wanted)
    assert found == {pack.blake3: held_by(pack, job.id) for pack in packs}
    assert cloud.packs.get_many("rival", wanted) == {}
    assert cloud.packs.get_many(f"{TENANT}#x", wanted) == {}
    assert cloud.packs.get_many(TENANT, []) == {} and cloud.packs.hold(TENANT, job.id, [])


def test_what_is_not_held_is_not_doubted_and_another_mark_does_not_end_a_condemnation(cloud: Cloud) -> None:
    job, pack, absent = submit(cloud), a_pack(), a_pack()
    hold(cloud, job.id, pack)
    cloud.packs.doubt(TENANT, "another", [pack.blake3, absent.blake3])
    cloud.packs.mark_gone(TENANT, [pack.blake3, absent.blake3], "another", NOW)
    assert (read(cloud, pack), read(cloud, absent)) == (held_by(pack, job.id), None)
    job, mark = condemn(cloud, job, pack)
    cloud.packs.doubt(TENANT, job.id, [pack.blake3])
    cloud.packs.mark_gone(TENANT, [pack.blake3], f"{mark}0", NOW)
    assert read(cloud, pack) == held_by(pack, condemned_at=NOW, condemned_by=mark)


def test_a_change_of_packs_is_all_or_nothing(cloud: Cloud) -> None:
    job, mine, shared = submit(cloud), a_pack(), a_pack()
    hold(cloud, job.id, mine)
    hold(cloud, job.id, shared)
    seen = read(cloud, shared)
    hold(cloud, "another", shared)
    for second in (CondemnPack(pack=shared, seen=seen, at=NOW), ReleasePack(blake3=a_pack().blake3)):
        with pytest.raises(WriteConflict):
            write(cloud, job, CondemnPack(pack=mine, seen=read(cloud, mine), at=NOW), second)
    assert read(cloud, mine) == held_by(mine, job.id)
    assert read(cloud, shared) == held_by(shared, job.id, "another")
    assert cloud.jobs.get(job.id) == job


def test_an_old_decision_about_packs_is_not_written(cloud: Cloud) -> None:
    job, first, second = submit(cloud), a_pack(), a_pack()
    hold(cloud, job.id, first)
    hold(cloud, job.id, second)
    condemn(cloud, job, first)
    with pytest.raises(WriteConflict):
        condemn(cloud, job, second)
    assert read(cloud, second) == held_by(second, job.id)


def test_as_many_packs_as_a_transaction_holds(cloud: Cloud) -> None:
    job = submit(cloud)
    packs = [a_pack() for _ in range(130)]
    writes = [CondemnPack(pack=pack, seen=None, at=NOW) for pack in packs]
    change, left = rules.let_go(job, [], writes)
    assert (len(change.packs), len(left)) == (99, 31)
    cloud.jobs.apply(change)
    found = cloud.packs.get_many(TENANT, [pack.blake3 for pack in packs])
    assert found == {pack.blake3: held_by(pack, condemned_at=NOW, condemned_by=mark_of(change)) for pack in packs[:99]}


# Everything that may have been read, against everything that may be there at the moment of writing.

ME, OTHER = "me", "other"


def states(cloud: Cloud, me: Job) -> dict[str, Callable[[Pack], None]]:
    """How to bring a fresh pack into each state."""

    def held(*jobs: str, pack: Pack, doubted: bool = False, **declared: object) -> None:
        for job_id in jobs:
            seen = Sighting(pack.model_copy(update=declared), read(cloud, pack))
            assert cloud.packs.hold(TENANT, job_id, [seen])
        if doubted:
            cloud.packs.doubt(TENANT, jobs[0], [pack.blake3])

    def condemned(pack: Pack, *, gone: bool = False, times: int = 1) -> None:
        for _ in range(times):
            current = cloud.jobs.get(me.id)
            assert current is not None
            _, mark = condemn(cloud, current, pack)
        if gone:
            cloud.packs.mark_gone(TENANT, [pack.blake3], mark, NOW)

    return {
        "absent": lambda pack: None,
        "mine": lambda pack: held(me.id, pack=pack),
        "another's": lambda pack: held(OTHER, pack=pack),
        "shared": lambda pack: held(me.id, OTHER, pack=pack),
        "of other bytes": lambda pack: held(OTHER, pack=pack, crc64nvme=OTHER_CRC),
        "of another size": lambda pack: held(OTHER, pack=pack, size_bytes=7),
        "doubted": lambda pack: held(OTHER, pack=pack, doubted=True, crc64nvme=OTHER_CRC),
        "mine, doubted": lambda pack: held(me.id, pack=pack, doubted=True),
        "condemned": condemned,
        "condemned again": lambda pack: condemned(pack, times=2),
        "gone": lambda pack: condemned(pack, gone=True),
    }


STATES = tuple(states(None, None))  # type: ignore[arg-type]


# A cloud for each row: moto copies all its tables with every transaction.
@pytest.mark.parametrize("was", STATES)
def test_a_write_is_refused_exactly_when_the_rules_say_so(cloud: Cloud, was: str) -> None:
    me, before = submit(cloud), a_pack()
    made = states(cloud, me)
    made[was](before)
    found = read(cloud, before)
    for now in STATES:
        write_between(cloud, me, found, made[now], unchanged=now == was)


def write_between(
    cloud: Cloud, me: Job, found: PackRecord | None, make: Callable[[Pack], None], *, unchanged: bool
) -> None:
    """A pack is as `make` makes it, after it was read as `found`: the conditions are those of the rules."""
    pack = a_pack()
    # What was read, as if it had been this pack.
    seen = found.model_copy(update={"blake3": pack.blake3}) if found else None
    make(pack)
    current = read(cloud, pack)
    if unchanged:
        seen = current
    job = cloud.jobs.get(me.id)
    assert job is not None
    release = ReleasePack(blake3=pack.blake3)
    releasable = current is not None and me.id in current.jobs and len(current.jobs) > 1
    if releasable:
        job, _ = write(cloud, job, release)
        hold(cloud, me.id, pack)
    else:
        with pytest.raises(WriteConflict):
            write(cloud, job, release)
    assert read(cloud, pack) == current
    condemnable = rules.may_condemn(me.id, seen, current)
    order = CondemnPack(pack=pack, seen=seen, at=NOW + 1)
    if not condemnable:
        with pytest.raises(WriteConflict):
            write(cloud, job, order)
        assert read(cloud, pack) == current
    holdable = rules.may_hold(Sighting(pack, seen), current)
    assert cloud.packs.hold(TENANT, me.id, [Sighting(pack, seen)]) == holdable
    assert read(cloud, pack) == (rules.held(TENANT, me.id, pack, current) if holdable else current)
    if condemnable and not holdable:
        _, mark = write(cloud, job, order)
        assert read(cloud, pack) == rules.condemned(TENANT, order, mark, current)


def test_the_rules_of_the_grid_are_the_ones_meant() -> None:
    """Who sees a pack as it is may hold it; who saw it before it was condemned, or gone, or in other hands, may not."""
    pack = make_pack()
    plain = {"tenant": TENANT, **pack.model_dump()}
    held, gone = PackRecord(**plain, jobs={ME}), PackRecord(**plain, condemned_at=1, condemned_by="a#1", gone=True)
    condemned = gone.model_copy(update={"gone": False})
    again = gone.model_copy(update={"condemned_by": "a#2"})
    doubted = held.model_copy(update={"doubted": True})
    other = held.model_copy(update={"crc64nvme": OTHER_CRC})
    seen = {"absent": None, "held": held, "condemned": condemned, "doubted": doubted}
    expected = {
        ("absent", None): True,
        ("absent", held): False,
        ("absent", gone): False,
        ("held", held): True,
        ("held", None): False,
        ("held", condemned): False,
        ("held", gone): False,
        ("held", doubted): False,
        ("held", other): False,
        ("condemned", condemned): True,
        ("condemned", gone): True,
        ("condemned", again): False,
        ("condemned", held): False,
        ("doubted", doubted): True,
        ("doubted", other.model_copy(update={"doubted": True})): True,
        ("doubted", held): False,
        ("doubted", condemned): False,
    }
    assert {key: rules.may_hold(Sighting(pack, seen[key[0]]), key[1]) for key in expected} == expected
    assert other.crc64nvme != CRC64
