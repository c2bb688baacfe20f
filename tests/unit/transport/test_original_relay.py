"""The relay of original workers between a scripted API and a scripted store: what passes, and what is held back."""

from __future__ import annotations

import builtins
import http.client
import logging
import os
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import requests

from gpu_client import original_relay
from gpu_client.original_relay import LONGEST_PAUSE_S, PATIENCE_S, Relay
from tests.functional.api import original_client
from tests.functional.api.original_client import PART_BYTES, OriginalClient
from tests.unit.transport.relay_kit import DOWNLOAD, SECRET_HEADERS, UPLOAD, Time, signs_parts, stored
from tests.unit.transport.scripted_server import Handler, ScriptedServer, reply, reset, truncated


def upload(worker: OriginalClient, data: bytes) -> int:
    return worker.upload("training-checkpoints", "jobs/1/a.zip", data)


@pytest.mark.usefixtures("part_of")
def test_parts_go_to_the_store_and_their_etags_to_the_worker(
    server: ScriptedServer, store: ScriptedServer, worker: OriginalClient, time: Time
) -> None:
    data = bytes(range(256)) * (PART_BYTES // 256) + b"the rest"
    assert upload(worker, data) == 200
    assert b"".join(body for _, body in sorted(store.objects.items())) == data
    assert server.seen[-1].body == (
        b'{"parts": [{"etag": "etag of 1", "partNumber": 1}, {"etag": "etag of 2", "partNumber": 2}]}'
    )
    assert {seen.headers["x-api-key"] for seen in server.seen} == {"the key"}
    assert all(len(seen.body) < 1000 for seen in server.seen), "no part passes the API"
    assert len(store.seen) == 2 and not SECRET_HEADERS & {name for seen in store.seen for name in seen.headers}
    assert time.pauses == []


@pytest.mark.usefixtures("part_of")
def test_many_parts_go_side_by_side(
    store: ScriptedServer, worker: OriginalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(25)

    def meets(handler: Handler) -> None:
        together.wait(60)
        stored(handler)

    store.routes["PUT", "/s3"] = meets
    monkeypatch.setattr(original_client, "PART_BYTES", 1000)
    assert upload(worker, b"x" * 25_000) == 200
    assert store.most_at_once == 25


def test_each_part_is_in_memory_once_until_the_store_has_it(
    relay: Relay, server: ScriptedServer, store: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay holds each part once in memory until the store has it, even while it sends the part again."""
    parts, size_bytes = 3, 4_000_000
    held_bytes: list[int] = []
    opened: list[object] = []
    together = threading.Barrier(parts, lambda: held_bytes.append(_relay_bytes()))

    def fails(handler: Handler) -> None:
        together.wait(60)
        handler.answer(503)

    def takes(handler: Handler) -> None:
        together.wait(60)
        stored(handler)

    def put(number: int) -> None:
        with requests.Session() as http:
            url = f"{relay.url}{UPLOAD}?uploadId=u&partNumber={number}"
            assert http.put(url, data=b"x" * size_bytes, timeout=30).status_code == 200
            # The relay begins a second call of a connection after the end of the first call.
            assert http.get(f"{relay.url}/health", timeout=30).status_code == 404
            together.wait(60)

    server.routes["POST", f"/prod{UPLOAD}"] = signs_parts(store)
    store.script("PUT", "/s3", *[fails] * parts)
    store.routes["PUT", "/s3"] = takes
    with monkeypatch.context() as patch, ThreadPoolExecutor(parts) as pool:
        for owner in (builtins, os):
            patch.setattr(owner, "open", _recording(vars(owner)["open"], opened))
        tracemalloc.start()
        try:
            list(pool.map(put, range(1, parts + 1)))
        finally:
            tracemalloc.stop()
    assert opened == []
    first, again, after = held_bytes
    # A growing buffer has up to an eighth of unused space.
    assert parts * size_bytes <= first <= 1.25 * parts * size_bytes
    assert again <= 1.25 * parts * size_bytes
    assert after < 0.1 * size_bytes


def _relay_bytes() -> int:
    """Return the memory that the relay's own lines have allocated."""
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, original_relay.__file__)])
    return sum(found.size for found in own.statistics("filename"))


