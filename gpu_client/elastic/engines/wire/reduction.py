"""Reduce buckets: each contributor owns a slice of each bucket, adds the contributions, and sends the average to all.

Contributions and averages are encoded, so each value is rounded twice, for any number of members. All members decode
the owner's bytes, the owner too. An owner's own values pass through the codec as well: the average does not depend on
the owner.

Memory is a window of buckets. A member sends a bucket after the completion of the bucket one window before, which
contains the averages of all owners; therefore each owner has added, and released, the older contribution.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch

from gpu_client.elastic.codecs import Codec
from gpu_client.elastic.codecs.codec import ALIGNMENT
from gpu_client.elastic.engines.engine import Bucket, named_in_errors
from gpu_client.elastic.engines.wire.frames import FrameError, FrameKind, Header
from gpu_client.elastic.engines.wire.mesh import TICK_S, Mesh, Outgoing
from gpu_client.elastic.errors import NotFiniteError

PART_BYTES = 256 * 1024
"""Longest payload of a data frame."""
SHORTEST_WINDOW_BYTES, LONGEST_WINDOW_BYTES = 4 * 1024 * 1024, 16 * 1024 * 1024
"""Encoded bytes of the buckets in a window. In a longer window than the distance of the peers needs, contributions wait
before averages in network buffers, and a member that is ahead takes bandwidth from a member for whom all wait."""
WINDOW_BYTES_PER_S = 125_000_000
"""Rate for which the window suffices at any distance."""
STALLS = 2
"""Time limits without any progress of the group, after which the peers that this member waits for are lost. Within the
first limit, a peer that waits for another one finds the lost one."""


class Window:
    """Buffers of one window; a later reduction of equal shape uses the buffers again."""

    def __init__(self, slots: int, contributors: int, slice_bytes: int) -> None:
        self.shape = (slots, contributors, slice_bytes)
        self.incoming = torch.empty(self.shape, dtype=torch.uint8)
        """Contributions to this member's slice, by contributor."""
        self.outgoing = torch.empty(self.shape, dtype=torch.uint8)
        """This member's contributions, by owner."""
        self.averages = torch.empty(self.shape, dtype=torch.uint8)
        """Encoded averages, by owner."""


