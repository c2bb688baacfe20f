"""The relay of original workers between a scripted API and a scripted store, with a clock that only pauses move."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from urllib.parse import parse_qs

import pytest

from gpu_client.original_relay import Relay, Upstream
from tests.functional.api.original_client import OriginalClient
from tests.unit.transport.scripted_server import Act, Handler, ScriptedServer, reply

SECRET_HEADERS = {"x-api-key", "x-upload-token", "x-download-token", "cookie", "authorization"}
UPLOAD = "/upload/training-checkpoints/jobs/1/a.zip"
DOWNLOAD = "/download/training-data/a.jpg"


class Time:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.pauses.append(pause_s)


@pytest.fixture
def store() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def relay(server: ScriptedServer, time: Time) -> Iterator[Relay]:
    running = Relay(Upstream(server.url + "/prod/", time))
    thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.fixture
def worker(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Iterator[OriginalClient]:
    # The worker's own pauses between tries.
    monkeypatch.setattr("urllib3.util.retry.Retry.sleep", lambda *_: None)
    client = OriginalClient(relay.url, "the key", "machine-1")
    yield client
    client.close()


def stored(handler: Handler) -> None:
    """Store a part as S3 does; the ETag names the part."""
    seen = handler.request_seen
    handler.home.objects[f"{seen.path}?{seen.query}"] = seen.body
    handler.answer(200, b"", {"ETag": f'"etag of {parse_qs(seen.query)["partNumber"][0]}"', "Set-Cookie": "a=store"})


def signs_parts(store: ScriptedServer) -> Act:
    """Answer with the URL of the part that is asked for."""

    def act(handler: Handler) -> None:
        query = parse_qs(handler.request_seen.query)
        assert query["uploadId"] == ["u"]
        if query["action"] == ["mpu-presign"]:
            url = f"{store.url}/s3?partNumber={query['partNumber'][0]}&X-Amz-Signature=s"
            handler.answer(200, {"url": url, "expires_at": 1}, {"Set-Cookie": "b=api"})
        else:
            assert query["action"] == ["mpu-complete"]
            handler.answer(200, {"status": "ok"})

    return act


@pytest.fixture
def part_of(server: ScriptedServer, store: ScriptedServer) -> None:
    """Let both servers accept uploads in parts."""
    server.routes["GET", "/prod/upload/token"] = reply(200, {"token": "upload token", "expires_at": 1})
    server.script("POST", f"/prod{UPLOAD}", reply(200, {"uploadId": "u", "key": "k"}))
    server.routes["POST", f"/prod{UPLOAD}"] = signs_parts(store)
    store.routes["PUT", "/s3"] = stored
