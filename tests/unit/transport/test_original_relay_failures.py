"""The relay of original workers while servers fail: what it repeats, for how long, and what it tells the worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import parse_qs

import pytest
import requests

from gpu_client import original_relay
from gpu_client.original_relay import LONGEST_PAUSE_S, PATIENCE_S, Relay, Upstream
from tests.functional.api.original_client import OriginalClient
from tests.unit.transport.relay_kit import DOWNLOAD, UPLOAD, Time, stored
from tests.unit.transport.scripted_server import Act, Handler, ScriptedServer, reply, reset, sends, truncated

PART = f"{UPLOAD}?uploadId=u&partNumber=1"
EXPIRED = reply(401, {"error": "The transfer token is unknown, used up or expired."})
README = Path(__file__).parents[3] / "README.md"
DATA = bytes(range(256)) * 8000
"""A part of several blocks."""


class Signing:
    """The API's part of transfers: no URL is signed twice, and only the newest upload token is taken."""

    def __init__(self, server: ScriptedServer, store: ScriptedServer) -> None:
        self.store = store
        self.urls = 0
        self.tokens = 0
        server.routes["POST", f"/prod{UPLOAD}"] = self.sign
        server.routes["GET", f"/prod{DOWNLOAD}"] = self.sign
        server.routes["GET", "/prod/upload/token"] = server.routes["GET", "/prod/download/token"] = self.grant

    def sign(self, handler: Handler) -> None:
        seen = handler.request_seen
        if seen.headers.get("x-upload-token", f"token {self.tokens}") != f"token {self.tokens}":
            EXPIRED(handler)
        elif "mpu-create" in seen.query:
            handler.answer(200, {"uploadId": "u", "key": "k"})
        elif "mpu-complete" in seen.query:
            handler.answer(200, {"status": "ok"})
        else:
            self.urls += 1
            handler.answer(200, {"url": f"{self.store.url}/s3?partNumber=1&n={self.urls}", "expires_at": 1})

    def grant(self, handler: Handler) -> None:
        self.tokens += 1
        handler.answer(200, {"token": f"token {self.tokens}", "expires_at": 1})


@pytest.fixture
def signing(server: ScriptedServer, store: ScriptedServer) -> Signing:
    return Signing(server, store)


