"""Carry the frames of one connection as objects of the store, which the peer fetches in order."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from baton.contract.elastic.relay import (
    MAX_RELAY_OBJECT_BYTES,
    RelayAnswer,
    RelayDownload,
    RelayRequest,
    RelayUpload,
)
from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.engines.relay.object_client import ObjectClient
from gpu_client.elastic.engines.wire.connection import Connection
from gpu_client.elastic.engines.wire.frames import FrameError
from gpu_client.elastic.errors import NotAMemberError, WorldCallError, WorldUnavailableError

Result = TypeVar("Result")
RelayCall = Callable[[RelayRequest], RelayAnswer]
"""Call to the control plane. Raises WorldCallError."""

SMALLEST_BYTES, LARGEST_BYTES = 64 * 1024, 2 * 1024 * 1024
"""Sizes of full objects."""
UPLOAD_S = 1.0
"""Time of an upload below which objects grow, and at four times of which objects shrink: on slow lines, which many
uploads share, each object is a sign of progress."""
POLL_S, LONGEST_POLL_S = 0.2, 1.5
"""Pauses between two requests for the next object."""
RETRY_S = 15.0
"""Time in which a request that fails is repeated, besides the time without the control plane."""
ANSWER_S = 5.0
"""Time after which a call without an answer is a sign that the control plane is absent."""
RETRY_PAUSE_S = 0.5
FRESH = 0.8
"""Part of the life of URLs in which a node uses them."""


class RelayCalls:
    """Calls of one node to the control plane, which tell when the control plane was last absent.

    Without the control plane no node stores an object, and no node can be excluded. Therefore a peer's silence counts
    only while this node reaches the control plane.
    """

    def __init__(self, call: RelayCall) -> None:
        self._call = call
        self._failed_at = -math.inf
        self._began_at: dict[int, float] = {}
        """Beginning of the running calls, by thread."""

    def __call__(self, request: RelayRequest) -> RelayAnswer:
        """Call the control plane. Raises WorldCallError."""
        thread = threading.get_ident()
        self._began_at[thread] = time.monotonic()
        try:
            return self._call(request)
        except WorldUnavailableError:
            self._failed_at = time.monotonic()
            raise
        finally:
            del self._began_at[thread]

    @property
    def absent_at(self) -> float:
        """Return the newest time at which the control plane gave no answer; -inf if every call had an answer."""
        now = time.monotonic()
        waits = any(began < now - ANSWER_S for began in [*self._began_at.values()])
        return now if waits else self._failed_at


class RelayConnection(Connection):
    """Connection to a peer through the object store."""

    is_relayed = True
    ping_s = 8.0
    silence_s = 20.0
    flush_s = 3.0

    def __init__(self, call: RelayCalls, own_node: str, node: str, channel: str) -> None:
        super().__init__()
        self._call = call
        self._own_node = own_node
        self.node = node
        self._channel = channel
        self._ended = threading.Event()
        self._outgoing = bytearray()
        self._full_bytes = SMALLEST_BYTES
        self._sent_objects = self._received_objects = 0
        self._incoming = memoryview(b"")
        self._urls: list[str] = []
        """URLs of the next objects."""
        self._urls_until = 0.0
        self._uploads, self._downloads = ObjectClient(), ObjectClient()

    def is_from(self, peer: Peer) -> bool:
        """Compare the names, which the control plane has checked."""
        return self.node == peer.node

    @property
    def excused_at(self) -> float:
        """Return the newest time at which this node did not reach the control plane."""
        return self._call.absent_at

    @property
    def round_trip_s(self) -> float:
        """Return the time of two objects, at least."""
        return 2 * LONGEST_POLL_S

    @property
    def is_ended(self) -> bool:
        """Return True after `interrupt` or `close`."""
        return self._ended.is_set()

    def flush(self) -> None:
        """Store the frames since the last object."""
        if self._outgoing:
            self._store(self._outgoing)
            self._outgoing = bytearray()

    def interrupt(self) -> None:
        """End all requests."""
        self._ended.set()
        self._uploads.interrupt()
        self._downloads.interrupt()

    def close(self) -> None:
        """Close the connections to the store."""
        self._ended.set()
        self._uploads.close()
        self._downloads.close()

    def _send_all(self, data: memoryview, deadline: float | None) -> None:
        while data:
            taken = data[: max(0, self._full_bytes - len(self._outgoing))]
            self._outgoing += taken
            data = data[len(taken) :]
            if len(self._outgoing) >= self._full_bytes:
                self.flush()

    def _receive_all(self, out: memoryview, deadline: float | None) -> None:
        self.flush()
        while out:
            if not self._incoming:
                self._incoming = memoryview(self._wait_for_object(deadline))
            part = self._incoming[: len(out)]
            out[: len(part)] = part
            self._incoming, out = self._incoming[len(part) :], out[len(part) :]

    def _store(self, data: bytearray) -> None:
        upload = RelayUpload(to=self.node, channel=self._channel, number=self._sent_objects, size_bytes=len(data))

        def put() -> int:
            target = self._call(RelayRequest(node=self._own_node, upload=upload)).upload
            if target is None:
                raise OSError("the control plane has signed no upload")
            return self._uploads.request("PUT", target.url, target.headers, data, MAX_RELAY_OBJECT_BYTES)[0]

        began = time.monotonic()
        # An earlier try may have stored the object.
        self._repeat(put, (HTTPStatus.OK, HTTPStatus.PRECONDITION_FAILED))
        took_s = time.monotonic() - began
        if took_s > 4 * UPLOAD_S:
            self._full_bytes = max(SMALLEST_BYTES, self._full_bytes // 2)
        elif took_s < UPLOAD_S and len(data) >= self._full_bytes:
            self._full_bytes = min(LARGEST_BYTES, self._full_bytes * 2)
        self._sent_objects += 1
        self.sent_bytes += len(data)

    def _wait_for_object(self, deadline: float | None) -> bytes:
        pause_s = POLL_S
        while True:
            data = self._fetch()
            if data is not None:
                return data
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("the peer sends no data")
            self._pause(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_POLL_S)

    def _fetch(self) -> bytes | None:
        """Return the next object; None if the peer has not stored the object yet."""
        data = b""

        def get() -> int:
            nonlocal data
            if not self._urls or time.monotonic() > self._urls_until:
                self._sign_downloads()
            status, data = self._downloads.request("GET", self._urls[0], {}, b"", MAX_RELAY_OBJECT_BYTES + 1)
            if status == HTTPStatus.FORBIDDEN:
                self._urls = []
            return status

        if self._repeat(get, (HTTPStatus.OK, HTTPStatus.NOT_FOUND)) == HTTPStatus.NOT_FOUND:
            return None
        if len(data) > MAX_RELAY_OBJECT_BYTES:
            raise FrameError(f"an object has more than {MAX_RELAY_OBJECT_BYTES} bytes")
        self._received_objects += 1
        self._urls = self._urls[1:]
        if self._received_objects == 1:
            # The call deletes the first object, which announces the channel. A lane that only sends makes no later one.
            self._repeat(self._sign_downloads, (HTTPStatus.OK,))
        self.heard_at = time.monotonic()
        self.received_bytes += len(data)
        return data

    def _sign_downloads(self) -> int:
        """Receive the URLs of the next objects; the call deletes the objects before."""
        source = RelayDownload(source=self.node, channel=self._channel, number=self._received_objects)
        answer = self._call(RelayRequest(node=self._own_node, download=source))
        self._urls, self._urls_until = answer.downloads, time.monotonic() + FRESH * answer.life_s
        if not self._urls:
            raise OSError("the control plane has signed no download")
        return HTTPStatus.OK

    def _repeat(self, request: Callable[[], int], good: tuple[int, ...]) -> int:
        """Return the status of a request, which is repeated for a while until its status is good. Raises OSError."""
        deadline = time.monotonic() + RETRY_S
        while True:
            self._pause(0)
            try:
                status = request()
                if status in good:
                    return status
                problem = f"the object store answers {status}"
            except NotAMemberError as error:
                raise OSError(str(error)) from error
            except WorldUnavailableError as error:
                problem, deadline = str(error), time.monotonic() + RETRY_S
            except (OSError, WorldCallError) as error:
                problem = str(error)
            if time.monotonic() > deadline:
                raise TimeoutError(problem)
            self._pause(RETRY_PAUSE_S)

    def _pause(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise OSError("the connection is closed")