def _recording(call: Callable[..., Any], calls: list[object]) -> Callable[..., Any]:
    others = set(threading.enumerate())  # threads that an earlier test left may write files of their own

    def record(path: Any, *more: Any, **named: Any) -> Any:
        if threading.current_thread() not in others:
            calls.append(path)
        return call(path, *more, **named)

    return record


@pytest.mark.usefixtures("part_of")
def test_a_store_that_fails_a_part_gets_it_again_by_a_new_url(
    server: ScriptedServer, store: ScriptedServer, worker: OriginalClient
) -> None:
    store.script("PUT", "/s3", reply(500), reply(503), reply(403))
    assert upload(worker, b"x" * 1000) == 200
    assert list(store.objects.values()) == [b"x" * 1000]
    assert sum("mpu-presign" in seen.query for seen in server.seen) == 4


@pytest.mark.usefixtures("part_of")
def test_a_store_that_does_not_listen_is_waited_for(server: ScriptedServer, worker: OriginalClient, time: Time) -> None:
    with ScriptedServer() as gone:
        pass
    url = {"url": f"{gone.url}/s3?partNumber=1", "expires_at": 1}
    server.script("POST", f"/prod{UPLOAD}", reply(200, url))
    assert upload(worker, b"x") == 200
    assert len(time.pauses) == 1
    assert sum("mpu-presign" in seen.query for seen in server.seen) == 2, "the second try has a URL of its own"


def test_an_upload_that_is_refused_is_the_api_s_refusal(server: ScriptedServer, worker: OriginalClient) -> None:
    refusal = {"error": {"code": "job_canceled", "message": "was"}}
    server.routes["POST", f"/prod{UPLOAD}"] = reply(409, refusal)
    url = f"{worker.url}{UPLOAD}?action=mpu-uploadpart&uploadId=u&partNumber=1"
    for _ in range(2):
        put = worker.http.put(url, data=b"x" * 3_000_000)
        assert (put.status_code, put.json()) == (409, refusal)


def test_an_upload_that_has_ended_is_not_found(
    server: ScriptedServer, store: ScriptedServer, worker: OriginalClient
) -> None:
    server.routes["POST", f"/prod{UPLOAD}"] = reply(200, {"url": f"{store.url}/s3?partNumber=1", "expires_at": 1})
    store.routes["PUT", "/s3"] = reply(404, b"<Error><Code>NoSuchUpload</Code></Error>")
    put = worker.http.put(f"{worker.url}{UPLOAD}?uploadId=u&partNumber=1", data=b"x")
    assert put.status_code == 404 and "multipart upload" in put.json()["error"]


def test_files_come_from_the_store(server: ScriptedServer, store: ScriptedServer, worker: OriginalClient) -> None:
    key = "odd/ü +&=100% (1)~:.jpg"
    path = "/prod/download/training-data/odd/%C3%BC%20+&=100%25%20(1)~:.jpg"
    store.objects["/s3"] = b"image" * 200_000
    server.routes["GET", "/prod/download/token"] = reply(200, {"token": "download token", "expires_at": 1})
    server.routes["GET", path] = reply(200, {"url": f"{store.url}/s3?X-Amz-Signature=s", "expires_at": 1})
    assert worker.download("training-data", key) == store.objects["/s3"]
    assert server.seen[-1].query == "as=url" and server.seen[-1].headers["x-download-token"] == "download token"
    assert parse_qs(server.seen[0].query) == {"bucket": ["training-data"], "key": [key]}
    assert len(store.seen) == 1 and not SECRET_HEADERS & set(store.seen[0].headers)


def test_a_download_that_breaks_goes_on_where_it_broke(
    server: ScriptedServer, store: ScriptedServer, worker: OriginalClient
) -> None:
    store.objects["/s3"] = data = bytes(range(256)) * 4000
    server.routes["GET", f"/prod{DOWNLOAD}"] = reply(200, {"url": f"{store.url}/s3", "expires_at": 1})
    store.script("GET", "/s3", truncated(data, 300_000), reset)
    assert worker.http.get(f"{worker.url}{DOWNLOAD}").content == data
    assert store.seen[-1].headers["range"].endswith(f"-{len(data) - 1}") and "if-match" in store.seen[-1].headers


