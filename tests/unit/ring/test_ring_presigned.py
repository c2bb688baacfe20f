"""Test the URL cache: URLs are requested together, ahead of use, and dropped before they expire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.store.control_plane import MARGIN_S, ObjectUrl, PresignedObjects, UrlCache, following_keys
from gpu_client.ring.store.s3_client import BucketClient, BucketRequest
from gpu_client.ring.store.uri import ControlPlaneAccess, find_access, set_access_source
from gpu_client.transport.net.connections import SENT_BYTES, Connections

LIFE_S = 600.0


class Asked:
    """Gives URLs, and remembers for what."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.batches: list[list[str]] = []

    def __call__(self, keys: Sequence[str]) -> Mapping[str, ObjectUrl]:
        self.batches.append(list(keys))
        return {key: ObjectUrl(f"{key}@{self.now_s:g}", {}, self.now_s + LIFE_S) for key in keys}


def urls(asked: Asked, most_ahead: int = 16) -> UrlCache:
    return UrlCache(asked, following_keys, most_ahead=most_ahead, clock=lambda: asked.now_s)


def test_each_batch_is_twice_the_last_up_to_the_most() -> None:
    asked = Asked()
    kept = urls(asked)
    for number in range(1, 60):
        assert kept.get(f"samples/w/{number:03d}").url == f"samples/w/{number:03d}@0"
    assert [len(batch) for batch in asked.batches] == [5, 9, 17, 17, 17]
    assert [batch[0] for batch in asked.batches][:3] == ["samples/w/001", "samples/w/006", "samples/w/015"]


def test_a_url_is_not_used_shortly_before_it_runs_out() -> None:
    asked = Asked()
    kept = urls(asked)
    kept.get("a1")
    asked.now_s = LIFE_S - MARGIN_S - 1
    assert kept.get("a1").url == "a1@0"
    asked.now_s = LIFE_S - MARGIN_S
    assert kept.get("a1").url == f"a1@{asked.now_s:g}"


def test_what_was_used_or_refused_is_asked_for_again() -> None:
    asked = Asked()
    kept = urls(asked)
    kept.get("a1")
    kept.forget("a1")
    kept.get("a1")
    assert [batch[0] for batch in asked.batches] == ["a1", "a1"]
    assert not set(asked.batches[0][1:]) & set(asked.batches[1][1:]), "the others are at hand"


class Watched:
    """A lock that tells who comes to it."""

    def __init__(self, told: Callable[[], object]) -> None:
        self._lock, self._told = threading.Lock(), told

    def __enter__(self) -> None:
        self._told()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_who_waits_for_what_cannot_be_had_does_not_ask_once_more() -> None:
    """Waiting samples share one failed request for URLs; separate retries kept a process from ending for hours."""
    kept: UrlCache
    asked: list[str] = []
    failures: list[OSError] = []
    waiting = threading.Event()
    behind = threading.Thread(target=lambda: fail("b1"))

    def ask(keys: Sequence[str]) -> Mapping[str, ObjectUrl]:
        asked.append(keys[0])
        if keys[0] == "a1":
            waiting.clear()
            behind.start()
            assert waiting.wait(30)
        raise ConnectionError("nobody answers")

    def fail(key: str) -> None:
        with pytest.raises(OSError, match="nobody answers") as told:
            kept.get(key)
        failures.append(told.value)

    kept = UrlCache(ask, following_keys, most_ahead=16)
    kept._asking = Watched(waiting.set)  # type: ignore[assignment]
    fail("a1")
    behind.join(30)
    assert len(failures) == 2 and asked == ["a1"]
    fail("c1")
    assert asked == ["a1", "c1"], "who comes later asks"


def test_what_comes_next_is_counted_up_within_its_width() -> None:
    assert following_keys("samples/w/00000001-0000000009", 2) == [
        "samples/w/00000001-0000000010",
        "samples/w/00000001-0000000011",
    ]
    assert following_keys("manifests/98", 5) == ["manifests/99"]
    assert following_keys("manifests/none", 5) == []


def test_access_is_a_token_before_a_key_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_client.ring.store.uri._access_sources", [])
    both = {"BATON_API_URL": "https://a", "BATON_API_KEY": "key", "BATON_RING_TOKEN": "token"}
    assert find_access(both) == ControlPlaneAccess("https://a", "token")
    assert find_access({**both, "BATON_RING_TOKEN": ""}) == ControlPlaneAccess("https://a", "key")
    assert "token" not in repr(find_access(both))
    for missing in ("BATON_API_URL", "BATON_API_KEY"):
        said = {name: value for name, value in both.items() if name not in (missing, "BATON_RING_TOKEN")}
        with pytest.raises(RingMismatch, match="BATON_API_URL and BATON_API_KEY are not both set"):
            find_access(said)
    set_access_source(lambda: ("https://profile", "its key"))
    assert find_access({}) == ControlPlaneAccess("https://profile", "its key")
    assert find_access(both) == ControlPlaneAccess("https://profile", "its key"), (
        "a profile that was asked for comes first"
    )
    set_access_source(lambda: None)
    assert find_access(both) == ControlPlaneAccess("https://a", "token")


class SlowSocket:
    """Store that records the size of each received piece."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.received = b""

    def sendall(self, data: memoryview) -> None:
        self.sizes.append(len(data))
        self.received += data


@pytest.mark.parametrize("kind", ["presigned", "bucket"])
def test_a_large_array_that_moves_slowly_is_not_given_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sendall` counts the timeout over all that it is given: an array of 33 MB in one call had to be there in a
    minute, or was sent anew until the sample was lost."""
    sock = SlowSocket()

    @contextmanager
    def exchange(
        self: Connections, method: str, url: str, headers: Any, flight: Any, send_body: Callable[[Any], None]
    ) -> Iterator[Any]:
        send_body(sock)
        yield SimpleNamespace(status=200, length=0, getheaders=list, read=lambda *_: b"")

    monkeypatch.setattr(Connections, "exchange", exchange)
    pieces = [memoryview(bytes([number]) * size) for number, size in enumerate((100, 3 * SENT_BYTES + 7, 0, 64))]
    if kind == "presigned":
        assert PresignedObjects().put("a", ObjectUrl("http://a/b", {}, 0.0), pieces)
    else:
        environment = {
            "AWS_REGION": "x", "AWS_ENDPOINT_URL": "http://a", "AWS_ACCESS_KEY_ID": "i", "AWS_SECRET_ACCESS_KEY": "k"
        }  # fmt: skip
        BucketClient("bucket", environment=environment).send(BucketRequest(method="PUT", key="a", body=pieces))
    assert sock.received == b"".join(pieces)
    assert max(sock.sizes) <= SENT_BYTES
