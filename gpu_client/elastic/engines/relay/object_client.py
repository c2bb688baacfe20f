"""Store and fetch objects by presigned URLs."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Mapping
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import SplitResult, urlsplit

from gpu_client.elastic.engines.wire.connection import interrupt

REQUEST_S = 20.0


@cache
def _load_tls() -> ssl.SSLContext:
    """Return the settings of all connections, because the certificates of the authorities take a while to load."""
    return ssl.create_default_context()


class ObjectClient:
    """HTTP connection to the object store, kept between requests of one thread; other threads may interrupt."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._place = ("", "")
        self._connection: HTTPConnection | None = None
        self._is_closed = False

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | bytearray, limit_bytes: int
    ) -> tuple[int, bytes]:
        """Return the status and at most `limit_bytes` of the body. Raises OSError."""
        parts = urlsplit(url)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        while True:
            connection, is_used = self._connect(parts)
            try:
                connection.request(method, target, body or None, dict(headers))
                answer = connection.getresponse()
                data = answer.read(limit_bytes)
                if answer.read(1) or answer.will_close:
                    self._drop()
                return answer.status, data
            except (OSError, HTTPException) as error:
                self._drop()
                # The store may have closed an idle connection.
                if not is_used or self._is_closed:
                    raise OSError(f"{method} {parts.netloc}: {error!r}") from error

    def interrupt(self) -> None:
        """End the request of another thread, and all later requests."""
        with self._lock:
            self._is_closed = True
            sock = self._connection.sock if self._connection is not None else None
        if sock is not None:
            interrupt(sock)

    def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        self._drop()

    def _connect(self, parts: SplitResult) -> tuple[HTTPConnection, bool]:
        """Return a connection to the URL's host, and whether a request has used it before."""
        place = (parts.scheme, parts.netloc)
        with self._lock:
            if self._is_closed:
                raise OSError("the connection is closed")
            if self._connection is not None and self._place == place:
                return self._connection, True
            if parts.scheme == "https":
                connection: HTTPConnection = HTTPSConnection(parts.netloc, timeout=REQUEST_S, context=_load_tls())
            else:
                connection = HTTPConnection(parts.netloc, timeout=REQUEST_S)
            self._connection, self._place = connection, place
            return connection, False

    def _drop(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()
