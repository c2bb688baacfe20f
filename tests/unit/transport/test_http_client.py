"""Calls to the control plane: tries, waits, budgets, errors, and what never leaves."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_client.transport.api.http import Call, HttpClient
from gpu_client.transport.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    LeaseLost,
    Unauthorized,
    UnexpectedAnswer,
    Unreachable,
)
from gpu_client.transport.retry import RetryPolicy
from tests.kits.clock import Clock
from tests.unit.transport.scripted_server import ScriptedServer, reply, reset, truncated

KEY = "baton_k1_verysecretvalue"
POST = Call(kind="complete", method="POST", path="/complete", body="{}")
OK = reply(200, {"status": "ok"})


@pytest.fixture
def time() -> Clock:
    return Clock()


@pytest.fixture
def client(server: ScriptedServer, time: Clock) -> Iterator[HttpClient]:
    made = HttpClient(
        server.url,
        KEY,
        policy=RetryPolicy(max_tries=6, budget_s=60),
        read_timeout_s=5,
        sleep=time.sleep,
        clock=time,
        draw=lambda: 1.0,
    )
    yield made
    made.close()


def test_an_answer_and_the_headers_it_took(server: ScriptedServer, client: HttpClient) -> None:
    server.script("POST", "/complete", OK)
    assert client.call(POST).data == {"status": "ok"}
    headers = server.seen[0].headers
    assert headers["x-api-key"] == KEY
    assert headers["user-agent"].startswith("baton/")
    assert headers["content-type"] == "application/json"
    assert "authorization" not in headers


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_posts_are_retried_on_server_errors(
    server: ScriptedServer, client: HttpClient, time: Clock, status: int
) -> None:
    """Regression (Dreambooth worker): its heartbeats, completes and fails were not retried on 5xx, being POSTs."""
    server.script("POST", "/complete", reply(status, {"message": "no"}), reply(status, b"<html>"), OK)
    assert client.call(POST).data == {"status": "ok"}
    assert time.slept == [0.5, 1.0]
    assert client.stats.requests == {"complete": 3}
    assert client.stats.retries == {"complete": 2}


def test_a_timeout_that_something_in_between_answers_with_is_no_refusal(
    server: ScriptedServer, client: HttpClient, time: Clock
) -> None:
    """A load balancer's 408 failed the job, as if the job were wrong."""
    server.script("POST", "/complete", reply(408, b"<html>Request Timeout</html>"), OK)
    assert client.call(POST).data == {"status": "ok"}
    server.routes["POST", "/complete"] = reply(408)
    with pytest.raises(Unreachable):
        client.call(POST)


def test_an_answer_that_is_not_our_apis_says_so(server: ScriptedServer, client: HttpClient) -> None:
    server.script("POST", "/complete", reply(403, b"<html>Forbidden</html>"))
    with pytest.raises(ApiError) as caught:
        client.call(POST)
    assert caught.value.foreign
    server.script("POST", "/complete", reply(409, {"error": {"code": "lease_lost", "message": "gone"}}))
    with pytest.raises(ApiError) as caught:
        client.call(POST)
    assert not caught.value.foreign


def test_a_failing_call_is_never_repeated_without_a_pause(
    server: ScriptedServer, client: HttpClient, time: Clock
) -> None:
    """Regression (Dreambooth worker): its heartbeat loop repeated other errors than 400 without sleeping."""
    server.routes["POST", "/complete"] = reply(500)
    with pytest.raises(Unreachable, match="after 6 tries"):
        client.call(POST)
    assert time.slept == [0.5, 1, 2, 4, 8]


def test_nobody_there_is_said_in_the_system_s_words(time: Clock) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(Unreachable) as caught:
            HttpClient(url, KEY, policy=RetryPolicy(max_tries=1, budget_s=60), sleep=time.sleep).call(POST)
    assert str(caught.value) == (
        f"complete: no usable answer from {url} after 1 try in 0 s (last: ConnectionError: Connection refused)"
    )


def test_a_connection_blip_is_survived(server: ScriptedServer, client: HttpClient, time: Clock) -> None:
    """Regression (Dreambooth worker): a blip of the connection ended a healthy job."""
    server.script("POST", "/complete", reset, truncated(b'{"status": "ok"}', 5), reset, OK)
    assert client.call(POST).data == {"status": "ok"}
    assert len(time.slept) == 3


def test_refusals_are_not_repeated(server: ScriptedServer, client: HttpClient, time: Clock) -> None:
    """Regression (Kelpie worker): it repeated every answer that was not 2xx, 4xx too."""
    server.script("POST", "/complete", reply(409, {"error": {"code": "lease_lost", "message": "gone"}}))
    with pytest.raises(LeaseLost):
        client.call(POST)
    assert (len(server.seen), time.slept) == (1, [])
    assert client.stats.refusals == {"lease_lost": 1}


def test_retry_after_is_obeyed(server: ScriptedServer, client: HttpClient, time: Clock) -> None:
    server.script("POST", "/complete", reply(429, b"{}", {"Retry-After": "7"}), OK)
    client.call(POST)
    assert time.slept == [7]


def test_the_budget_of_a_call_bounds_it(server: ScriptedServer, client: HttpClient, time: Clock) -> None:
    server.routes["POST", "/complete"] = reply(503)
    with pytest.raises(Unreachable):
        client.call(POST, budget_s=2)
    assert sum(time.slept) <= 2
    time.slept.clear()
    server.script("POST", "/complete", reply(503, b"", {"Retry-After": "600"}))
    with pytest.raises(Unreachable):
        client.call(POST)
    assert time.slept == []


