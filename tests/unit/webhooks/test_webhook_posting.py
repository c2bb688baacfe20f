"""Test the POST against servers on this machine: one resolution, the checked address, the certificate, no redirects."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from functions.domain.webhooks import WebhookTarget, parse_target
from functions.webhooks.http_delivery import PostOutcome, WebhookSender, resolve_host

PUBLIC = "93.184.216.34"
HOST = "hooks.example.com"


class Server:
    """Answer every connection with the same bytes; record the requests and the TLS server names."""

    def __init__(self, answer: bytes, tls: ssl.SSLContext | None = None, *, slow: bool = False) -> None:
        self.answer = answer
        self.slow = slow
        self.requests: list[bytes] = []
        self.names: list[str | None] = []
        self._tls = tls
        if tls is not None:
            tls.sni_callback = lambda _socket, name, _context: self.names.append(name)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                self._serve(connection)
            except OSError:
                continue

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                connection.settimeout(60)
                self.requests.append(_request(connection))
                if not self.slow:
                    connection.sendall(self.answer)
                    return
                for byte in self.answer:
                    connection.sendall(bytes([byte]))
                    if self._ended.wait(0.05):
                        return

    def close(self) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)


def _request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made: list[Server] = []
    yield made
    for server in made:
        server.close()


class Net:
    """A resolver and connections: every address connects to one server on this machine."""

    def __init__(self, server: Server | None, *answers: Sequence[str]) -> None:
        self.server = server
        self.answers = list(answers)
        self.resolved: list[tuple[str, int]] = []
        self.connected: list[tuple[str, int]] = []
        self.before_connected: Callable[[], object] = lambda: None

    def resolve(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append((host, port))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def connect(self, address: tuple[str, int], timeout_s: float) -> socket.socket:
        self.connected.append(address)
        self.before_connected()
        if self.server is None:
            raise ConnectionRefusedError
        return socket.create_connection(("127.0.0.1", self.server.port), timeout_s)

    def post(
        self, target: WebhookTarget, tls: ssl.SSLContext | None = None, total_timeout_s: float = 5.0
    ) -> PostOutcome:
        poster = WebhookSender(
            resolve=self.resolve,
            connect=self.connect,
            tls=tls or ssl.create_default_context(),
            total_timeout_s=total_timeout_s,
        )
        return poster.post(target, {"content-type": "application/json"}, b"{}")


def plain() -> WebhookTarget:
    """Build a target without TLS whose addresses are checked."""
    return WebhookTarget(host=HOST, port=80, path="/baton?x=1", secure=False)


def answer(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", "content-length: 0", *headers, "", ""]).encode()


@pytest.mark.parametrize(
    ("status", "delivered"), [("200 OK", True), ("204 No", True), ("500 X", False), ("404 X", False)]
)
def test_the_status_decides(servers: list[Server], status: str, delivered: bool) -> None:
    servers.append(server := Server(answer(status)))
    net = Net(server, [PUBLIC])
    outcome = net.post(plain())
    assert (outcome.delivered, outcome.status, outcome.forbidden) == (delivered, int(status[:3]), False)
    assert net.resolved == [(HOST, 80)] and net.connected == [(PUBLIC, 80)]
    (request,) = server.requests
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /baton?x=1 HTTP/1.1\r\n") and body == b"{}"
    assert head.lower().count(b"\r\nhost: hooks.example.com") == 1


@pytest.mark.parametrize("status", ["301 M", "302 F", "303 S", "307 T", "308 P"])
def test_redirects_are_not_followed(servers: list[Server], status: str) -> None:
    servers.append(server := Server(answer(status, "location: http://169.254.169.254/")))
    net = Net(server, [PUBLIC])
    outcome = net.post(plain())
    assert (outcome.delivered, outcome.forbidden) == (False, False) and "redirects" in outcome.problem
    assert len(net.resolved) == len(net.connected) == len(server.requests) == 1


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["169.254.169.254"], ["::ffff:10.0.0.1"], [PUBLIC, "10.0.0.1"], ["::1", PUBLIC]]
)
def test_a_name_that_leads_to_a_forbidden_address_is_not_even_called(addresses: list[str]) -> None:
    net = Net(None, addresses)
    outcome = net.post(parse_target(f"https://{HOST}/"))
    assert outcome.forbidden and "resolves to" in outcome.problem
    assert net.connected == []


def test_a_name_that_changes_its_mind_does_so_in_vain(servers: list[Server]) -> None:
    """DNS rebinding: the host resolves to a public address first, and to a private address later."""
    servers.append(server := Server(answer("200 OK")))
    net = Net(server, [PUBLIC], ["127.0.0.1"])
    assert net.post(plain()).delivered
    assert net.connected == [(PUBLIC, 80)], "the address that was judged"
    assert net.post(plain()).forbidden and net.connected == [(PUBLIC, 80)]


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), UnicodeError("label too long"), TimeoutError()])
def test_a_name_that_cannot_be_resolved_is_tried_again_later(error: Exception) -> None:
    def fail(host: str, port: int) -> Sequence[str]:
        raise error

    outcome = WebhookSender(resolve=fail).post(plain(), {}, b"")
    assert not outcome.delivered and not outcome.forbidden and "cannot be resolved" in outcome.problem


def test_nobody_there() -> None:
    outcome = Net(None, [PUBLIC]).post(plain())
    assert (outcome.status, outcome.forbidden) == (None, False) and "ConnectionRefusedError" in outcome.problem
    assert not Net(None, []).post(plain()).delivered


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 999999\r\n\r\n", b"x" * 200_000])
def test_what_is_no_answer_is_none(servers: list[Server], said: bytes) -> None:
    servers.append(server := Server(said))
    outcome = Net(server, [PUBLIC]).post(plain())
    assert outcome.status is None and "no answer" in outcome.problem


def test_an_answer_that_dribbles_is_cut_off(servers: list[Server]) -> None:
    servers.append(server := Server(b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 1000, slow=True))
    outcome = Net(server, [PUBLIC]).post(plain(), total_timeout_s=0.5)
    assert outcome.status is None and "too slow" in outcome.problem


class SlowHandshake(Server):
    """Send `said` to each connection, one byte at a time."""

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            for byte in self.answer:
                connection.sendall(bytes([byte]))
                if self._ended.wait(0.05):
                    return


def test_a_handshake_that_dribbles_is_cut_off(servers: list[Server]) -> None:
    # The beginning of a record of 16 KiB: the other side waits for its end.
    servers.append(server := SlowHandshake(b"\x16\x03\x03\x40\x00" + b"\0" * 1000))
    began = time.monotonic()
    outcome = Net(server, [PUBLIC]).post(parse_target(f"https://{HOST}/"), total_timeout_s=0.5)
    assert outcome.status is None and "too slow" in outcome.problem
    assert time.monotonic() - began < 20


def test_time_that_connection_and_handshake_took_is_not_given_again(servers: list[Server], tmp_path: Path) -> None:
    """The time limit covers all stages together."""
    theirs, ours = certificate(tmp_path, HOST)
    servers.append(server := Server(b"HTTP/1.1 200 OK\r\n" * 1000, theirs, slow=True))
    net = Net(server, [PUBLIC])
    net.before_connected = lambda: threading.Event().wait(0.7)
    began = time.monotonic()
    outcome = net.post(parse_target(f"https://{HOST}/"), ours, total_timeout_s=0.5)
    assert outcome.status is None and "too slow" in outcome.problem
    assert time.monotonic() - began < 20 and server.requests == []


def test_an_answer_over_tls_that_dribbles_is_cut_off(servers: list[Server], tmp_path: Path) -> None:
    theirs, ours = certificate(tmp_path, HOST)
    servers.append(server := Server(b"HTTP/1.1 " + b"0" * 1000, theirs, slow=True))
    outcome = Net(server, [PUBLIC]).post(parse_target(f"https://{HOST}/"), ours, total_timeout_s=0.5)
    assert outcome.status is None and "too slow" in outcome.problem


def test_an_endless_preliminary_answer_is_cut_off(servers: list[Server]) -> None:
    servers.append(server := Server(b"HTTP/1.1 100 Continue\r\n\r\n" * 100, slow=True))
    outcome = Net(server, [PUBLIC]).post(plain(), total_timeout_s=0.5)
    assert outcome.status is None and "too slow" in outcome.problem


def test_a_resolver_that_does_not_come_back_is_left_alone() -> None:
    """The system's resolver has no timeout, and the owner of a name controls the delay of its answer."""
    done = threading.Event()

    def hang(host: str, port: int) -> Sequence[str]:
        done.wait(20)
        return [PUBLIC]

    net = Net(None, [PUBLIC])
    poster = WebhookSender(resolve=hang, connect=net.connect, resolve_timeout_s=0.1)
    outcome = poster.post(plain(), {}, b"")
    done.set()
    assert not outcome.delivered and not outcome.forbidden and "cannot be resolved: too slow" in outcome.problem
    assert net.connected == []


