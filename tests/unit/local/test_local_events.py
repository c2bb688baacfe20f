"""Test the conversion between HTTP and payload 2.0: documented fields, encodings, bodies, answers."""

from __future__ import annotations

import base64
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functions.local.gateway.lambda_events import (
    BadAnswerError,
    HttpRequest,
    HttpResponse,
    RoutePattern,
    authorizer_event,
    common_fields,
    decode_path,
    function_event,
    http_response,
)
from functions.local.lambda_context import new_request_id

# AWS, "Create AWS Lambda proxy integrations for HTTP APIs", payload format 2.0; stage variables and client
# certificates, which we do not have, left out.
DOCUMENTED_FIELDS = {
    "version",
    "routeKey",
    "rawPath",
    "rawQueryString",
    "cookies",
    "headers",
    "queryStringParameters",
    "requestContext",
    "body",
    "pathParameters",
    "isBase64Encoded",
}
DOCUMENTED_CONTEXT = {
    "accountId",
    "apiId",
    "authorizer",
    "domainName",
    "domainPrefix",
    "http",
    "requestId",
    "routeKey",
    "stage",
    "time",
    "timeEpoch",
}


def request(**changes: Any) -> HttpRequest:
    values: dict[str, Any] = {
        "method": "POST",
        "raw_path": "/my/path",
        "raw_query": "parameter1=value1&parameter1=value2&parameter2=value",
        "headers": [
            ("Host", "127.0.0.1:8000"),
            ("Header1", "value1"),
            ("Header2", "value1"),
            ("header2", "value2"),
            ("Cookie", "cookie1=1; cookie2=2"),
            ("Cookie", "cookie3"),
            ("User-Agent", "agent"),
            ("Content-Type", "application/json"),
        ],
        "body": b'{"a": "\xc3\xbc"}',
        "source_ip": "127.0.0.1",
    }
    return HttpRequest(**{**values, **changes})


def fields(**changes: Any) -> dict[str, Any]:
    incoming = request(**changes)
    path = decode_path(incoming.raw_path)
    # 12/Mar/2020:19:03:58 is the documentation's moment.
    return common_fields(incoming, "POST /my/{p}", path, {"p": "path"}, request_id="id", now_s=1583348638.390)


def test_the_documented_example() -> None:
    event = function_event(fields(), request().body, {"tenant": "t", "scopes": "submit,worker"})
    assert set(event) == DOCUMENTED_FIELDS
    assert set(event["requestContext"]) == DOCUMENTED_CONTEXT
    assert event["version"] == "2.0"
    assert event["routeKey"] == event["requestContext"]["routeKey"] == "POST /my/{p}"
    assert event["rawPath"] == "/my/path"
    assert event["rawQueryString"] == "parameter1=value1&parameter1=value2&parameter2=value"
    assert event["cookies"] == ["cookie1=1", "cookie2=2", "cookie3"]
    assert event["headers"] == {
        "host": "127.0.0.1:8000",
        "header1": "value1",
        "header2": "value1,value2",
        "user-agent": "agent",
        "content-type": "application/json",
        "content-length": "11",
        "x-forwarded-for": "127.0.0.1",
        "x-forwarded-port": "8000",
        "x-forwarded-proto": "http",
    }
    assert event["queryStringParameters"] == {"parameter1": "value1,value2", "parameter2": "value"}
    assert event["pathParameters"] == {"p": "path"}
    assert event["body"] == '{"a": "ü"}'
    assert event["isBase64Encoded"] is False
    context = event["requestContext"]
    assert context["http"] == {
        "method": "POST",
        "path": "/my/path",
        "protocol": "HTTP/1.1",
        "sourceIp": "127.0.0.1",
        "userAgent": "agent",
    }
    assert context["authorizer"] == {"lambda": {"tenant": "t", "scopes": "submit,worker"}}
    assert context["stage"] == "$default"
    assert context["time"] == "04/Mar/2020:19:03:58 +0000"
    assert context["timeEpoch"] == 1583348638390
    assert context["requestId"] == "id"


def test_what_is_absent_is_left_out() -> None:
    incoming = request(headers=[], raw_query="", body=b"")
    event = function_event(common_fields(incoming, "POST /", "/", {}, request_id="id", now_s=0), b"", None)
    assert set(event) == DOCUMENTED_FIELDS - {"cookies", "queryStringParameters", "pathParameters", "body"}
    assert "authorizer" not in event["requestContext"]
    assert event["headers"]["content-length"] == "0"


def test_the_authorizer_sees_the_request_without_its_body() -> None:
    event = authorizer_event(fields(), "a-key")
    assert (event["version"], event["type"], event["identitySource"]) == ("2.0", "REQUEST", ["a-key"])
    assert event["routeArn"].startswith("arn:aws:execute-api:")
    assert event["routeArn"].endswith("/$default/POST/my/path")
    assert not {"body", "isBase64Encoded"} & set(event)
    assert event["pathParameters"] == {"p": "path"}


@pytest.mark.parametrize(
    ("content_type", "text"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("text/plain", True),
        ("application/xml", True),
        ("application/javascript", True),
        ("application/octet-stream", False),
        ("application/x-www-form-urlencoded", False),
        ("application/problem+json", False),
        ("", False),
    ],
)
def test_only_some_content_types_come_as_text(content_type: str, text: bool) -> None:
    headers = [("content-type", content_type)] if content_type else []
    event = function_event(fields(headers=headers), b"abc", None)
    assert event["isBase64Encoded"] is not text
    assert event["body"] == ("abc" if text else base64.b64encode(b"abc").decode())


