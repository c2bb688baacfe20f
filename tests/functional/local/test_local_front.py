"""Test the gateway over HTTP: routing, authorizer, errors, encodings, concurrency, stop."""

from __future__ import annotations

import http.client
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from baton.contract.errors import ErrorCode
from functions.local.gateway.http_gateway import (
    BODY_LIMIT_BYTES,
    HANDLER_THREADS,
    GatewayRoute,
    GatewayServer,
    build_gateway,
)
from tests.unit.transport.scripted_server import ScriptedServer, reply

together = threading.Barrier(32)
store = ScriptedServer()
asked: list[str] = []


def echo(event: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"statusCode": 200, "body": json.dumps(event)}


def fails(event: dict[str, Any], context: Any) -> dict[str, Any]:
    raise KeyError("a defect")


def answers_nonsense(event: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"statusCode": 200, "body": {"not": "a string"}}


def redirect(event: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"statusCode": 302, "headers": {"Location": "/ü?a=1"}, "cookies": ["a=1", "b=2"]}


def meets(event: dict[str, Any], context: Any) -> dict[str, Any]:
    together.wait(60)
    return {"statusCode": 200, "body": event["pathParameters"]["id"]}


def about(event: dict[str, Any], context: Any) -> dict[str, Any]:
    known = {
        "name": context.function_name,
        "arn": context.invoked_function_arn,
        "id": context.aws_request_id,
        "memory": context.memory_limit_in_mb,
        "left": context.get_remaining_time_in_millis(),
    }
    return {"statusCode": 200, "body": json.dumps(known)}


def authorize(event: dict[str, Any], context: Any) -> dict[str, Any]:
    (key,) = event["identitySource"]
    asked.append(key)
    if key == "broken":
        raise RuntimeError("the table is away")
    scopes = "worker,submit" if key == "original" else "worker"
    return {"isAuthorized": key != "refused", "context": {"tenant": f"tenant of {key}", "scopes": scopes}}