@pytest.mark.parametrize(
    "host",
    [
        "127.1",
        "0x7f000001",
        "0X7F.0.0.1",
        "2130706433",
        "0177.0.0.1",
        "017700000001",
        "0",
        "127.0.0.1",
        "::ffff:7f00:1",
    ],
)
def test_no_way_to_write_an_address_of_ours_gets_past_the_system_s_resolver(host: str) -> None:
    net = Net(None, [PUBLIC])
    target = WebhookTarget(host=host, port=443, path="/", secure=True)
    outcome = WebhookSender(connect=net.connect).post(target, {}, b"")
    assert not outcome.delivered and net.connected == []
    assert outcome.forbidden, outcome


def test_no_proxy_of_the_environment_is_asked(servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    servers.append(server := Server(answer("200 OK")))
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    net = Net(server, [PUBLIC])
    assert net.post(plain()).delivered and net.connected == [(PUBLIC, 80)]
    assert server.requests[0].startswith(b"POST /baton?x=1 HTTP/1.1\r\n")


def test_a_long_answer_is_not_read(servers: list[Server]) -> None:
    servers.append(server := Server(b"HTTP/1.1 200 OK\r\ncontent-length: 10000000000\r\n\r\nx"))
    assert Net(server, [PUBLIC]).post(plain()).delivered


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Create a server context with a certificate for `name`, and a client context that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(encoding))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    client = ssl.create_default_context(cadata=made.public_bytes(encoding).decode())
    return server, client


