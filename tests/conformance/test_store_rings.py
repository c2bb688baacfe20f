"""Rings and their records: every store keeps the same promises."""

from __future__ import annotations

from dataclasses import replace

from baton.contract.objects.rings import MAX_RECORD_BYTES
from functions.domain.access.rings import RingRecord, StoredRing
from tests.conformance.store_kit import NOW
from tests.kits.clouds.paging import all_pages
from tests.kits.clouds.store_sets import Cloud

A, B, C = "a" * 16, "b" * 16, "c" * 16


def ring(name: str = "shapes", tenant: str = "acme", ring_id: str = A) -> StoredRing:
    return StoredRing(tenant=tenant, name=name, id=ring_id, settings=b"{\x00\xff}", created_at=NOW)


def test_a_ring_is_made_once_and_only_its_tenant_has_it(cloud: Cloud) -> None:
    store = cloud.rings
    assert store.get("acme", "shapes") is None
    assert store.make(ring())
    assert store.make(replace(ring(), settings=b"other")), "the same again, and nothing is written over it"
    assert not store.make(ring(ring_id=B))
    assert store.make(ring(tenant="rival", ring_id=C))
    assert store.get("acme", "shapes") == ring()
    assert store.get("rival", "shapes") == ring(tenant="rival", ring_id=C)


def test_rings_are_listed_by_name(cloud: Cloud) -> None:
    store = cloud.rings
    for name in ("c", "a", "d", "b"):
        store.make(ring(name))
    store.make(ring("aa", tenant="rival"))
    found = all_pages(lambda cursor: store.list("acme", limit=3, cursor=cursor))
    assert [one.name for one in found] == ["a", "b", "c", "d"]


def test_a_record_is_compared_and_swapped(cloud: Cloud) -> None:
    store, one = cloud.rings, ring()
    assert store.read(one, ["pointer"]) == {}
    assert store.write(one, "pointer", b"1", version=A, seen=None)
    assert not store.write(one, "pointer", b"2", version=B, seen=None)
    assert not store.write(one, "pointer", b"2", version=B, seen=C)
    assert store.write(one, "pointer", b"2", version=B, seen=A)
    assert store.write(one, "pointer", b"2", version=B, seen=A), "the same again"
    assert not store.write(one, "absent", b"", version=C, seen=A)
    assert store.read(one, ["pointer", "absent", "pointer"]) == {"pointer": RingRecord(b"2", B)}
    store.delete(one, ["pointer", "absent"])
    assert store.read(one, ["pointer"]) == {}
    assert not store.write(one, "pointer", b"3", version=C, seen=B)


def test_records_are_any_bytes_up_to_their_limit(cloud: Cloud) -> None:
    store, one = cloud.rings, ring()
    for number, data in enumerate((b"", b"\x00\xff" * 7, b"x" * MAX_RECORD_BYTES)):
        assert store.write(one, f"k{number}", data, version=A, seen=None)
        assert store.read(one, [f"k{number}"]) == {f"k{number}": RingRecord(data, A)}


def test_keys_are_those_of_one_ring_in_order(cloud: Cloud) -> None:
    store, one = cloud.rings, ring()
    others = [ring(ring_id=B), ring("shapes-2"), ring(tenant="rival")]
    wanted = [f"inbox/w.{number:03d}" for number in range(60)]
    for key in [*reversed(wanted), "inbox.x", "inboxes/y", "pointer"]:
        store.write(one, key, b"", version=A, seen=None)
    for other in others:
        store.write(other, "inbox/theirs", b"", version=A, seen=None)
    assert all_pages(lambda cursor: store.keys(one, "inbox/", limit=7, cursor=cursor)) == wanted
    assert len(all_pages(lambda cursor: store.keys(one, "", limit=50, cursor=cursor))) == 63
    store.delete(one, wanted)
    assert store.keys(one, "inbox/", limit=10).items == []
    assert store.keys(one, "", limit=10).items == ["inbox.x", "inboxes/y", "pointer"]
    for other in others:
        assert store.keys(other, "", limit=10).items == ["inbox/theirs"]


def test_a_ring_that_is_being_removed_says_so_until_it_is_gone(cloud: Cloud) -> None:
    store = cloud.rings
    assert not store.begin_removal(ring())
    store.make(ring())
    assert not store.begin_removal(ring(ring_id=B))
    store.forget(ring(ring_id=B))
    assert store.get("acme", "shapes") == ring()
    assert store.begin_removal(ring())
    assert store.get("acme", "shapes") == replace(ring(), removing=True)
    assert not store.make(ring(ring_id=B))
    store.forget(ring())
    assert store.get("acme", "shapes") is None
    assert store.make(ring(ring_id=B))
    store.forget(ring())
    assert store.get("acme", "shapes") == ring(ring_id=B)