def refusal(status: int, code: str, message: str = "none", key: str = "a.zip") -> Act:
    """Refuse as S3 does, which names the key, too."""
    error = f"<Code>{code}</Code><Message>{message}</Message><Key>{key}</Key><Expires>2026-01-01</Expires>"
    return reply(status, f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{error}</Error>'.encode())


def away(time: Time, until_s: float, then: Act) -> Act:
    """Answer 503 to whole requests until `until_s` on the clock."""

    def act(handler: Handler) -> None:
        (reply(503) if time.now_s < until_s else then)(handler)

    return act


def put(relay: Relay, **headers: str) -> requests.Response:
    """Send a part once: unlike the worker, this client tries nothing again."""
    with requests.Session() as http:
        http.trust_env = False
        return http.put(relay.url + PART, data=DATA, headers={"x-api-key": "the key", **headers}, timeout=60)


def get(relay: Relay) -> requests.Response:
    with requests.Session() as http:
        http.trust_env = False
        headers = {"x-api-key": "the key", "x-download-token": "the worker's"}
        return http.get(relay.url + DOWNLOAD, headers=headers, timeout=60)


def test_a_store_that_is_away_for_minutes_gets_the_part_in_the_end_by_a_fresh_url(
    relay: Relay, server: ScriptedServer, store: ScriptedServer, time: Time, signing: Signing
) -> None:
    """The relay repeats a part for minutes, each time by a fresh URL; the worker itself gives up after six seconds."""
    store.routes["PUT", "/s3"] = away(time, PATIENCE_S - 20, stored)
    answer = put(relay)
    assert (answer.status_code, answer.json()) == (200, {"etag": "etag of 1", "partNumber": 1})
    assert list(store.objects.values()) == [DATA]
    assert len({seen.query for seen in store.seen}) == len(store.seen) == signing.urls > 20


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(reset, id="the answer is lost"),
        pytest.param(refusal(403, "AccessDenied", "Request has expired"), id="the URL has expired"),
        pytest.param(refusal(403, "AccessDenied", "Request is not valid yet"), id="the store's clock is late"),
        pytest.param(refusal(403, "RequestTimeTooSkewed", "The difference ... is too large."), id="the clocks differ"),
        pytest.param(refusal(400, "RequestExpired"), id="another store's word for an expired URL"),
        pytest.param(refusal(403, "ExpiredRequest"), id="a third store's word for an expired URL"),
        pytest.param(refusal(400, "ExpiredToken"), id="the signer's token has expired"),
        pytest.param(refusal(400, "TokenRefreshRequired"), id="the signer's token needs a renewal"),
        pytest.param(refusal(400, "RequestTimeout"), id="the store waited for bytes"),
        pytest.param(refusal(400, "IncompleteBody"), id="the store missed bytes"),
        pytest.param(refusal(400, "ThrottlingException"), id="the store's keys are throttled"),
        pytest.param(refusal(503, "SlowDown"), id="the store is overloaded"),
        pytest.param(reply(403, b"<html>Forbidden</html>"), id="no code of a store"),
        pytest.param(reply(200), id="no ETag"),
        pytest.param(reply(500), id="the store failed"),
    ],
)
def test_a_part_that_fails_is_sent_again_by_a_fresh_url(
    relay: Relay, store: ScriptedServer, time: Time, signing: Signing, failure: Act
) -> None:
    store.routes["PUT", "/s3"] = stored
    store.script("PUT", "/s3", failure)
    assert put(relay).status_code == 200
    assert signing.urls == len(store.seen) == 2 and len(time.pauses) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "EntityTooLarge"),
        (400, "InvalidArgument"),
        (403, "AccessDenied"),
        (403, "InvalidAccessKeyId"),
        (403, "QuotaExceeded"),
        (403, "SignatureDoesNotMatch"),
    ],
)
def test_a_part_that_the_store_refuses_for_good_is_refused_at_once(
    worker: OriginalClient, store: ScriptedServer, time: Time, signing: Signing, status: int, code: str
) -> None:
    """The relay answers a final refusal of the store with 403, because the worker repeats a part after a 400."""
    store.routes["PUT", "/s3"] = refusal(status, code, "This is why.", key="expired/a.zip")
    answer = worker.http.put(worker.url + PART, data=DATA)
    assert answer.status_code == 403 and f"{status} {code}: This is why." in answer.json()["error"]
    assert time.pauses == [] and len(store.seen) == signing.urls == 1


def test_a_download_that_the_store_refuses_for_good_is_refused_at_once(
    relay: Relay, store: ScriptedServer, time: Time, signing: Signing
) -> None:
    store.routes["GET", "/s3"] = refusal(403, "AccessDenied", "Access Denied")
    answer = get(relay)
    assert answer.status_code == 403 and "403 AccessDenied: Access Denied" in answer.json()["error"]
    assert time.pauses == [] and len(store.seen) == 1


def test_a_refusal_that_breaks_off_is_asked_for_again(
    relay: Relay, store: ScriptedServer, time: Time, signing: Signing
) -> None:
    store.objects["/s3"] = DATA
    store.script("GET", "/s3", lambda handler: handler.answer(403, b"<Error><Code>AccessDenied</Code>", sent=20))
    assert get(relay).content == DATA and len(time.pauses) == 1


def test_patience_is_for_the_signing_and_the_sending_together(
    relay: Relay, server: ScriptedServer, store: ScriptedServer, time: Time, signing: Signing
) -> None:
    server.routes["POST", f"/prod{UPLOAD}"] = away(time, 200, signing.sign)
    store.routes["PUT", "/s3"] = reply(503)
    answer = put(relay)
    assert answer.status_code == 503 and "status 503" in answer.json()["error"]
    assert PATIENCE_S - LONGEST_PAUSE_S <= time.now_s <= PATIENCE_S


def test_a_download_waits_for_the_store_with_a_fresh_token(
    relay: Relay, server: ScriptedServer, store: ScriptedServer, time: Time, signing: Signing
) -> None:
    """The failed try has used the worker's token up."""
    server.script("GET", f"/prod{DOWNLOAD}", signing.sign, EXPIRED)
    store.script("GET", "/s3", reply(403))
    store.objects["/s3"] = DATA
    assert get(relay).content == DATA
    assert signing.tokens == 1 and signing.urls == len(store.seen) == 2


