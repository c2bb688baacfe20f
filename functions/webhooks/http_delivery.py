"""Deliver one POST to a URL of a tenant, to public addresses only, without redirects and repeats."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from functions.domain.webhooks import WebhookTarget, address_problem

RESOLVE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
TOTAL_TIMEOUT_S = 15.0
"""Limit from the connection to the status of the answer. A timeout per read would let a slow server block the
function."""

Resolve = Callable[[str, int], Sequence[str]]
"""Host and port to addresses. Raises OSError."""
Connect = Callable[[tuple[str, int], float], socket.socket]
"""Address, port and seconds to a connection. Raises OSError."""


@dataclass(frozen=True)
class PostOutcome:
    """Outcome of a POST. `status` None: no answer. `forbidden`: the address is not allowed, so nothing was sent."""

    status: int | None = None
    problem: str = ""
    forbidden: bool = False

    @property
    def delivered(self) -> bool:
        """True for any status 2xx."""
        return self.status is not None and 200 <= self.status < 300


def resolve_host(host: str, port: int) -> Sequence[str]:
    """Resolve a host by the system; IPv4 first, since a Lambda function has no route for IPv6 by default."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return sorted(addresses, key=lambda address: ":" in address)


@dataclass(frozen=True, kw_only=True)
class WebhookSender:
    """HTTP client for webhooks.

    The sender resolves the host once and connects to the checked address, because a second resolution could return
    an address that is not public (DNS rebinding).
    """

    resolve: Resolve = resolve_host
    connect: Connect = socket.create_connection
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)
    total_timeout_s: float = TOTAL_TIMEOUT_S
    resolve_timeout_s: float = RESOLVE_TIMEOUT_S

    def post(self, target: WebhookTarget, headers: Mapping[str, str], body: bytes) -> PostOutcome:
        """Send one POST; follow no redirect and read no body."""
        try:
            addresses = self._addresses(target)
        except (OSError, UnicodeError) as error:
            cause = "too slow" if isinstance(error, TimeoutError) else type(error).__name__
            return PostOutcome(problem=f"the host name cannot be resolved: {cause}")
        problems = [] if target.trusted else [problem for a in addresses if (problem := address_problem(a))]
        if problems:
            return PostOutcome(problem=f"the host name resolves to {problems[0]}", forbidden=True)
        if not addresses:
            return PostOutcome(problem="the host name resolves to no address")
        connection = _PinnedConnection(target, addresses[0], self)
        deadline = threading.Timer(self.total_timeout_s, connection.cut)
        deadline.daemon = True
        deadline.start()
        try:
            connection.request("POST", target.path, body, {**headers, "host": target.host_header})
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            slow = connection.was_cut or isinstance(error, TimeoutError)
            return PostOutcome(problem=f"no answer: {'too slow' if slow else type(error).__name__}")
        finally:
            deadline.cancel()
            connection.close()
        if 300 <= status < 400:
            return PostOutcome(status, f"redirects ({status}), which is not followed")
        return PostOutcome(status, "" if 200 <= status < 300 else f"answered {status}")

    def _addresses(self, target: WebhookTarget) -> Sequence[str]:
        """Resolve within the timeout; getaddrinfo has none, so a slow call is abandoned in its thread."""
        found: Future[Sequence[str]] = Future()

        def resolve() -> None:
            try:
                found.set_result(self.resolve(target.host, target.port))
            except (OSError, UnicodeError) as error:
                found.set_exception(error)

        threading.Thread(target=resolve, name="resolve", daemon=True).start()
        return found.result(self.resolve_timeout_s)


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to a given address; the certificate must be valid for the host of the target."""

    def __init__(self, target: WebhookTarget, address: str, sender: WebhookSender) -> None:
        super().__init__(target.host, target.port, timeout=CONNECT_TIMEOUT_S)
        self._target = target
        self._address = address
        self._sender = sender
        self.was_cut = False

    def connect(self) -> None:
        """Connect to the address and verify the certificate."""
        plain = self._sender.connect((self._address, self._target.port), CONNECT_TIMEOUT_S)
        plain.settimeout(self._sender.total_timeout_s)
        self.sock = plain
        if self._target.secure:
            # `self.sock` is set before the handshake, so that `cut` can end a handshake too.
            self.sock = self._sender.tls.wrap_socket(
                plain, server_hostname=self._target.host, do_handshake_on_connect=False
            )
        if self.was_cut:
            raise TimeoutError
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()

    def cut(self) -> None:
        """End the connection, also while another thread connects, writes or reads."""
        self.was_cut = True
        sock = self.sock
        if sock is not None:
            try:
                # SSLSocket.shutdown would discard the TLS state under the thread that reads; this call does not.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                # The connection has ended already.
                return