def test_a_token_whose_answer_got_lost_is_replaced(
    server: ScriptedServer, store: ScriptedServer, worker: OriginalClient
) -> None:
    """The first try has used the token up; a worker that receives 401 dies, and its heartbeats go on."""
    store.objects["/s3"] = b"image"
    token = [reply(200, {"token": f"token {number}", "expires_at": 1}) for number in (1, 2)]
    server.script("GET", "/prod/download/token", *token)
    url = reply(200, {"url": f"{store.url}/s3", "expires_at": 1})
    used_up = reply(401, {"error": {"code": "token_invalid"}})
    server.script("GET", "/prod/download/training-data/sub%20dir/%C3%BC.jpg", reset, used_up, url)
    assert worker.download("training-data", "sub dir/ü.jpg") == b"image"
    assert parse_qs(server.seen[0].query) == parse_qs(server.seen[-2].query)
    assert server.seen[-1].headers["x-download-token"] == "token 2"


def test_a_file_that_ends_early_is_no_file(
    server: ScriptedServer, store: ScriptedServer, worker: OriginalClient
) -> None:
    data = b"x" * 600_000
    server.routes["GET", f"/prod{DOWNLOAD}"] = reply(200, {"url": f"{store.url}/s3", "expires_at": 1})
    store.script("GET", "/s3", truncated(data, 300_000), reply(412))
    with pytest.raises(requests.RequestException):
        worker.http.get(f"{worker.url}{DOWNLOAD}")


def test_an_api_that_is_away_is_waited_for(
    server: ScriptedServer, worker: OriginalClient, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker gives its training up six seconds after the first connection that fails."""
    caplog.set_level(logging.INFO)
    limited = reply(429, {"message": "Too Many Requests"}, {"Retry-After": "7"})
    server.script("POST", "/prod/heartbeat/1", reset, limited, reply(503), reply(504), reply(200, {"status": "ok"}))
    assert worker.heartbeat("1") == 200
    assert len(server.seen) == 5 and len(time.pauses) == 4 and time.pauses[1] == 7
    assert f"POST {server.url}/prod/heartbeat/1" in caplog.text and "the key" not in caplog.text


def test_an_api_that_stays_away_is_told_as_503(server: ScriptedServer, worker: OriginalClient, time: Time) -> None:
    server.routes["POST", "/prod/heartbeat/1"] = reset
    assert worker.heartbeat("1") == 503
    assert PATIENCE_S - LONGEST_PAUSE_S <= time.now_s <= PATIENCE_S


def test_refusals_of_the_api_pass_at_once(server: ScriptedServer, worker: OriginalClient, time: Time) -> None:
    server.routes["POST", "/prod/heartbeat/1"] = reply(400, {"error": "Job not running"})
    assert worker.heartbeat("1") == 400 and time.pauses == []
    assert len(server.seen) == 1 and b"machine-1" in server.seen[0].body


def test_a_redirect_of_the_api_is_not_passed_on(server: ScriptedServer, worker: OriginalClient) -> None:
    """The worker would follow it with its key."""
    with ScriptedServer() as elsewhere:
        server.routes["POST", "/prod/heartbeat/1"] = reply(307, b"", {"Location": elsewhere.url})
        assert worker.heartbeat("1") == 502
        assert elsewhere.seen == []


def test_a_worker_that_is_killed_in_the_middle_of_a_part_leaves_nothing(
    server: ScriptedServer, store: ScriptedServer, relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    server.routes["POST", f"/prod{UPLOAD}"] = reply(200, {"url": f"{store.url}/s3?partNumber=1", "expires_at": 1})
    store.routes["PUT", "/s3"] = stored
    connection = http.client.HTTPConnection(urlsplit(relay.url).netloc)
    connection.putrequest("PUT", f"{UPLOAD}?uploadId=u&partNumber=1")
    connection.putheader("Content-Length", "1000000")
    connection.endheaders(b"x" * 500_000)
    connection.close()
    store.settle()
    assert requests.get(f"{relay.url}/health", timeout=30).status_code == 404, "the relay goes on"
    assert store.objects == {} and "Traceback" not in caplog.text


def test_a_body_without_a_length_is_refused(relay: Relay) -> None:
    answer = requests.put(f"{relay.url}{UPLOAD}", data=iter([b"x"]), timeout=30)
    assert answer.status_code == 411 and "Content-Length" in answer.json()["error"]
