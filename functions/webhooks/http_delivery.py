"""One POST to an address that somebody else chose: to public machines only, never twice, never anywhere else."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from functions.domain.webhooks import Target, address_problem

RESOLVE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
TOTAL_TIMEOUT_S = 15.0
"""From the connection to the answer's status, however slowly the other side dribbles at each stage."""

Resolve = Callable[[str, int], Sequence[str]]
"""Host and port to addresses. Raises OSError."""
Connect = Callable[[tuple[str, int], float], socket.socket]
"""Address, port and seconds to a connection. Raises OSError."""


@dataclass(frozen=True)
class Outcome:
    """What came of a POST. `status` None: no answer. `forbidden`: it was not even tried."""

    status: int | None = None
    problem: str = ""
    forbidden: bool = False

    @property
    def delivered(self) -> bool:
        """Any 2xx."""
        return self.status is not None and 200 <= self.status < 300


def resolved(host: str, port: int) -> Sequence[str]:
    """By the machine's resolver; IPv4 first, since a Lambda function has no IPv6 unless somebody gave it some."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return sorted(addresses, key=lambda address: ":" in address)


@dataclass(frozen=True, kw_only=True)
class Poster:
    """Sends. The name is resolved once, and the connection goes to that very address: nobody can change their mind."""

    resolve: Resolve = resolved
    connect: Connect = socket.create_connection
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)
    total_timeout_s: float = TOTAL_TIMEOUT_S
    resolve_timeout_s: float = RESOLVE_TIMEOUT_S

    def post(self, target: Target, headers: Mapping[str, str], body: bytes) -> Outcome:
        """One POST; redirects are not followed, the answer's body is not read."""
        try:
            addresses = self._addresses(target)
        except (OSError, UnicodeError) as error:
            why = "too slow" if isinstance(error, TimeoutError) else type(error).__name__
            return Outcome(problem=f"the name cannot be resolved: {why}")
        problems = [] if target.trusted else [problem for a in addresses if (problem := address_problem(a))]
        if problems or not addresses:
            return Outcome(problem=f"the name leads to {(problems or ['nowhere'])[0]}", forbidden=bool(problems))
        connection = _Pinned(target, addresses[0], self)
        watch = threading.Timer(self.total_timeout_s, connection.cut)
        watch.daemon = True
        watch.start()
        try:
            connection.request("POST", target.path, body, {**headers, "host": target.host_header})
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            slow = connection.was_cut or isinstance(error, TimeoutError)
            return Outcome(problem=f"no answer: {'too slow' if slow else type(error).__name__}")
        finally:
            watch.cancel()
            connection.close()
        if 300 <= status < 400:
            return Outcome(status, f"redirects ({status}), which is not followed")
        return Outcome(status, "" if 200 <= status < 300 else f"answered {status}")

    def _addresses(self, target: Target) -> Sequence[str]:
        """Resolve in time. The system's resolver cannot be told to hurry: one that is slow is left to itself."""
        found: Future[Sequence[str]] = Future()

        def look_up() -> None:
            try:
                found.set_result(self.resolve(target.host, target.port))
            except (OSError, UnicodeError) as error:
                found.set_exception(error)

        threading.Thread(target=look_up, name="resolve", daemon=True).start()
        return found.result(self.resolve_timeout_s)


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that was chosen before, under the name that the certificate must have."""

    def __init__(self, target: Target, address: str, poster: Poster) -> None:
        super().__init__(target.host, target.port, timeout=CONNECT_TIMEOUT_S)
        self._target = target
        self._address = address
        self._poster = poster
        self.was_cut = False

    def connect(self) -> None:
        """Connect to the address, and prove the name."""
        plain = self._poster.connect((self._address, self._target.port), CONNECT_TIMEOUT_S)
        plain.settimeout(self._poster.total_timeout_s)
        self.sock = plain
        if self._target.secure:
            # Known before the handshake, so that it can be cut, too.
            self.sock = self._poster.tls.wrap_socket(
                plain, server_hostname=self._target.host, do_handshake_on_connect=False
            )
        if self.was_cut:
            raise TimeoutError
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()

    def cut(self) -> None:
        """End it, whatever it is waiting for."""
        self.was_cut = True
        sock = self.sock
        if sock is not None:
            try:
                # Below TLS, whose own shutdown would take the state away from the thread that reads.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                # It has ended by itself.
                return