def test_the_name_is_asked_for_and_proved(servers: list[Server], tmp_path: Path) -> None:
    theirs, ours = certificate(tmp_path, HOST)
    servers.append(server := Server(answer("200 OK"), theirs))
    net = Net(server, [PUBLIC])
    assert net.post(parse_target(f"https://{HOST}/baton"), ours).delivered
    assert server.names == [HOST] and net.connected == [(PUBLIC, 443)]
    assert server.requests[0].lower().count(b"\r\nhost: hooks.example.com\r\n") == 1, "without the usual port"


@pytest.mark.parametrize("trusted", [True, False])
def test_who_cannot_prove_the_name_is_told_nothing(servers: list[Server], tmp_path: Path, trusted: bool) -> None:
    theirs, ours = certificate(tmp_path, "else.example.com" if trusted else HOST)
    servers.append(server := Server(answer("200 OK"), theirs))
    net = Net(server, [PUBLIC])
    outcome: Any = net.post(parse_target(f"https://{HOST}/"), ours if trusted else None)
    assert outcome.status is None and "SSLCertVerificationError" in outcome.problem
    assert server.requests == []


def test_ipv4_goes_first_and_each_address_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Lambda function has no IPv6 by default."""
    found = [(socket.AF_INET6, ("2606:4700::1111", 443, 0, 0)), (socket.AF_INET, (PUBLIC, 443))]
    answered = [(family, socket.SOCK_STREAM, 6, "", place) for family, place in found * 2]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered)
    assert resolve_host(HOST, 443) == [PUBLIC, "2606:4700::1111"]
