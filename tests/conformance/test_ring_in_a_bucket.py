"""Test a ring in a bucket behind a bad connection, and count its requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from functions.local.emulator import Emulator
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import ObjectDamaged
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.batch_plan import BatchShape
from gpu_client.ring.reading.batch_stream import BatchStream
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store import s3
from gpu_client.ring.store.s3 import BucketStore
from tests.conformance.test_ring_stores import view
from tests.kits.network.proxies import Fault, FaultyProxy
from tests.kits.ring.bucket import RingBucket

pytestmark = pytest.mark.emulator

KEY = "samples/w/1"


@pytest.fixture
def proxy(emulator: Emulator) -> Iterator[FaultyProxy]:
    host, _, port = emulator.endpoint_url.removeprefix("http://").partition(":")
    with FaultyProxy((host, int(port))) as running:
        yield running


@pytest.fixture
def bucket(emulator: Emulator, proxy: FaultyProxy) -> Iterator[RingBucket]:
    with RingBucket.of(emulator, proxy.url) as made:
        yield made


def stored(bucket: RingBucket, key: str) -> bytes:
    body = bucket.client.get_object(Bucket=bucket.name, Key=f"rings/one/{key}")["Body"]
    with body:
        return bytes(body.read())


class Passing:
    """A trouble that is over when somebody has waited."""

    def __init__(self, proxy: FaultyProxy) -> None:
        self._proxy = proxy
        self.trouble: Fault | None = None
        self.waits = 0

    def __call__(self, _seconds: float) -> None:
        self.waits += 1
        if self.trouble is not None:
            self._proxy.forget(self.trouble)


def test_an_object_whose_answer_was_lost_is_one_s_own(bucket: RingBucket, proxy: FaultyProxy) -> None:
    passing = Passing(proxy)
    store = bucket.opened(passing)
    with proxy.losing(f"^PUT .*{KEY}") as passing.trouble:
        assert store.create(KEY, [view(b"mine")])
    assert passing.waits == 1
    assert [one.split(" ")[0] for one in proxy.requests(KEY)] == ["PUT", "PUT", "HEAD"]
    assert stored(bucket, KEY) == b"mine"


def test_an_object_of_another_is_not_one_s_own_though_the_answer_was_lost(
    bucket: RingBucket, proxy: FaultyProxy
) -> None:
    passing = Passing(proxy)
    store, other = bucket.opened(passing), bucket.opened()
    assert other.create(KEY, [view(b"same")])
    with proxy.losing(f"^PUT .*{KEY}") as passing.trouble:
        assert not store.create(KEY, [view(b"same")])
    assert passing.waits == 1


def test_a_swap_whose_answer_was_lost_was_done_once(bucket: RingBucket, proxy: FaultyProxy) -> None:
    passing = Passing(proxy)
    store, other = bucket.opened(passing), bucket.opened()
    first = store.swap("pointer", b"1", None)
    with proxy.losing("^PUT .*pointer") as passing.trouble:
        second = store.swap("pointer", b"2", first)
    assert second is not None
    found = other.record("pointer")
    assert found is not None
    assert (found.data, found.version) == (b"2", second)
    with proxy.losing("^PUT .*pointer") as passing.trouble:
        assert store.swap("pointer", b"3", first) is None, "it was not the one that is there"
    assert stored(bucket, "pointer") == b"2"
    with proxy.losing("^PUT .*begun") as passing.trouble:
        assert store.swap("begun", b"1", None) is not None


@pytest.mark.parametrize("status", [500, 503, 409, 429, None])
def test_what_passes_is_waited_out(bucket: RingBucket, proxy: FaultyProxy, status: int | None) -> None:
    passing = Passing(proxy)
    store = bucket.opened(passing)
    for method, operation in [
        ("PUT", lambda: store.create(KEY, [view(b"x")])),
        ("GET", lambda: store.read(KEY)),
        ("GET", lambda: store.keys("samples/") == [KEY]),
        ("POST", lambda: store.delete([KEY]) is None),
    ]:
        with proxy.failing(f"^{method}", status) if status else proxy.dropping(f"^{method}") as passing.trouble:
            before = passing.waits
            assert operation()
            assert passing.waits == before + 1
    assert store.read(KEY) is None


def test_a_store_that_is_away_for_long_is_an_error_of_the_system(bucket: RingBucket, proxy: FaultyProxy) -> None:
    waited: list[float] = []
    store = bucket.opened(waited.append)
    with proxy.dropping(), pytest.raises(OSError, match=r"did not do the GET of .*pointer in 12 tries"):
        store.record("pointer")
    assert len(waited) == 11
    assert sum(waited) < 90


def test_a_large_object_is_read_in_parts(
    bucket: RingBucket, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 10_000)
    store = bucket.opened()
    for size_bytes in (9_999, 10_000, 10_001, 50_000, 95_123):
        data = random.Random(size_bytes).randbytes(size_bytes)
        key = f"samples/w/{size_bytes}"
        store.create(key, [view(data[:100]), view(data[100:])])
        found = store.read(key)
        assert found is not None
        assert bytes(found) == data
        assert len(proxy.requests(f"^GET .*{key}")) == -(-size_bytes // 10_000)


def test_parts_that_fail_are_fetched_again_and_what_is_deleted_meanwhile_is_not_there(
    bucket: RingBucket, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 10_000)
    passing = Passing(proxy)
    store = bucket.opened(passing)
    data = random.Random(1).randbytes(30_000)
    store.create(KEY, [view(data)])
    begin = store.bucket.part_threads

    with ExitStack() as later:

        def with_trouble() -> object:
            passing.trouble = later.enter_context(proxy.failing(f"^GET .*{KEY}", 503))
            return begin()

        monkeypatch.setattr(store.bucket, "part_threads", with_trouble)
        found = store.read(KEY)
    assert found is not None
    assert bytes(found) == data
    assert passing.waits in (1, 2), "the first part was there, the two others came at the second try"

    def deleting() -> object:
        bucket.client.delete_object(Bucket=bucket.name, Key=f"rings/one/{KEY}")
        return begin()

    monkeypatch.setattr(store.bucket, "part_threads", deleting)
    assert store.read(KEY) is None


def test_parts_of_two_objects_are_not_put_together(bucket: RingBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 10_000)
    store = bucket.opened()
    store.create(KEY, [view(bytes(30_000))])
    begin = store.bucket.part_threads

    def replacing() -> object:
        bucket.client.put_object(Bucket=bucket.name, Key=f"rings/one/{KEY}", Body=b"\1" * 30_000)
        return begin()

    monkeypatch.setattr(store.bucket, "part_threads", replacing)
    with pytest.raises(ObjectDamaged, match="replaced during the read"):
        store.read(KEY)


def test_many_keys_are_listed_and_deleted_page_by_page(bucket: RingBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "KEYS_PER_REQUEST", 7)
    store = bucket.opened()
    made = sorted(f"inbox/w.{number:08d}" for number in range(30))
    for key in made:
        store.create(key, [])
    bucket.client.put_object(Bucket=bucket.name, Key="rings/one-too/inbox/other", Body=b"")
    assert store.keys("inbox/") == made
    assert store.bucket.sent["GET"] == 5
    store.delete([*made[:-1], "inbox/never"])
    assert store.bucket.sent["POST"] == 5
    assert store.keys("inbox/") == made[-1:]
    assert bucket.client.list_objects_v2(Bucket=bucket.name, Prefix="rings/one-too/")["KeyCount"] == 1


def test_the_samples_of_a_batch_are_fetched_at_the_same_time(bucket: RingBucket, proxy: FaultyProxy) -> None:
    ring = Ring.make(bucket.opened(), RingSettings(cap=6, max_ahead=1000))
    with RingWriter(ring, "w", threads=False) as writer:
        for number in range(6):
            writer.put({"x": np.full(1000, number)})
    with RingReader(Ring.open(bucket.opened()), "r", threads=False) as reader, ThreadPoolExecutor(1) as thread:
        stream = BatchStream(reader, BatchShape(6))
        with proxy.holding("^GET .*/samples/") as held:
            batch = thread.submit(stream.next_batch)
            held.wait_for(6)
        assert sorted(int(one["x"][0]) for one in batch.result(60)[1]) == list(range(6))
    assert len(proxy.requests("^GET .*/samples/")) == 6, "each once"


def test_what_was_begun_and_is_not_read_is_given_up(bucket: RingBucket, proxy: FaultyProxy) -> None:
    store = bucket.opened()
    keys = [f"samples/w/{number}" for number in range(4)]
    for key in keys:
        store.create(key, [view(key.encode())])
    store.prefetch(keys)
    store.prefetch(keys[2:])
    assert store._prefetcher.pending.keys() == set(keys[2:])
    for key in keys:
        found = store.read(key)
        assert found is not None
        assert bytes(found) == key.encode()
    store.prefetch(keys[:1])
    assert store._prefetcher.pending == {}, "one alone is read when it is wanted"
    store.delete(keys)
    store.prefetch(keys)
    assert [store.read(key) for key in keys] == [None] * 4


@pytest.mark.parametrize("mode", ["rolling", "generation"])
def test_a_publication_is_four_requests_whatever_the_samples_are(
    bucket: RingBucket, proxy: FaultyProxy, mode: str
) -> None:
    ring = Ring.make(bucket.opened(), RingSettings(cap=4, mode=mode, max_ahead=1000, shapes="any"))  # type: ignore[arg-type]
    writer = RingWriter(Ring.open(bucket.opened()), "w", threads=False)
    for size in (1, 100_000):
        for turn in range(3):
            for _ in range(4):
                writer.put({"x": np.zeros(4), "large": bytes(size)})
            before = len(proxy.requests())
            assert ring.publish() is not None
            told = [one.replace(f"/{bucket.name}/", "").replace("rings/one/", "") for one in proxy.requests()[before:]]
            manifest = f"PUT manifests/{ring.newest().number:012d}"
            if turn:  # the first time it reads the manifest, too
                assert told == ["GET pointer", "GET ", manifest, "PUT pointer", "POST "], "readable after four"
    assert ring.newest().inserted == 24


def test_who_publishes_after_another_finds_out(bucket: RingBucket) -> None:
    rings = [Ring.make(bucket.opened(), RingSettings(cap=100, retain=2)) for _ in range(2)]
    writer = RingWriter(Ring.open(bucket.opened()), "w", threads=False)
    for number in range(12):
        writer.put(np.array([number]))
        # Three by one, then three by the other: what that one knows is so old that its manifests are forgotten.
        published = rings[number // 3 % 2].publish()
        assert published is not None
        assert published.inserted == number + 1
        old = [f"manifests/{one:012d}" for one in range(1, published.number - 1)]
        rings[0].store.delete(old)
    assert [slot.inserted for slot in rings[0].newest().slots] == list(range(12))


def test_a_ring_in_a_bucket_is_written_kept_and_read(bucket: RingBucket) -> None:
    ring = Ring.make(bucket.opened(), RingSettings(cap=8, retain=2, pack=2, lease_s=5))
    with (
        Maintainer(ring, "keeper") as keeper,
        RingWriter(Ring.open(bucket.opened()), "w", maintainer=keeper) as writer,
        RingReader(Ring.open(bucket.opened())) as reader,
    ):
        for number in range(20):
            writer.put({"x": np.full(1000, number)}, seed=number)
        reader.wait(lambda: reader.newest().inserted == 20, "what was put did not become readable")
        samples = [reader.sample(slot) for slot in reader.newest().slots]
    assert [int(one["x"][-1]) for one in samples] == list(range(12, 20))
    assert [claim for claim in ring.claims() if claim.samples] == []


def test_nothing_is_asked_before_it_is_needed_and_a_missing_bucket_is_named(
    bucket: RingBucket, proxy: FaultyProxy
) -> None:
    bucket.opened()
    assert proxy.requests() == []
    bucket.name = "no-such-bucket"
    with pytest.raises(Exception, match="there is no bucket no-such-bucket"):
        Ring.open(bucket.opened())


def test_stores_are_of_the_place_that_is_named(bucket: RingBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_client.ring.core.ring import make_ring, open_ring

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", bucket.endpoint_url)
    made, found = make_ring(bucket.place, RingSettings(cap=3)), open_ring(bucket.place)
    assert found.settings.cap == 3
    assert isinstance(found.store, BucketStore)
    for ring in (made, found):
        ring.store.close()