def test_a_download_outlives_its_url(
    relay: Relay, server: ScriptedServer, store: ScriptedServer, time: Time, signing: Signing
) -> None:
    """A download completes, although its connection breaks twice and its URL expires in between."""
    store.objects["/s3"] = DATA
    store.script("GET", "/s3", truncated(DATA, 600_000), reply(403), sends(DATA, sent=0), reset)
    assert get(relay).content == DATA
    assert len({seen.query for seen in store.seen}) == len(store.seen) == 5


def test_patience_with_a_download_starts_anew_with_each_byte(
    relay: Relay, store: ScriptedServer, time: Time, signing: Signing
) -> None:
    def hang(handler: Handler) -> None:
        time.sleep(PATIENCE_S - LONGEST_PAUSE_S)
        reply(503)(handler)

    store.objects["/s3"] = DATA
    some = sends(DATA, sent=500_000)
    store.script("GET", "/s3", reply(503), hang, some, reply(503), hang, some)
    assert get(relay).content == DATA and time.now_s > PATIENCE_S
    store.script("GET", "/s3", some)
    store.routes["GET", "/s3"] = hang
    with pytest.raises(requests.RequestException):
        get(relay)
    assert len(store.seen) == 7 + 3, "none of two hanging tries after the first bytes brought another"


@pytest.mark.parametrize(
    ("method", "action"),
    [
        ("POST", "mpu-create"),
        ("POST", "mpu-complete&uploadId=u"),
        ("DELETE", "mpu-abort&uploadId=u"),
        ("PUT", "mpu-uploadpart&uploadId=u&partNumber=1"),
    ],
)
def test_an_upload_token_that_ran_out_is_renewed(
    relay: Relay, server: ScriptedServer, store: ScriptedServer, signing: Signing, method: str, action: str
) -> None:
    """An upload may take longer than the 900 s of its token; the worker asks for one alone."""
    server.routes["DELETE", f"/prod{UPLOAD}"] = signing.sign
    store.routes["PUT", "/s3"] = stored
    headers = {"x-api-key": "the key", "x-upload-token": "the worker's"}
    url = f"{relay.url}{UPLOAD}?action={action}"
    assert requests.request(method, url, data=b"x", headers=headers, timeout=30).status_code == 200
    first, asked, again = server.seen
    assert (first.query, first.body) == (again.query, again.body)
    assert parse_qs(asked.query) == {"bucket": ["training-checkpoints"], "key": ["jobs/1/a.zip"]}
    assert {seen.headers["x-api-key"] for seen in server.seen} == {"the key"}


def test_a_renewed_token_serves_the_rest_of_its_upload(
    relay: Relay, server: ScriptedServer, store: ScriptedServer, signing: Signing
) -> None:
    store.routes["PUT", "/s3"] = stored
    for _ in range(3):
        assert put(relay, **{"x-upload-token": "the worker's"}).status_code == 200
    assert signing.tokens == 1 and len(server.seen) == 5
    signing.tokens += 1  # the renewed one has run out, too
    assert put(relay, **{"x-upload-token": "the worker's"}).status_code == 200
    assert signing.tokens == 3


@pytest.mark.parametrize("status", [401, 409])
def test_a_refusal_of_another_token_is_the_worker_s_answer(
    relay: Relay, server: ScriptedServer, time: Time, status: int
) -> None:
    """The relay hands a refusal of a new token (wrong key, lost job) to the worker unchanged."""
    refusal = {"error": "why", "status": status}
    server.routes["POST", f"/prod{UPLOAD}"] = server.routes["GET", f"/prod{DOWNLOAD}"] = reply(401, refusal)
    for kind in ("upload", "download"):
        server.routes["GET", f"/prod/{kind}/token"] = reply(status, refusal)
    for answer in (put(relay, **{"x-upload-token": "t"}), get(relay)):
        assert (answer.status_code, answer.json()) == (status, refusal)
    assert time.pauses == [] and len(server.seen) == 4


