"""Places of rings as users name them, and functions that damage what is stored there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from baton.contract.names import DATA_BUCKET, RING_SETTINGS
from baton.contract.objects.rings import is_object
from functions.domain.access.rings import StoredRing
from functions.domain.ports import RingStore
from functions.local.emulator import Emulator
from gpu_client.ring.store import uri
from tests.kits.api.harness import TENANT
from tests.kits.api.served_api import ServedApi
from tests.kits.clouds.emulator import unique
from tests.kits.ring.bucket import RingBucket

Change = Callable[[bytes], bytes]


class Place(Protocol):
    """`text` is what `places.py` takes; child processes find the place by it, too."""

    text: str

    def alter(self, key: str, change: Change) -> None:
        """Give an object or record other bytes, behind everybody's back."""

    def lose(self, key: str) -> None:
        """Delete it, behind everybody's back."""


class DirectoryPlace:
    """A ring in a directory."""

    def __init__(self, root: Path) -> None:
        self.text = str(root)
        self.root = root

    def alter(self, key: str, change: Change) -> None:
        path = self.root / key
        path.write_bytes(change(path.read_bytes()))

    def lose(self, key: str) -> None:
        (self.root / key).unlink()


class BucketPlace:
    """A ring in a bucket."""

    def __init__(self, bucket: RingBucket) -> None:
        self.text = bucket.place
        self._bucket = bucket

    def alter(self, key: str, change: Change) -> None:
        client, name, key = self._bucket.client, self._bucket.name, f"rings/one/{key}"
        with client.get_object(Bucket=name, Key=key)["Body"] as body:
            data = body.read()
        client.put_object(Bucket=name, Key=key, Body=change(data))

    def lose(self, key: str) -> None:
        self._bucket.client.delete_object(Bucket=self._bucket.name, Key=f"rings/one/{key}")


class ControlPlanePlace:
    """A ring with the control plane."""

    def __init__(self, served: ServedApi, name: str) -> None:
        self.text = f"baton:{name}"
        self._api, self._name = served.api, name

    def alter(self, key: str, change: Change) -> None:
        rings, ring = self._found()
        if key == RING_SETTINGS:
            rings.begin_removal(ring)
            rings.forget(ring)
            assert rings.make(replace(ring, settings=change(ring.settings)))
        elif is_object(key):
            data = self._api.context.objects.read(TENANT, DATA_BUCKET, ring.object_key(key))
            assert data is not None
            self.lose(key)
            self._api.put_object(DATA_BUCKET, ring.object_key(key), change(data))
        else:
            record = rings.read(ring, [key])[key]
            assert rings.write(ring, key, change(record.data), version=unique("v"), seen=record.version)

    def lose(self, key: str) -> None:
        _, ring = self._found()
        assert is_object(key)
        self._api.context.objects.delete(TENANT, DATA_BUCKET, ring.object_key(key))

    def _found(self) -> tuple[RingStore, StoredRing]:
        rings = self._api.context.rings
        assert rings is not None
        ring = rings.get(TENANT, self._name)
        assert ring is not None
        return rings, ring


def place_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Yield a place for a fixture: `fs`, or `s3` and `api` on the emulated cloud; `api` needs the fixture `served`."""
    if kind == "fs":
        yield DirectoryPlace(tmp_path / "ring")
        return
    emulator: Emulator = request.getfixturevalue("emulator")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    if kind == "api":
        served: ServedApi = request.getfixturevalue("served")
        for name, value in zip((uri.URL, uri.KEY), served.access(), strict=True):
            monkeypatch.setenv(name, value)
        yield ControlPlanePlace(served, unique("ring"))
        return
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", emulator.endpoint_url)
    with RingBucket.of(emulator) as bucket:
        yield BucketPlace(bucket)


KINDS = ["fs", *(pytest.param(kind, marks=pytest.mark.emulator) for kind in ("s3", "api"))]
