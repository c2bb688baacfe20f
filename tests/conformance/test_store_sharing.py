"""Test the records of shared outputs: every store keeps the same promises."""

from __future__ import annotations

from functions.domain.checkpoints.shared_outputs import SharedRecord
from tests.conformance.store_kit import NOW
from tests.kits.api.factories import CRC64, digest
from tests.kits.clouds.store_sets import Cloud

KEY, OTHER = digest("key"), digest("other")


def shared(object_key: str = "jobs/1/set.zip", key: str = KEY, tenant: str = "acme") -> SharedRecord:
    return SharedRecord(
        tenant=tenant,
        key=key,
        object_key=object_key,
        size_bytes=10**12,
        crc64nvme=CRC64,
        blake3=digest(object_key),
        offered_at=NOW,
    )


def test_what_is_shared_is_found_by_its_key_and_only_by_its_tenant(cloud: Cloud) -> None:
    assert cloud.shared.get_many("acme", [KEY]) == {}
    assert cloud.shared.replace(shared(), seen=None) is True
    assert cloud.shared.replace(shared("jobs/1/ümlaut.bin", OTHER), seen=None) is True
    assert cloud.shared.get_many("acme", [OTHER, KEY, KEY, digest("none")]) == {
        KEY: shared(),
        OTHER: shared("jobs/1/ümlaut.bin", OTHER),
    }
    assert cloud.shared.get_many("rival", [KEY, OTHER]) == {}
    assert cloud.shared.get_many("acme", []) == {}
    assert cloud.shared.replace(shared("jobs/2/set.zip", tenant="rival"), seen=None) is True
    assert cloud.shared.get_many("acme", [KEY]) == {KEY: shared()}


def test_only_what_was_seen_is_replaced(cloud: Cloud) -> None:
    first, second, third = shared(), shared("jobs/2/set.zip"), shared("jobs/3/set.zip")
    assert cloud.shared.replace(second, seen=first) is False, "there is nothing yet"
    assert cloud.shared.get_many("acme", [KEY]) == {}
    assert cloud.shared.replace(first, seen=None) is True
    assert cloud.shared.replace(second, seen=None) is False
    assert cloud.shared.replace(second, seen=third) is False
    assert cloud.shared.get_many("acme", [KEY]) == {KEY: first}
    assert cloud.shared.replace(second, seen=first) is True
    assert cloud.shared.replace(third, seen=first) is False
    assert cloud.shared.get_many("acme", [KEY]) == {KEY: second}