@pytest.mark.parametrize("status", [401, 403, 404, 500, 302])
def test_errors_of_heartbeats_are_held_back(
    server: ScriptedServer, worker: OriginalClient, time: Time, status: int
) -> None:
    """The worker sends the next heartbeat at once: about 100 a second."""
    server.routes["POST", "/prod/heartbeat/1"] = reply(status, {"error": "why"})
    assert worker.heartbeat("1") == (502 if status == 302 else status)
    assert time.pauses == [1.0] and len(server.seen) == 1


def test_a_call_that_may_have_written_is_not_repeated_after_a_500(
    relay: Relay, server: ScriptedServer, time: Time, signing: Signing
) -> None:
    server.script("POST", "/prod/fail", reply(500))
    assert requests.post(f"{relay.url}/fail", data=b"{}", timeout=30).status_code == 500
    assert time.pauses == []
    server.script("POST", f"/prod{UPLOAD}", reply(500))
    create = requests.post(f"{relay.url}{UPLOAD}?action=mpu-create", timeout=30)
    assert create.status_code == 200 and len(time.pauses) == 1, "an upload may be created twice"


@pytest.mark.parametrize("body", [b"<html>Log in</html>", b"[]", b'{"expires_at": 1}'])
def test_an_answer_that_is_not_the_api_s_is_told_as_502(
    relay: Relay, server: ScriptedServer, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """BATON_API_URL names another server, or a login page answers for the API."""
    server.routes["POST", f"/prod{UPLOAD}"] = server.routes["GET", f"/prod{DOWNLOAD}"] = reply(200, body)
    for answer, path in ((put(relay), UPLOAD), (get(relay), DOWNLOAD)):
        said = answer.json()["error"]
        assert (
            answer.status_code == 502 and f'{server.url}/prod{path} answered 200 without the JSON field "url"' in said
        )
        assert "BATON_API_URL must be" in said
    server.routes["POST", f"/prod{UPLOAD}"] = EXPIRED
    server.routes["GET", "/prod/upload/token"] = reply(200, body)
    answer = put(relay, **{"x-upload-token": "t"})
    assert answer.status_code == 502 and 'the JSON field "token"' in answer.json()["error"]
    assert "Traceback" not in caplog.text


def test_no_login_of_netrc_reaches_a_server(
    relay: Relay,
    server: ScriptedServer,
    store: ScriptedServer,
    signing: Signing,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """S3 refuses a presigned URL beside a second authentication."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    store.routes["PUT", "/s3"] = stored
    store.objects["/s3"] = DATA
    assert put(relay).status_code == 200 and get(relay).status_code == 200
    assert not [seen for seen in server.seen + store.seen if "authorization" in seen.headers]


def test_a_proxy_of_the_environment_carries_calls_to_the_api(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    server.routes["GET", "/work"] = reply(200, [])
    assert Upstream("http://api.invalid").api("GET", "/work", {}).json() == []
    assert server.seen[0].headers["host"] == "api.invalid"


SHOWS_PROXIES = f"""#!{sys.executable}
import os, requests
if "API_URL" in os.environ:
    for url in (os.environ["API_URL"] + "/work", "http://huggingface.co/", "http://mirror.lan/"):
        print(bool(requests.utils.get_environ_proxies(url)))
"""
"""Stands for `python`: says for a worker whether a proxy carries its calls to the relay, to the web and to a mirror."""


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy", ""])
@pytest.mark.parametrize("text", [README.read_text(encoding="utf-8"), original_relay.__doc__], ids=["README", "module"])
def test_the_start_script_keeps_the_worker_s_key_from_a_proxy(tmp_path: Path, text: str, name: str) -> None:
    """`requests` sends calls to 127.0.0.1 to the proxy of the environment, too. What bypassed the proxy still does."""
    script = re.search(r"    export no_proxy=.*\n( {4}.*\n)+", text)
    assert script is not None
    python = tmp_path / "python"
    python.write_text(SHOWS_PROXIES)
    python.chmod(0o700)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HTTP_PROXY": "http://proxy:3128"}
    if name:
        environment[name] = "mirror.lan"
    shell = ["sh", "-euc", textwrap.dedent(script[0])]
    ran = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["False", "True", str(not name)], ran.stderr