class BucketSlices:
    """Borders of the slices of a bucket, and the parts that are still missing."""

    def __init__(self, length: int, contributors: Sequence[int], position: int) -> None:
        count = len(contributors)
        step = -(-length // (count * ALIGNMENT)) * ALIGNMENT
        borders = [min(place * step, length) for place in range(count + 1)]
        turn = position % count
        # Owners take turns, because a short bucket has a first slice only.
        owners = [*contributors[turn:], *contributors[:turn]]
        self.ranges = {o: slice(a, b) for o, (a, b) in zip(owners, pairwise(borders), strict=True) if a < b}
        self.contributors_left = count
        self.averages_left = len(self.ranges)
        self.parts_left: dict[tuple[int, int], set[int]] = {}
        """Parts that have not begun to arrive, by kind and sender; none before the first part."""
        self.parts_open: dict[tuple[int, int], int] = {}
        """Parts that have not arrived completely."""


class Reduction:
    """Carry out one call of `Engine.reduce`. All state is guarded by the mesh's `changed`."""

    def __init__(
        self,
        mesh: Mesh,
        codec: Codec,
        *,
        number: int,
        round_number: int,
        buckets: Sequence[Bucket],
        weights: Sequence[float],
        timeout_s: float,
    ) -> None:
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._rank = mesh.group.rank
        self.number = number
        self._round = round_number
        self._buckets = buckets
        self._weights = weights
        self._codec = codec
        self._contributors = [rank for rank, weight in enumerate(weights) if weight]
        self._places = {rank: place for place, rank in enumerate(self._contributors)}
        self._positions = {bucket.index: position for position, bucket in enumerate(buckets)}
        self._slices = [BucketSlices(len(one.values), self._contributors, i) for i, one in enumerate(buckets)]
        self._lowest = 0
        """Position of the first incomplete bucket."""
        self._done = [not one.ranges for one in self._slices]
        self._completed = [position for position, done in enumerate(self._done) if done]
        self._unsent: list[Counter[int]] = [Counter() for _ in buckets]
        """Parts of averages that have not left, by position and member."""
        self._progress_at = time.monotonic()
        self._advance()
        lengths = [part.stop - part.start for one in self._slices for part in one.ranges.values()]
        slice_bytes = codec.encoded_bytes(max(lengths, default=0))
        bucket_bytes = max(1, slice_bytes * len(self._contributors))
        slots = min(max(2, LONGEST_WINDOW_BYTES // bucket_bytes), max(1, len(buckets)))
        self.shape = (slots, len(self._contributors), slice_bytes)
        ahead_bytes = SHORTEST_WINDOW_BYTES + WINDOW_BYTES_PER_S * mesh.round_trip_s
        self._ahead = min(slots, max(2, int(ahead_bytes / bucket_bytes)))
        """Buckets that this member sends before the completion of the first one; other members may send `slots`."""
        self.window: Window

    def run(self, completed: Callable[[int], None]) -> None:
        """Send this member's contributions, and wait for all averages. Raises PeerLostError, NotFiniteError."""
        for position in range(len(self._buckets)):
            self._wait(partial(self._in_window, position, self._ahead), completed)
            if self._rank in self._places:
                self._contribute(position)
        self._wait(lambda: self._lowest == len(self._buckets) and not any(self._unsent), completed)

    def _in_window(self, position: int, length: int) -> bool:
        return position < self._lowest + length

    def place(self, rank: int, header: Header) -> memoryview:
        """Return the memory for a part that arrives, once the part's bucket is in the window. Raises FrameError."""
        kind, position = header.kind, self._positions.get(header.bucket)
        if header.round != self._round or position is None:
            raise FrameError(f"no bucket {header.bucket} of round {header.round} is being reduced")
        bucket = self._slices[position]
        owner = self._rank if kind == FrameKind.CONTRIBUTION else rank
        part_of = bucket.ranges.get(owner)
        if kind not in (FrameKind.CONTRIBUTION, FrameKind.AVERAGE) or rank not in self._places or part_of is None:
            raise FrameError(f"a frame of kind {kind} for bucket {header.bucket} came from member {rank}")
        size = self._codec.encoded_bytes(part_of.stop - part_of.start)
        start = header.part * PART_BYTES
        if header.length != min(PART_BYTES, size - start):
            raise FrameError(f"part {header.part} of {size} bytes has {header.length} bytes")
        with self._mesh.changed:
            missing = bucket.parts_left.setdefault((kind, rank), set(range(-(-size // PART_BYTES))))
            bucket.parts_open.setdefault((kind, rank), len(missing))
            if header.part not in missing:
                raise FrameError(f"part {header.part} of bucket {header.bucket} came twice")
            missing.remove(header.part)
            self._mesh.changed.wait_for(lambda: self._in_window(position, self.shape[0]) or self._mesh.failure)
            self._mesh.check()
        data = self._buffer(kind, position, rank, size)
        return memoryview(data[start : start + header.length].numpy())

    def arrived(self, rank: int, header: Header) -> None:
        """Use a part that has arrived completely."""
        position = self._positions[header.bucket]
        bucket = self._slices[position]
        with self._mesh.changed:
            self._progress_at = time.monotonic()
            bucket.parts_open[header.kind, rank] -= 1
            if bucket.parts_open[header.kind, rank]:
                return
        if header.kind == FrameKind.CONTRIBUTION:
            self._contributed(position)
        else:
            self._decode(position, rank)

    def _buffer(self, kind: int, position: int, rank: int, size: int) -> torch.Tensor:
        source = self.window.incoming if kind == FrameKind.CONTRIBUTION else self.window.averages
        return source[position % self.shape[0], self._places[rank], :size]

    def _contribute(self, position: int) -> None:
        bucket = self._buckets[position]
        for owner, part in self._slices[position].ranges.items():
            size = self._codec.encoded_bytes(part.stop - part.start)
            if owner == self._rank:
                data = self._buffer(FrameKind.CONTRIBUTION, position, owner, size)
            else:
                data = self.window.outgoing[position % self.shape[0], self._places[owner], :size]
            with named_in_errors(bucket, self._round):
                self._codec.encode(bucket.values[part], data)
            if owner == self._rank:
                self._contributed(position)
            else:
                self._send(FrameKind.CONTRIBUTION, position, owner, data, lambda: None)

    def _contributed(self, position: int) -> None:
        """Count a complete contribution; after the last one, compute and send the average of this member's slice."""
        bucket = self._slices[position]
        with self._mesh.changed:
            bucket.contributors_left -= 1
            if bucket.contributors_left:
                return
            older = position - self.shape[0]
            while older >= 0 and self._unsent[older]:
                self._watch()
        part = bucket.ranges[self._rank]
        average = self._buckets[position].average[part].zero_()
        size = self._codec.encoded_bytes(len(average))
        for rank in self._contributors:
            try:
                self._codec.accumulate(
                    self._buffer(FrameKind.CONTRIBUTION, position, rank, size), self._weights[rank], average
                )
            except NotFiniteError as error:
                self._mesh.lose([self._mesh.group.peers[rank].node], "protocol", f"a contribution: {error}")
                return
        data = self._buffer(FrameKind.AVERAGE, position, self._rank, size)
        self._codec.encode(average, data)
        with self._mesh.changed:
            self._unsent[position].update(dict.fromkeys(self._mesh.links, -(-size // PART_BYTES)))
        for rank in self._mesh.links:
            self._send(FrameKind.AVERAGE, position, rank, data, partial(self._sent, position, rank))
        self._decode(position, self._rank)

    def _send(self, kind: FrameKind, position: int, rank: int, data: torch.Tensor, sent: Callable[[], None]) -> None:
        view, group = memoryview(data.numpy()), self._mesh.group
        for part, start in enumerate(range(0, len(view), PART_BYTES)):
            header = Header(kind, 0, group.epoch, self.number, self._round, self._buckets[position].index, part)
            # Averages first: they complete buckets, and a window of contributions may wait before them.
            order = (kind != FrameKind.AVERAGE, position, part)
            self._mesh.links[rank].data.put(Outgoing(order, header, view[start : start + PART_BYTES], sent))

    def _sent(self, position: int, rank: int) -> None:
        with self._mesh.changed:
            self._progress_at = time.monotonic()
            self._unsent[position] -= Counter([rank])
            if not self._unsent[position]:
                self._mesh.changed.notify_all()

    def _decode(self, position: int, owner: int) -> None:
        part = self._slices[position].ranges[owner]
        average = self._buckets[position].average[part]
        data = self._buffer(FrameKind.AVERAGE, position, owner, self._codec.encoded_bytes(len(average)))
        try:
            self._codec.decode(data, average)
        except NotFiniteError as error:
            raise FrameError(f"an average: {error}") from error
        with self._mesh.changed:
            self._slices[position].averages_left -= 1
            if not self._slices[position].averages_left:
                self._done[position] = True
                self._completed.append(position)
                self._advance()
                self._mesh.changed.notify_all()

    def _advance(self) -> None:
        while self._lowest < len(self._done) and self._done[self._lowest]:
            self._lowest += 1

    def _wait(self, condition: Callable[[], bool], completed: Callable[[int], None]) -> None:
        """Wait for a condition, and report completed buckets. Raises PeerLostError."""
        while True:
            with self._mesh.changed:
                news, self._completed = self._completed, []
                ready = condition()
                if not news and not ready:
                    self._watch()
            for position in news:
                completed(self._buckets[position].index)
            if ready and not news:
                return

    def _watch(self) -> None:
        """Wait a tick for a change. Raises PeerLostError. The caller holds `changed`."""
        mesh = self._mesh
        mesh.check(self._timeout_s)
        gone = [link.peer.node for link in mesh.links.values() if link.left]
        if gone:
            mesh.lose(gone, "left")
        elif time.monotonic() - max(self._progress_at, mesh.excused_at) > STALLS * self._timeout_s:
            mesh.lose(self._awaited(), "silent", "no progress within the time limit")
        else:
            mesh.changed.wait(TICK_S)

    def _awaited(self) -> list[str]:
        """Return the peers whose contributions are missing or, if none is, whose averages are, or who take no data."""
        first = self._slices[min(self._lowest, len(self._slices) - 1)]
        peers = self._mesh.group.peers

        def incomplete(kind: FrameKind, ranks: Sequence[int]) -> list[str]:
            return [peers[rank].node for rank in ranks if rank != self._rank and first.parts_open.get((kind, rank), 1)]

        contributors = self._contributors if self._rank in first.ranges else []
        return (
            incomplete(FrameKind.CONTRIBUTION, contributors)
            or incomplete(FrameKind.AVERAGE, [*first.ranges])
            or [peers[rank].node for rank in sorted(set().union(*self._unsent))]
        )
