"""A bucket for the ring of one test on an S3 server, and stores in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from functions.local.emulator import Emulator
from gpu_client.ring.store.s3 import BucketStore
from gpu_client.ring.store.s3_client import BucketClient
from tests.kits.clouds.emulator import unique


def at_once(_seconds: float) -> None:
    """Replace waiting by nothing."""


class RingBucket:
    """Bucket of one ring; `opened` opens stores as other processes would, and the end closes them."""

    def __init__(self, client: Any, endpoint_url: str, credentials: Mapping[str, str]) -> None:
        self.client = client
        self.endpoint_url = endpoint_url
        self.environment = {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL_S3": endpoint_url, **credentials}
        self.name = unique("ring")
        self.client.create_bucket(Bucket=self.name)
        self._stores: list[BucketStore] = []

    @classmethod
    def of(cls, emulator: Emulator, endpoint_url: str = "") -> Self:
        """Make a bucket on the emulator; `endpoint_url`: of a proxy before the emulator."""
        emulator.check()
        return cls(emulator.client("s3"), endpoint_url or emulator.endpoint_url, {})

    @property
    def place(self) -> str:
        """Name the place as users do."""
        return f"s3://{self.name}/rings/one"

    def opened(self, pause: Callable[[float], object] = at_once) -> BucketStore:
        """Open a store; `pause` is called for waiting."""
        bucket = BucketClient(self.name, environment=self.environment, pause=pause)
        self._stores.append(BucketStore(f"{self.name}/rings/one", bucket))
        return self._stores[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for store in self._stores:
            store.close()
