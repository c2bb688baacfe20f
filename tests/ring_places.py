"""Places for rings as their users name them, and hands that spoil what lies there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from functions.local.emulator import Emulator
from tests.ring_bucket import RingBucket

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


def place_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """For a fixture: `fs`, or `s3` on the emulated cloud."""
    if kind == "fs":
        yield DirectoryPlace(tmp_path / "ring")
        return
    emulator: Emulator = request.getfixturevalue("emulator")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", emulator.endpoint_url)
    with RingBucket.of(emulator) as bucket:
        yield BucketPlace(bucket)


KINDS = ["fs", pytest.param("s3", marks=pytest.mark.emulator)]