def transfers(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """Fake transfer function: receives neither bytes nor a redirect, and signs URLs of the store."""
    given = event.get("queryStringParameters") or {}
    assert "body" not in event and event["requestContext"]["authorizer"]["lambda"]["tenant"]
    if event["pathParameters"]["key"] == "refused":
        return {"statusCode": 401, "body": json.dumps({"error": "token"})}
    if event["routeKey"].startswith("POST"):
        assert (given["action"], given["uploadId"]) == ("mpu-presign", "u")
        return {"statusCode": 200, "body": json.dumps({"url": f"{store.url}/s3?part={given['partNumber']}"})}
    assert given == {"as": "url"}
    return {"statusCode": 200, "body": json.dumps({"url": f"{store.url}/s3"})}


ROUTES = [
    GatewayRoute("GET", "/download/{bucket}/{key+}", transfers, True),
    GatewayRoute("PUT", "/upload/{bucket}/{key+}", transfers, True),
    GatewayRoute("GET", "/files/{bucket}/{key+}", echo, True),
    GatewayRoute("GET", "/files/{bucket}/about", about, True),
    GatewayRoute("GET", "/job/{id}", echo, True),
    GatewayRoute("POST", "/job/{id}/stop", echo, True),
    GatewayRoute("POST", "/open", echo, False),
    GatewayRoute("GET", "/fails", fails, False),
    GatewayRoute("GET", "/nonsense", answers_nonsense, False),
    GatewayRoute("GET", "/redirect", redirect, False),
    GatewayRoute("GET", "/meet/{id}", meets, False),
]


@pytest.fixture(scope="module")
def server() -> Iterator[GatewayServer]:
    with store, GatewayServer(build_gateway(ROUTES, authorize)) as running:
        yield running


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.getheaders()
        self.body = response.read()

    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


def call(
    server: GatewayServer, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> Answer:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    try:
        connection.request(method, target, body, {"x-api-key": "k"} if headers is None else headers)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def test_a_guarded_route_gets_what_the_authorizer_said(server: GatewayServer) -> None:
    answer = call(server, "GET", "/job/7?a=1&a=2")
    assert answer.status == 200
    event = answer.json()
    assert event["routeKey"] == "GET /job/{id}"
    assert event["pathParameters"] == {"id": "7"}
    assert event["queryStringParameters"] == {"a": "1,2"}
    assert event["requestContext"]["authorizer"] == {"lambda": {"tenant": "tenant of k", "scopes": "worker"}}
    assert answer.header("apigw-requestid") == [event["requestContext"]["requestId"]]
    assert answer.header("content-type") == ["application/json"]


def test_without_a_key_nobody_is_asked(server: GatewayServer) -> None:
    asked.clear()
    for headers in ({}, {"x-api-key": ""}):
        answer = call(server, "GET", "/job/7", headers=headers)
        assert answer.status == 401
        error = answer.json()["error"]
        assert (error["code"], error["field"]) == ("unauthorized", "x-api-key")
        assert [error["request_id"]] == answer.header("apigw-requestid")
        assert error["message"] == f"{ErrorCode.UNAUTHORIZED.meaning} {ErrorCode.UNAUTHORIZED.remedy}"
    assert asked == []


def test_an_open_route_needs_no_key(server: GatewayServer) -> None:
    asked.clear()
    event = call(server, "POST", "/open", b"{}", {"content-type": "application/json"}).json()
    assert event["body"] == "{}"
    assert "authorizer" not in event["requestContext"]
    assert asked == []


def test_the_authorizers_refusal_and_failure_are_the_gateways_errors(
    server: GatewayServer, caplog: pytest.LogCaptureFixture
) -> None:
    refused = call(server, "GET", "/job/7", headers={"x-api-key": "refused"})
    assert (refused.status, refused.json()) == (403, {"message": "Forbidden"})
    with caplog.at_level(logging.ERROR):
        broken = call(server, "GET", "/job/7", headers={"x-api-key": "broken"})
    assert (broken.status, broken.json()) == (500, {"message": "Internal Server Error"})
    assert "the table is away" in caplog.text


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/unknown"), ("DELETE", "/job/7"), ("GET", "/job/7/"), ("HEAD", "/job/7"), ("POST", "/")],
)
def test_unknown_routes_are_404(server: GatewayServer, method: str, path: str) -> None:
    answer = call(server, method, path)
    assert answer.status == 404
    if method != "HEAD":
        error = answer.json()["error"]
        assert error["code"] == "not_found"
        assert error["message"] == f"No route {method} {path}. {ErrorCode.NOT_FOUND.remedy}"


@pytest.mark.parametrize("path", ["/fails", "/nonsense"])
def test_a_handlers_failure_is_a_500_and_logged(
    server: GatewayServer, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    with caplog.at_level(logging.ERROR):
        answer = call(server, "GET", path)
    assert (answer.status, answer.json()) == (500, {"message": "Internal Server Error"})
    assert "Traceback" in caplog.text
    assert call(server, "POST", "/open", b"").status == 200


@pytest.mark.parametrize(
    ("target", "key"),
    [
        ("/files/b/a/b", "a/b"),
        ("/files/b/a%2Fb", "a/b"),
        ("/files/b/a%20b%3Ac:d", "a b:c:d"),
        ("/files/b/%C3%BC/%E2%82%AC", "ü/€"),
        ("/files/b/a+b", "a+b"),
        ("/files/b/a%25b", "a%25b"),
        ("/files/b/folder/", "folder/"),
        ("/files/b/a//b", "a//b"),
        ("/files/b/../c", "../c"),
        ("/files/b/" + "x" * 1024, "x" * 1024),
        ("/files/b/about/it", "about/it"),
    ],
)
def test_keys_arrive_as_the_gateway_delivers_them(server: GatewayServer, target: str, key: str) -> None:
    event = call(server, "GET", target).json()
    assert event["pathParameters"] == {"bucket": "b", "key": key}
    assert event["rawPath"] == f"/files/b/{key}"


def test_the_more_specific_route_wins(server: GatewayServer) -> None:
    known = call(server, "GET", "/files/b/about").json()
    assert known["name"] == "about"
    assert known["arn"].endswith(":about")
    assert 0 < known["left"] <= 30_000
    assert known["id"]
    assert known["memory"] > 0


def test_redirects_and_cookies_go_out(server: GatewayServer) -> None:
    answer = call(server, "GET", "/redirect")
    assert answer.status == 302
    assert answer.header("location") == ["/ü?a=1"]
    assert answer.header("set-cookie") == ["a=1", "b=2"]
    assert answer.header("content-length") == ["0"]


def test_bodies_up_to_the_limit_pass_and_larger_ones_do_not(server: GatewayServer) -> None:
    largest = call(server, "POST", "/open", b"x" * BODY_LIMIT_BYTES, {"content-type": "text/plain"})
    assert largest.status == 200
    assert len(largest.json()["body"]) == BODY_LIMIT_BYTES
    over = call(server, "POST", "/open", b"x" * (BODY_LIMIT_BYTES + 1), {"content-type": "text/plain"})
    assert over.status == 413
    error = over.json()["error"]
    assert error["code"] == "payload_too_large"
    assert str(BODY_LIMIT_BYTES) in error["message"] and ErrorCode.PAYLOAD_TOO_LARGE.remedy in error["message"]


def test_a_part_of_any_size_goes_to_the_store_without_the_senders_headers(server: GatewayServer) -> None:
    secrets = {"x-api-key": "k", "x-upload-token": "t"}
    data = b"x" * (BODY_LIMIT_BYTES + 1)
    store.seen.clear()
    store.script("PUT", "/s3", reply(200, b"", {"ETag": '"of the part"'}))
    answer = call(server, "PUT", "/upload/b/a%20b?uploadId=u&partNumber=7", data, secrets)
    assert (answer.status, answer.json()) == (200, {"etag": "of the part", "partNumber": 7})
    (seen,) = store.seen
    assert seen.body == data and seen.query == "part=7" and not secrets.keys() & seen.headers.keys()
    store.script("PUT", "/s3", reply(404), reply(500))
    codes = [call(server, "PUT", "/upload/b/a?uploadId=u&partNumber=7", b"x").json()["error"]["code"] for _ in range(2)]
    assert codes == ["upload_not_found", "unavailable"]
    assert call(server, "PUT", "/upload/b/refused?uploadId=u&partNumber=7", b"x").status == 401
    assert call(server, "PUT", "/upload/b/a?uploadId=u&partNumber=7", b"x", {}).status == 401
    assert len(store.seen) == 3, "what is refused reaches no store"


def test_a_download_comes_from_the_store(server: GatewayServer) -> None:
    secrets = {"x-api-key": "k", "x-download-token": "t"}
    store.objects["/s3"] = bytes(range(256)) * 50_000
    answer = call(server, "GET", "/download/b/a", headers=secrets)
    assert (answer.status, answer.body) == (200, store.objects["/s3"])
    assert answer.header("content-length") == [str(len(answer.body))] and answer.header("etag")
    assert not secrets.keys() & store.seen[-1].headers.keys()
    assert call(server, "GET", "/download/b/refused").status == 401
    assert call(server, "GET", "/download/b/a?as=url").json() == {"url": f"{store.url}/s3"}
    del store.objects["/s3"]
    assert call(server, "GET", "/download/b/a").json()["error"]["code"] == "object_not_found"


def test_the_stores_failures_reach_clients_of_the_original_in_its_shape(server: GatewayServer) -> None:
    """The original worker reads `error` as text."""
    original = {"x-api-key": "original"}
    store.script("PUT", "/s3", reply(404), reply(500))
    refusals = [call(server, "PUT", "/upload/b/a?uploadId=u&partNumber=7", b"x", original).json() for _ in range(2)]
    refusals.append(call(server, "GET", "/download/b/gone", headers=original).json())
    assert [one["code"] for one in refusals] == ["upload_not_found", "unavailable", "object_not_found"]
    assert all(isinstance(one["error"], str) for one in refusals)
    ours = call(server, "GET", "/download/b/gone", headers={**original, "user-agent": "baton/1"}).json()
    assert ours["error"]["code"] == "object_not_found"


def test_handlers_run_side_by_side(server: GatewayServer) -> None:
    # Each waits for all the others: one at a time, this would never end.
    assert together.parties <= HANDLER_THREADS
    answers: dict[int, bytes] = {}
    threads = [
        threading.Thread(
            target=lambda number=number: answers.update({number: call(server, "GET", f"/meet/{number}").body})
        )
        for number in range(together.parties)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {number: str(number).encode() for number in range(together.parties)}


def test_the_authorizer_is_asked_each_time(server: GatewayServer) -> None:
    asked.clear()
    for key, status in (("one", 200), ("one", 200), ("refused", 403), ("broken", 500), ("one", 200)):
        assert call(server, "GET", "/job/7", headers={"x-api-key": key}).status == status
    assert asked == ["one", "one", "refused", "broken", "one"]


def test_it_answers_what_is_under_way_and_frees_its_port() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(event: dict[str, Any], context: Any) -> dict[str, Any]:
        inside.set()
        assert go_on.wait(60)
        return {"statusCode": 200, "body": "done"}

    server = GatewayServer(build_gateway([GatewayRoute("GET", "/slow", slow, False)], authorize))
    server.start()
    port = urlsplit(server.url).port
    assert port is not None
    answers: list[bytes] = []
    caller = threading.Thread(target=lambda: answers.append(call(server, "GET", "/slow").body))
    caller.start()
    assert inside.wait(60)
    releaser = threading.Timer(0.3, go_on.set)
    releaser.start()
    server.stop()
    caller.join(60)
    assert answers == [b"done"]
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.url
    server.stop()
    with GatewayServer(build_gateway([], authorize), port=port) as again:
        assert urlsplit(again.url).port == port
        with pytest.raises(OSError, match="in use"):
            GatewayServer(build_gateway([], authorize), port=port).start()


def test_repeated_and_malformed_routes_are_refused() -> None:
    with pytest.raises(ValueError, match="GET /job"):
        build_gateway([GatewayRoute("GET", "/job", echo, True), GatewayRoute("GET", "/job", echo, False)], authorize)
    with pytest.raises(ValueError, match="route path"):
        build_gateway([GatewayRoute("GET", "job", echo, True)], authorize)
