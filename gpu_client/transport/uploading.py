"""PUTs by presigned URL."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from gpu_client.transport.answers import read_to_end, require_success
from gpu_client.transport.cancel import Flight
from gpu_client.transport.connections import Connections
from gpu_client.transport.errors import UrlExpired
from gpu_client.transport.items import Upload
from gpu_client.transport.lane import Lane, Meter
from gpu_client.transport.segments import send_segments
from gpu_client.transport.stats import TransferStats
from gpu_client.transport.tries import Tries


class Uploads:
    """Does one upload at a time, in whichever thread calls."""

    def __init__(
        self,
        connections: Connections,
        tries: Tries,
        lane: Lane,
        stats: TransferStats,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections = connections
        self._tries = tries
        self._lane = lane
        self._stats = stats
        self._clock = clock

    def put(self, item: Upload, flight: Flight, meter: Meter, *, begin_by: float | None = None) -> None:
        """Until it is stored, or turns out to be stored already. UrlExpired instead of a try after `begin_by`."""

        def once() -> bool:
            if begin_by is not None and self._clock() >= begin_by:
                raise UrlExpired(f"{item.name}: the presigned URL is about to run out")
            return self._put_once(item, flight, meter)

        stored = self._tries.twice_if_altered(item.name, flight, self._lane, once)
        if stored and item.part:
            self._stats.add(uploaded_parts=1, uploaded_bytes=item.size_bytes)
        elif stored:
            self._stats.add(uploaded_objects=1, uploaded_bytes=item.size_bytes)
        else:
            self._stats.add(already_stored_objects=1)

    def _put_once(self, item: Upload, flight: Flight, meter: Meter) -> bool:
        """True if stored, False if it was there."""
        headers = {name: value for name, value in item.headers.items() if name.lower() != "content-length"}
        headers["Content-Length"] = str(item.size_bytes)
        with self._lane.attempt(flight, meter, self._stats, item.traffic) as flow:

            def send_body(sock: socket.socket) -> None:
                send_segments(sock, item.segments, flow, file_bytes=item.file_bytes)

            with self._connections.exchange("PUT", item.url, headers, flight, send_body) as response:
                create_only = any(name.lower() == "if-none-match" for name in headers)
                stored = not (response.status == 412 and create_only)
                if stored:
                    require_success(response, name=item.name, method="PUT", url=item.url)
                read_to_end(response)
        return stored
