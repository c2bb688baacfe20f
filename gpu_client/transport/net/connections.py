"""Keep connections to the object store alive, on the standard library's `http.client`.

A presigned transfer needs exact control: only the signed headers, no redirects, no credentials from the environment, an
answer before the end of an upload, and threads that a cancellation can wake. The module ignores the environment's
proxies.
"""

from __future__ import annotations

import http.client
import platform
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

import certifi

from gpu_client.transport.errors import TransferError, without_query
from gpu_client.transport.net.cancellation import Flight
from gpu_client.transport.retry import Failure, RetryLater

CONNECT_TIMEOUT_S = 10.0
STALL_TIMEOUT_S = 60.0
"""Seconds without a byte after which a connection is closed; slow connections with bytes stay open."""

SENT_BYTES = 256 * 1024
"""Maximum bytes of one `sendall`, because one call has to finish within the stall timeout."""

_ENCODED = re.compile(r"[\x21-\x7e]*")

_Origin = tuple[str, str, int | None]
SendBody = Callable[[socket.socket], None]
"""Function that writes the request's body to a socket."""


@cache
def user_agent() -> str:
    """Return the User-Agent header, cached because reading the package's metadata takes longer than a request."""
    try:
        release = version("baton")
    except PackageNotFoundError:
        release = "source"
    return f"baton/{release} python/{platform.python_version()}"


@cache
def shared_tls() -> ssl.SSLContext:
    """Return the shared TLS context, cached because making a context takes tens of milliseconds.

    The context trusts the machine's root certificates (including SSL_CERT_FILE and SSL_CERT_DIR), because certifi lacks
    the roots of companies' proxies, and certifi's root certificates, because slim container images have no roots.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(cafile=certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


class BrokenConnection(RetryLater):
    """Failure of a connection before a complete answer. `timed_out`: True after a stall timeout."""

    def __init__(self, message: str, *, stale: bool = False, timed_out: bool = False) -> None:
        super().__init__(Failure(reason=message, overload=timed_out), stale=stale)


class Connections:
    """Pool of idle connections, at most `max_idle` for each origin. Thread-safe."""

    def __init__(
        self,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
        max_idle: int = 16,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._tls = tls
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._idle: dict[_Origin, list[http.client.HTTPConnection]] = {}

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    @contextmanager
    def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        flight: Flight,
        send_body: SendBody | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield its answer, whose body the caller reads.

        The connection stays open for reuse if the caller has read the body to its end. Raises BrokenConnection (also
        after a failed read in the `with` block), TransferCanceled, TransferError for an invalid URL.
        """
        origin, target = _split(url)
        connection, used_before = self._open(origin, url)
        sock = connection.sock
        response: http.client.HTTPResponse | None = None
        reusable = False
        try:
            flight.enter(sock)
            response = _request(connection, method, target, headers, send_body)
            yield response
            reusable = response.isclosed() and not response.will_close and connection.sock is not None
        except (http.client.HTTPException, OSError) as error:
            # The caller converts OSErrors of local files (`local_errors`), therefore this OSError is the socket's.
            stale = used_before and response is None and isinstance(error, ConnectionError)
            timed_out = isinstance(error, TimeoutError)
            raise BrokenConnection(f"{type(error).__name__}: {error}", stale=stale, timed_out=timed_out) from error
        finally:
            flight.leave(sock)
            if not (reusable and self._keep(origin, connection)):
                connection.close()
                if response is not None:
                    response.close()  # A response with a closing connection owns the socket.

    def _open(self, origin: _Origin, url: str) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and True if the connection was used before."""
        while connection := self._idle_one(origin):
            if not _is_readable(connection.sock):
                return connection, True
            connection.close()  # An idle connection is readable only if the peer has closed it.
        scheme, host, port = origin
        if scheme == "https":
            tls = self._tls or shared_tls()
            connection = http.client.HTTPSConnection(host, port, timeout=self._connect_timeout_s, context=tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._connect_timeout_s)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            timed_out = isinstance(error, TimeoutError)
            raise BrokenConnection(f"cannot connect to {without_query(url)}: {error}", timed_out=timed_out) from error
        connection.sock.settimeout(self._stall_timeout_s)
        return connection, False

    def _idle_one(self, origin: _Origin) -> http.client.HTTPConnection | None:
        with self._lock:
            idle = self._idle.get(origin)
            return idle.pop() if idle else None

    def _keep(self, origin: _Origin, connection: http.client.HTTPConnection) -> bool:
        with self._lock:
            idle = self._idle.setdefault(origin, [])
            if len(idle) >= self._max_idle:
                return False
            idle.append(connection)
            return True


def send_whole(sock: socket.socket, piece: memoryview) -> None:
    """Send all bytes of `piece`. Raises TimeoutError if no byte moves within the stall timeout."""
    whole = piece.cast("B") if piece.nbytes else piece
    for begin in range(0, piece.nbytes, SENT_BYTES):
        sock.sendall(whole[begin : begin + SENT_BYTES])


def _is_readable(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


def _split(url: str) -> tuple[_Origin, str]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # The exception's text may contain the query and is dropped.
        raise TransferError(f"not a URL: {url.partition('?')[0][:80]!r}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TransferError(f"not an http(s) URL: {without_query(url)[:200]!r}")
    if not _ENCODED.fullmatch(url):
        # http.client would refuse the URL with the signature in the message.
        raise TransferError(f"not a URL, because a character is not percent-encoded: {without_query(url)[:200]!r}")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return (parts.scheme, parts.hostname, port), target


def _request(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Mapping[str, str],
    send_body: SendBody | None,
) -> http.client.HTTPResponse:
    """Send the request and return the answer, including a refusal before the end of the body."""
    connection.putrequest(method, target, skip_accept_encoding=True)
    for name, value in {"User-Agent": user_agent(), "Accept-Encoding": "identity", **headers}.items():
        if name.lower() != "host":
            connection.putheader(name, value)
    broken: OSError | None = None
    try:
        connection.endheaders()
        if send_body is not None:
            send_body(connection.sock)
    except (ConnectionError, ssl.SSLError) as error:  # A stalled connection (TimeoutError) has no answer.
        broken = error
    try:
        response = connection.getresponse()
    except (http.client.HTTPException, OSError) as error:
        raise (broken or error) from error
    if broken is not None:
        response.will_close = True
    return response