def test_nobody_there_is_unreachable(time: Clock) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = HttpClient(f"http://127.0.0.1:{taken.getsockname()[1]}", KEY, sleep=time.sleep, clock=time)
        with pytest.raises(Unreachable, match="complete: no usable answer"):
            client.call(POST, budget_s=3)
        client.close()


def test_a_page_with_status_200_is_not_an_answer(server: ScriptedServer, client: HttpClient) -> None:
    """A captive portal says 200 to everything."""
    server.script("POST", "/complete", reply(200, b"<html>Welcome to the hotel</html>"), OK)
    assert client.call(POST).data == {"status": "ok"}
    server.routes["POST", "/complete"] = reply(200, b"<html>Welcome to the hotel</html>")
    with pytest.raises(Unreachable, match="Welcome to the hotel"):
        client.call(POST)


def test_an_unrepeatable_call_is_sent_once(server: ScriptedServer, client: HttpClient) -> None:
    once = Call(kind="create_key", method="POST", path="/keys", body="{}", repeatable=False)
    server.routes["POST", "/keys"] = reply(503)
    with pytest.raises(Unreachable):
        client.call(once)
    assert len(server.seen) == 1
    server.script("POST", "/keys", reply(429), OK)
    assert client.call(once).data == {"status": "ok"}


def test_a_conflict_is_repeated_and_raised_as_itself(server: ScriptedServer, client: HttpClient) -> None:
    server.routes["POST", "/complete"] = reply(409, {"error": {"code": "conflict", "message": "at once"}})
    with pytest.raises(Conflict):
        client.call(POST)
    assert len(server.seen) == 6


def test_a_refusal_says_whether_an_earlier_try_may_have_worked(server: ScriptedServer, client: HttpClient) -> None:
    refusal = reply(409, {"error": {"code": "job_canceled", "message": "was"}})
    server.script("POST", "/complete", reset, refusal, refusal)
    with pytest.raises(LeaseLost) as caught:
        client.call(POST)
    assert caught.value.after_retry
    with pytest.raises(LeaseLost) as caught:
        client.call(POST)
    assert not caught.value.after_retry


def test_redirects_are_not_followed(server: ScriptedServer, client: HttpClient) -> None:
    """The key is for the configured URL only."""
    with ScriptedServer() as other:
        server.script("POST", "/complete", reply(302, b"", {"Location": other.url + "/x"}))
        with pytest.raises(UnexpectedAnswer, match="redirect"):
            client.call(POST)
        assert other.seen == []


def test_the_key_is_shown_nowhere(server: ScriptedServer, client: HttpClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server.script("POST", "/complete", reset, reply(503), reply(403, {"message": "Forbidden"}))
    with pytest.raises(Unauthorized) as caught:
        client.call(POST)
    assert "verysecret" not in caplog.text + repr(client) + str(caught.value) + repr(caught.value)
    assert "trying again" in caplog.text


def test_no_cookies_and_no_netrc(
    server: ScriptedServer, client: HttpClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    server.script("POST", "/complete", reply(200, b"{}", {"Set-Cookie": "a=b"}), OK)
    client.call(POST)
    client.call(POST)
    assert "cookie" not in server.seen[1].headers
    assert "authorization" not in server.seen[1].headers


def test_an_endless_answer_is_cut_off(
    server: ScriptedServer, client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_client.transport.api.http.MAX_ANSWER_BYTES", 1000)
    server.script("POST", "/complete", reply(200, b"x" * 1001))
    with pytest.raises(UnexpectedAnswer, match="more than 1000 bytes"):
        client.call(POST)


def test_a_server_that_drips_is_a_timeout(server: ScriptedServer, client: HttpClient, time: Clock) -> None:
    def drip(handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "3")
        handler.end_headers()
        time.now += 61
        handler.wfile.write(b"{")
        handler.close_connection = True

    server.script("POST", "/complete", drip)
    with pytest.raises(Unreachable, match="ReadTimeout"):
        client.call(POST)
    assert len(server.seen) == 1


def test_a_whole_answer_is_used_however_late(server: ScriptedServer, client: HttpClient, time: Clock) -> None:
    def late(handler) -> None:
        time.now += 61
        handler.answer(200, b"{}")

    server.script("POST", "/complete", late)
    assert client.call(POST).data == {}


def test_an_empty_answer_has_no_data(server: ScriptedServer, client: HttpClient) -> None:
    server.script("POST", "/complete", reply(200))
    assert client.call(POST).data is None


def test_invalid_values_name_the_field(server: ScriptedServer, client: HttpClient) -> None:
    detail = {"code": "invalid_value", "message": "too small", "field": "policy.max_failures"}
    server.script("POST", "/complete", reply(422, {"error": detail}))
    with pytest.raises(InvalidRequest) as caught:
        client.call(POST)
    assert caught.value.field == "policy.max_failures"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org",
        "ftp://x",
        "https://",
        "https://h?x=1",
        "https://me:pw@h",
        "http://h:port",
        "http://h:99999",
        "http://[::1",
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        HttpClient(url, KEY)


@pytest.mark.parametrize("key", ["", " ", "a\nb", "schlüssel"])
def test_what_is_no_key_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ValueError, match="API key") as caught:
        HttpClient("https://h", key)
    assert key.strip() == "" or key not in str(caught.value)
