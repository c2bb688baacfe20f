"""Test rings at `baton:NAME` over HTTP: writers, readers and loaders with a key or a job's token."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.contract.objects.rings import UrlsAnswer, UrlsRequest
from baton.contract.worker.calls import WorkItem
from functions.local.emulator import Emulator
from gpu_client.agent.process.environment import build_environment
from gpu_client.agent.workspace.slots import JobDirectories
from gpu_client.ring.core.liveness import LeaseHandle
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.repair import verify_objects
from gpu_client.ring.core.ring import Ring, remove_ring
from gpu_client.ring.errors import RingMismatch, WriterFenced
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.batch_plan import BatchShape
from gpu_client.ring.reading.batch_stream import BatchStream
from gpu_client.ring.reading.loader import RingLoader
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.control_plane import DECLARED_BYTES, ObjectUrl, PresignedObjects
from gpu_client.ring.store.protocol import DistantStore, RingBackend
from gpu_client.ring.tools.status import read_status
from gpu_client.transport.api.admin import RingCalls
from gpu_client.transport.errors import UrlExpired
from gpu_client.transport.net.connections import Connections
from tests.kits.api.served_api import ServedApi, served_api
from tests.kits.clouds.emulator import unique

pytestmark = pytest.mark.emulator

RECORDS, URLS = "POST /rings/{ring}/records", "POST /rings/{ring}/urls"
GENERATOR = """
import numpy as np
from gpu_client.ring.core.ring import open_ring
from gpu_client.ring.generating.writer import RingWriter
import sys
with RingWriter(open_ring(sys.argv[1]), "child") as writer:
    for seed in range(3):
        writer.put({"x": np.full(4, seed)}, seed=seed)
"""


@pytest.fixture(scope="module")
def served(emulator: Emulator) -> Iterator[ServedApi]:
    with served_api(emulator) as running:
        yield running


@pytest.fixture
def name() -> str:
    return unique("ring")


def made(served: ServedApi, name: str, **more: object) -> Ring:
    settings: dict[str, object] = {"cap": 8, "publish_interval_s": 0.05, **more}
    return Ring.make(served.store(name), RingSettings.model_validate(settings))


def idle(ring: Ring) -> Maintainer:
    """Maintainer that acts only on request."""
    return Maintainer(ring, "idle")


def writer_of(ring: Ring, name: str = "w") -> RingWriter:
    return RingWriter(ring, name, maintainer=idle(ring), threads=False, patience_s=5)


def test_what_is_put_is_read_bit_by_bit(served: ServedApi, name: str) -> None:
    ring = made(served, name)
    values = np.random.default_rng(1).normal(size=(3, 40_000))
    writer = writer_of(ring)
    for number, value in enumerate(values):
        writer.put({"x": value, "n": np.int64(number)}, seed=number)
    writer.swap()
    with RingReader(Ring.open(served.store(name)), "r", threads=False) as reader:
        newest = reader.newest()
        found = [reader.sample(slot) for slot in newest.slots]
    assert [int(sample["n"]) for sample in found] == [0, 1, 2]
    assert all(np.array_equal(sample["x"], value) for sample, value in zip(found, values, strict=True))
    assert dict(verify_objects(ring)) == {slot.object.key: "" for slot in newest.slots}
    writer.close()
    assert read_status(ring).readable == 3


def test_a_put_is_one_call_and_urls_come_many_at_a_time(served: ServedApi, name: str) -> None:
    ring = made(served, name, cap=300, max_ahead=300)
    writer = writer_of(ring)
    writer.put({"x": np.zeros(4)})
    served.calls.clear()
    for number in range(100):
        writer.put({"x": np.full(4, float(number))})
    counted = Counter(served.calls)
    assert counted[RECORDS] == 100
    assert counted.total() - counted[RECORDS] == counted[URLS] <= 6
    writer.swap()
    with RingReader(ring, "r", threads=False) as reader:
        newest = reader.newest()
        served.calls.clear()
        for slot in newest.slots:
            reader.sample(slot)
        assert len(newest) == 101
        assert Counter(served.calls) == {URLS: Counter(served.calls)[URLS]}
        assert Counter(served.calls)[URLS] <= 6


def test_a_large_object_that_is_damaged_on_its_way_is_refused_and_sent_again(
    served: ServedApi, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refuses damaged bytes, before a reader meets the damage."""
    ring = made(served, name)
    data = np.random.default_rng(1).bytes(DECLARED_BYTES)
    exchange, sent = Connections.exchange, list[str]()

    @contextmanager
    def damaging(self: Connections, method: str, url: str, headers: Any, flight: Any, send_body: Any = None) -> Any:
        def damaged(sock: Any) -> None:
            sock.sendall(b"?" + data[1:])

        if method == "PUT":
            sent.append(url)
        body = damaged if method == "PUT" and len(sent) == 1 else send_body
        with exchange(self, method, url, headers, flight, body) as response:
            yield response

    monkeypatch.setattr(Connections, "exchange", damaging)
    served.calls.clear()
    assert ring.store.create("samples/w/1", [memoryview(data)[:5], memoryview(data)[5:]])
    assert served.calls == [URLS] and len(sent) == 2
    assert bytes(ring.store.read("samples/w/1") or b"") == data
    sent.clear()
    assert not ring.store.create("samples/w/1", [memoryview(b"?" * DECLARED_BYTES)])
    monkeypatch.setattr("gpu_client.ring.store.control_plane.checksums.crc64nvme", lambda piece, before: 1)
    with pytest.raises(OSError, match=r"samples/w/2: not moved after 3 tries .*other bytes than declared"):
        ring.store.create("samples/w/2", [memoryview(data)])
    assert ring.store.keys("samples/") == ["samples/w/1"]