@pytest.mark.parametrize(
    ("raw", "decoded"),
    [
        ("/a/b", "/a/b"),
        ("/a%20b", "/a b"),
        ("/a+b", "/a+b"),
        ("/a%2Bb", "/a+b"),
        ("/a%3Ab:c", "/a:b:c"),
        ("/%C3%BC%E2%82%AC", "/ü€"),
        ("/a%2Fb", "/a/b"),
        ("/a%252Fb", "/a%252Fb"),
        ("/100%25", "/100%25"),
        ("/%C3%BC%25%C3%BC", "/ü%25ü"),
        ("/%25%25", "/%25%25"),
        ("/a%3Fb", "/a"),
        ("/a%23b", "/a#b"),
        ("/a%zz%", "/a%zz%"),
        ("/%FF", "/�"),
        ("/a//b/", "/a//b/"),
        ("/a/../b", "/a/../b"),
    ],
)
def test_paths_are_decoded_as_the_gateway_does(raw: str, decoded: str) -> None:
    assert decode_path(raw) == decoded


@pytest.mark.parametrize(
    ("raw", "joined"),
    [
        ("a=1&a=2&b=", {"a": "1,2", "b": ""}),
        ("a=x+y%20z%2Bw", {"a": "x y z+w"}),
        ("key=a%2Fb%3A%C3%BC", {"key": "a/b:ü"}),
        ("flag", {"flag": ""}),
        ("a=%FF", {"a": "�"}),
    ],
)
def test_queries_are_decoded_as_forms(raw: str, joined: dict[str, str]) -> None:
    found = fields(raw_query=raw)
    assert found["queryStringParameters"] == joined
    assert found["rawQueryString"] == raw


def test_an_empty_query_has_no_parameters() -> None:
    assert "queryStringParameters" not in fields(raw_query="")


@pytest.mark.parametrize(
    ("route", "path", "parameters"),
    [
        ("/job/{id}/stop", "/job/7/stop", {"id": "7"}),
        ("/job/{id}/stop", "/job/7/x/stop", None),
        ("/job/{id}/stop", "/job//stop", None),
        ("/jobs", "/jobs", {}),
        ("/jobs", "/jobs/", None),
        ("/jobs", "/Jobs", None),
        ("/download/{bucket}/{key+}", "/download/b/a/b c:ü\n", {"bucket": "b", "key": "a/b c:ü\n"}),
        ("/download/{bucket}/{key+}", "/download/b/a/", {"bucket": "b", "key": "a/"}),
        ("/download/{bucket}/{key+}", "/download/b//", {"bucket": "b", "key": "/"}),
        ("/download/{bucket}/{key+}", "/download/b/", None),
        ("/x/{job-id}.json", "/x/1.json", {"job-id": "1"}),
        ("/x/{job-id}.json", "/x/1zjson", None),
    ],
)
def test_routes_match(route: str, path: str, parameters: dict[str, str] | None) -> None:
    assert RoutePattern.parse(route).match(path) == parameters


@pytest.mark.parametrize("route", ["jobs", "/a/{key+}/b", "/a/{key+}{b}"])
def test_malformed_routes_are_refused(route: str) -> None:
    with pytest.raises(ValueError, match="route path"):
        RoutePattern.parse(route)


def test_an_answer_becomes_a_response() -> None:
    answer = {
        "statusCode": 201,
        "headers": {"Location": "/x", "Retry-After": 3, "X-Flag": True},
        "cookies": ["a=1", "b=2"],
        "body": "ü",
    }
    assert http_response(answer) == HttpResponse(
        201,
        [
            ("location", "/x"),
            ("retry-after", "3"),
            ("x-flag", "true"),
            ("content-type", "application/json"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
        ],
        "ü".encode(),
    )


def test_a_binary_answer_is_decoded() -> None:
    answer = {
        "statusCode": 200,
        "headers": {"content-type": "image/png"},
        "body": base64.b64encode(b"\x00\xff").decode(),
        "isBase64Encoded": True,
    }
    assert http_response(answer) == HttpResponse(200, [("content-type", "image/png")], b"\x00\xff")


def test_an_answer_without_status_is_the_body_of_a_200() -> None:
    assert http_response({"a": 1}) == HttpResponse(200, [("content-type", "application/json")], b'{"a": 1}')


@pytest.mark.parametrize(
    "answer",
    [
        {"statusCode": 200, "body": {"a": 1}},
        {"statusCode": "200"},
        {"statusCode": True},
        {"statusCode": 99},
        {"statusCode": 200, "body": "%", "isBase64Encoded": True},
        {"statusCode": 200, "headers": {"x": ["a"]}},
        {"statusCode": 200, "headers": {"x": "€"}},
        {"statusCode": 200, "headers": {"x": "a\r\ny: b"}},
        {"statusCode": 200, "body": Decimal(1)},
        {"a": Decimal(1)},
        {"statusCode": 200, "body": b"x"},
    ],
)
def test_answers_that_the_gateway_refuses(answer: dict[str, Any]) -> None:
    with pytest.raises(BadAnswerError):
        http_response(answer)


def test_request_ids_look_like_the_gateways() -> None:
    made = {new_request_id() for _ in range(100)}
    assert len(made) == 100
    assert {len(one) for one in made} == {16}


@given(st.binary(max_size=20), st.text(max_size=20))
def test_no_path_or_query_breaks_it(path: bytes, query: str) -> None:
    raw = "/" + "".join(f"%{byte:02x}" if byte % 3 else chr(byte) for byte in path)
    assert "?" not in decode_path(raw)
    fields(raw_path=raw, raw_query=query)
