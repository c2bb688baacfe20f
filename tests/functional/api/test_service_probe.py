"""The sweeper's probe: any failing part on the path of a heartbeat counts as an outage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from functions.api.operations.service_probe import PROBED_PATH, probe_api
from functions.domain.errors import StorageUnavailable
from tests.kits.api.harness import Answer, Api


@contextmanager
def served(answer: Callable[[str, str, dict[str, str]], Answer]) -> Iterator[str]:
    """Serve `answer(method, path, headers)`; yield the origin."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = answer(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(given.status)
            self.send_header("content-length", str(len(given.text)))
            self.end_headers()
            self.wfile.write(given.text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_api_that_refuses_an_unknown_key_answers_and_each_probe_has_another_key(api: Api) -> None:
    seen: list[tuple[str, str, str]] = []

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        seen.append((method, path, headers["x-api-key"]))
        return api.request(method, path, headers=headers)

    with served(answer) as origin, api.unchanged():
        assert probe_api(origin + PROBED_PATH)
        assert probe_api(origin + PROBED_PATH)
    assert [call[:2] for call in seen] == 2 * [("POST", PROBED_PATH)]
    assert len({key for _, _, key in seen}) == 2


def test_an_outage_of_the_table_of_keys_is_seen(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: str) -> None:
        raise StorageUnavailable("throttled")

    monkeypatch.setattr(api.context.tokens, "get_key", away)
    with served(lambda method, path, headers: api.request(method, path, headers=headers)) as origin:
        assert not probe_api(origin + PROBED_PATH)


GATEWAY = {
    "the function is throttled": Answer(503, {}, '{"message":"Service Unavailable"}'),
    "the authorizer fails": Answer(500, {}, '{"message":"Internal Server Error"}'),
    "a firewall refuses": Answer(403, {}, '{"message":"Forbidden"}'),
    "the stage is throttled": Answer(429, {}, '{"message":"Too Many Requests"}'),
    "there is no route": Answer(404, {}, '{"message":"Not Found"}'),
    "another page": Answer(200, {}, "<html>"),
    "another list": Answer(403, {}, "[]"),
}


@pytest.mark.parametrize("trouble", GATEWAY)
def test_what_a_gateway_says_without_the_function_of_heartbeats_is_no_answer(api: Api, trouble: str) -> None:
    """`/health` is served by another function, and goes on answering."""

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        if path.startswith("/heartbeat/"):
            return GATEWAY[trouble]
        return api.request(method, path, headers=headers)

    with served(answer) as origin:
        assert not probe_api(origin + PROBED_PATH)


def test_an_api_that_cannot_be_reached_does_not_answer() -> None:
    with served(lambda *_: Answer(200, {}, "")) as origin:
        pass
    assert not probe_api(origin + PROBED_PATH)
    assert probe_api(None)