def test_an_answer_that_is_lost_loses_nothing(served: ServedApi, name: str) -> None:
    ring = made(served, name)
    held = LeaseHandle(ring.store, "writers/w", {"epoch": 1}, None)
    for _ in range(3):
        served.lost.append(RECORDS)
        assert held.renew(), "it was this one's own write that was there already"
    assert served.lost == []
    served.lost.append(RECORDS)
    assert ring.store.create("inbox/w.00000001.0000000001.1.5", [])
    record = ring.store.record("writers/w")
    assert record is not None and json.loads(record.data)["count"] == 4


def test_a_writer_whose_name_is_taken_is_told_with_its_claim(served: ServedApi, name: str) -> None:
    ring = made(served, name)
    first = writer_of(ring)
    first.put({"x": np.zeros(4)})
    second = writer_of(Ring.open(served.store(name)))
    with pytest.raises(WriterFenced):
        first.put({"x": np.ones(4)})
    second.put({"x": np.ones(4)})
    second.close()


def test_a_url_that_has_run_out_is_asked_for_again(
    served: ServedApi, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(served, name)
    store = Ring.open(served.store(name)).store
    store.create("samples/w/1", [memoryview(b"bytes")])
    whole, refused = PresignedObjects.get, ["once"]

    def get(self: PresignedObjects, key: str, url: ObjectUrl) -> memoryview | None:
        if refused:
            refused.pop()
            raise UrlExpired("the presigned URL has run out")
        return whole(self, key, url)

    monkeypatch.setattr(PresignedObjects, "get", get)
    served.calls.clear()
    found = store.read("samples/w/1")
    assert found is not None and bytes(found) == b"bytes"
    assert served.calls == [URLS, URLS]
    monkeypatch.setattr(PresignedObjects, "get", lambda *_: (_ for _ in ()).throw(UrlExpired("again and again")))
    with pytest.raises(OSError, match="again and again"):
        store.read("samples/w/1")


def test_the_samples_of_a_batch_are_fetched_at_the_same_time_with_one_call_for_their_urls(
    served: ServedApi, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = made(served, name, cap=64, max_ahead=1000)
    writer = writer_of(ring)
    for number in range(64):
        writer.put({"x": np.full(1000, number)})
    writer.swap()
    whole, together, fetched = PresignedObjects.get, threading.Barrier(8, timeout=30), list[str]()

    def get(self: PresignedObjects, key: str, url: ObjectUrl) -> memoryview | None:
        if key.startswith("samples/"):
            fetched.append(key)
            together.wait()  # for the others of the batch, all of which have to be on their way
        return whole(self, key, url)

    monkeypatch.setattr(PresignedObjects, "get", get)
    with RingReader(Ring.open(served.store(name)), "r", threads=False) as reader:
        stream = BatchStream(reader, BatchShape(8))
        seen = []
        for batch in range(1, 9):
            served.calls.clear()
            seen += [int(sample["x"][0]) for sample in stream.next_batch()[1]]
            assert Counter(served.calls)[URLS] <= (2 if batch == 1 else 1), "the first needs one for its manifest"
    assert sorted(seen) == list(range(64)) and len(fetched) == len(set(fetched)) == 64


def test_what_was_begun_is_read_as_it_is_and_ends_with_the_store(served: ServedApi, name: str) -> None:
    made(served, name)
    store = Ring.open(served.store(name)).store
    assert isinstance(store, DistantStore)
    keys = [f"samples/w/{number}" for number in range(300)]
    for key in keys[:4]:
        store.create(key, [memoryview(key.encode())])
    served.calls.clear()
    others = set(threading.enumerate())  # of stores that other tests have left to the garbage collector
    store.prefetch(keys)
    found = [store.read(key) for key in keys]
    assert [bytes(one).decode() for one in found if one is not None] == keys[:4]
    assert served.calls == [URLS, URLS], "no call asks for more than the contract allows"
    store.prefetch(keys[:2])
    store.prefetch(keys[2:4])
    store.close()
    assert [one.name for one in set(threading.enumerate()) - others if one.name.startswith("ring-api")] == []
    assert bytes(store.read(keys[3]) or b"").decode() == keys[3], "it opens anew"
    store.close()


def test_a_process_that_is_forked_while_others_fetch_fetches_too(
    served: ServedApi, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(served, name)
    store = Ring.open(served.store(name)).store
    store.create("samples/w/1", [memoryview(b"bytes")])
    ask, forked, code = RingCalls.ring_urls, threading.Event(), list[int]()

    def slow(self: RingCalls, ring: str, request: UrlsRequest) -> UrlsAnswer:
        asking.set()
        assert forked.wait(30)
        return ask(self, ring, request)

    asking = threading.Event()
    monkeypatch.setattr(RingCalls, "ring_urls", slow)
    assert isinstance(store, DistantStore)
    store.prefetch(["samples/w/1", "samples/w/2"])
    assert asking.wait(30)
    child = multiprocessing.get_context("fork").Process(target=lambda: _read_in_child(store, ask))
    child.start()
    child.join(30)
    code.append(child.exitcode if child.exitcode is not None else -1)
    child.kill()
    forked.set()
    assert code == [0]
    assert bytes(store.read("samples/w/1") or b"") == b"bytes"
    store.close()


def _read_in_child(store: RingBackend, ask: Callable[[RingCalls, str, UrlsRequest], UrlsAnswer]) -> None:
    RingCalls.ring_urls = ask  # type: ignore[method-assign]
    os._exit(0 if bytes(store.read("samples/w/1") or b"") == b"bytes" else 3)


def test_a_loader_with_workers_reads_and_resumes(served: ServedApi, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_URL", served.url)
    monkeypatch.setenv("BATON_API_KEY", served.api.keys["submit"])
    monkeypatch.delenv("BATON_RING_TOKEN", raising=False)
    ring = made(served, name)
    writer = writer_of(ring)
    for number in range(8):
        writer.put({"x": np.full(4, float(number))})
    writer.swap()

    def batches(count: int, state: dict[str, object] | None = None) -> tuple[list[list[str]], dict[str, object]]:
        loader = RingLoader(f"baton:{name}", batch_size=2, workers=1, seed=3, multiprocessing_context="fork")
        if state is not None:
            loader.load_state_dict(state)
        found = []
        for _, _ in zip(range(count), loader, strict=False):
            found.append(loader.ids)
        return found, loader.state_dict()

    whole, _ = batches(4)
    first, state = batches(2)
    rest, _ = batches(2, state)
    assert first + rest == whole
    assert sorted(one for batch in whole for one in batch) == sorted(slot.id for slot in ring.newest().slots)
    writer.close()


@pytest.mark.processes
def test_a_jobs_process_generates_with_what_its_agent_gives_it(served: ServedApi, name: str, tmp_path: Path) -> None:
    ring, other = made(served, name), unique("ring")
    made(served, other)
    served.api.submit(rings=[name], queue=name)
    held = served.api.claim(queue=name)
    base = {"PATH": "/usr/bin", "BATON_API_KEY": served.api.keys["worker"], "BATON_API_URL": "http://wrong"}
    directories = JobDirectories(*(tmp_path / part for part in ("", "data", "output", "staging", "params.json")))
    item = WorkItem.model_validate(held.item)
    environment = build_environment(item, directories, "", "", base, api_url=served.url)
    assert served.api.keys["worker"] not in environment.values() and held.token not in environment.values()
    environment["PYTHONPATH"] = ":".join(path for path in sys.path if path)

    def generated(place: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", GENERATOR, place]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    done = generated(f"baton:{name}")
    assert done.returncode == 0, done.stderr
    ring.publish()
    assert len(ring.newest()) == 3
    refused = generated(f"baton:{other}")
    assert refused.returncode == 1 and f"names only the rings {name}" in refused.stderr
    without = item.model_copy(update={"rings": []})
    plain = build_environment(without, directories, "", "", base, api_url=served.url)
    assert not {"BATON_API_URL", "BATON_RING_TOKEN"} & plain.keys()


def test_who_is_not_let_in_is_told_so(served: ServedApi, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made(served, name)
    with pytest.raises(RingMismatch, match="there is no ring here"):
        Ring.open(served.store(unique("none")))
    with pytest.raises(RingMismatch, match="key_unknown"):
        Ring.open(served.store(name, "baton_k3f9a7c2_0000000000000000000000"))
    with pytest.raises(RingMismatch, match="wrong_scope"):
        Ring.open(served.store(name, "worker"))
    with pytest.raises(RingMismatch, match="there is no ring here"):
        Ring.open(served.store(name, "rival_submit"))
    with pytest.raises(RingMismatch, match=r"cannot keep 'readers/a b'"):
        served.store(name).swap("readers/a b", b"", None)
    with pytest.raises(RingMismatch, match="keeps records of up to"):
        served.store(name).swap("pins/train", b"x" * 400_000, None)


def test_a_ring_that_was_removed_shuts_out_who_used_it(
    served: ServedApi, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_API_URL", served.url)
    monkeypatch.setenv("BATON_API_KEY", served.api.keys["submit"])
    monkeypatch.delenv("BATON_RING_TOKEN", raising=False)
    writer = writer_of(made(served, name))
    writer.put({"x": np.zeros(4)})
    assert remove_ring(f"baton:{name}") >= 3
    with pytest.raises(RingMismatch, match="No ring ring-"):
        remove_ring(f"baton:{name}")
    made(served, name)
    with pytest.raises(RingMismatch, match="ring_not_found"):
        writer.put({"x": np.zeros(4)})
    assert served.store(name).keys("samples/") == []
    assert served.store(name).keys("inbox/") == []


def test_a_writer_that_renews_its_lease_while_a_claim_is_answered_is_not_fenced(served: ServedApi, name: str) -> None:
    """The lease that a claim's answer brings along was older than the one just renewed: it was taken for another's, and
    a generator's job failed."""
    ring = made(served, name)
    writer = writer_of(ring)
    create = ring.store.create

    def renewed_meanwhile(key: str, pieces: Any) -> bool:
        found = create(key, pieces)
        renewing = threading.Thread(target=writer.renew)
        renewing.start()
        renewing.join()
        return found

    ring.store.create = renewed_meanwhile  # type: ignore[method-assign]
    for number in range(3):
        writer.put({"x": np.full(4, number)})
    assert writer.put_samples == 3 and writer.owns_name()
    other = writer_of(Ring.open(served.store(name)))
    with pytest.raises(WriterFenced):
        writer.put({"x": np.full(4, 3)})
    assert not writer.owns_name() and other.owns_name()
