"""Keep the connections of one epoch, and notice lost members.

Each direction between two members has one lane for control frames and some for data. A lane is a connection that one
side only writes and the other side only reads, because OpenSSL permits no concurrent calls for one connection. Each
lane has a thread on both sides.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, product
from queue import Empty, PriorityQueue
from typing import Protocol

from gpu_client.elastic.engines.engine import MAX_EXCHANGE_BYTES, EpochGroup, Peer
from gpu_client.elastic.engines.wire.connection import Connection
from gpu_client.elastic.engines.wire.dialer import Dialer
from gpu_client.elastic.engines.wire.frames import FrameError, FrameKind, Header, Payload, WireFrame, parse_header
from gpu_client.elastic.errors import ElasticError, GroupAbortedError, PeerLostError

CONTROL_LANE = 0
TICK_S = 0.1
VERDICT_S = 1.0
"""Time in which the received control lane tells why another lane has ended."""
HEAD_START_S = 1.0
"""Time for the later member's connection to arrive before the earlier member connects, too."""
PROBE_S = 10.0
"""Time for the earlier member to learn whether the member reaches the later one, while the later one calls by relay."""
CALM_S, LONGEST_CALM_S = 0.25, 5.0
"""Pauses before exchanges by relay."""
RELAY_OPEN_S = 12.0
"""Time for members that do not reach each other to meet through the relay."""


CALLED = b"called"
"""Refusal of a lane by a member that connects the lanes itself."""
CAUSE = re.compile(r"[a-z_]{1,32}")
"""Causes that `baton.contract.elastic.world.LostNode` permits."""


class PartReceiver(Protocol):
    """Reduction that receives data frames. number: its place among the reductions of the epoch."""

    number: int

    def place(self, rank: int, header: Header) -> memoryview:
        """Return the memory for a payload; may wait until the memory is free. Raises FrameError."""
        ...

    def arrived(self, rank: int, header: Header) -> None:
        """Use a payload that has arrived completely."""
        ...


@dataclass(order=True)
class Outgoing:
    """Frame to send; None ends the lane. Frames of a lower order leave first. `sent` is called afterwards."""

    order: tuple[int, ...]
    header: Header | None = field(compare=False)
    payload: Payload = field(default=b"", compare=False)
    sent: Callable[[], None] = field(default=lambda: None, compare=False)


@dataclass
class Link:
    """All lanes of one peer. heard_at: time of the newest bytes. left: the peer has said goodbye."""

    rank: int
    peer: Peer
    control: PriorityQueue[Outgoing] = field(default_factory=PriorityQueue)
    data: PriorityQueue[Outgoing] = field(default_factory=PriorityQueue)
    payloads: dict[int, bytes] = field(default_factory=dict)
    """Payloads of exchanges, by number."""
    lanes: dict[tuple[int, bool], Connection] = field(default_factory=dict)
    """Connections by lane, and whether this member sends on the lane."""
    left: bool = False
    caller: int | None = None
    """Rank of the member that connects all lanes; the earlier of both members decides."""
    unreached: PeerLostError | None = None
    """Failure of this member's own call."""
    opened_at: float = field(default_factory=time.monotonic)

    @property
    def heard_at(self) -> float:
        """Return the time at which the newest bytes arrived, or at which the peer was last excused."""
        heard = [one.heard_at for (_, sends), one in [*self.lanes.items()] if not sends]
        return max([self.opened_at, self.excused_at, *heard])

    @property
    def excused_at(self) -> float:
        """Return the newest time at which the peer may have been silent without a fault; -inf for none."""
        return max([-math.inf, *(one.excused_at for one in [*self.lanes.values()])])

    @property
    def is_relayed(self) -> bool:
        """Return whether frames of the peer pass the object store."""
        return any(one.is_relayed for one in [*self.lanes.values()])

    def is_silent(self, limit_s: float) -> bool:
        """Return whether the peer gives no sign of life, although a thread of its own sends pings."""
        lanes = [*self.lanes.values()]
        longest_s = max((one.silence_s for one in lanes), default=Connection.silence_s)
        limit_s = longest_s if self.is_relayed else min(limit_s, longest_s)
        return not self.left and self.heard_at < time.monotonic() - limit_s


class Mesh:
    """Connections of this member to all others in one epoch. Any thread may call any method.

    `changed` guards all fields and the state of the present reduction; the mesh notifies at each change.
    """

    def __init__(self, group: EpochGroup, sockets: int, dialer: Dialer) -> None:
        self.group = group
        self.changed = threading.Condition()
        self.failure: Exception | None = None
        self.links = {rank: Link(rank, peer) for rank, peer in enumerate(group.peers) if rank != group.rank}
        self._lanes = sockets + 1
        self._dialer = dialer
        self.reduction: PartReceiver | None = None
        self._exchange = 0
        self._calm_since = -1
        """Number of the newest reduction at the newest exchange."""
        self._calm_exchanges = 0
        self._lost: list[str] = []
        self._told = count()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def connect(self, timeout_s: float) -> None:
        """Connect to all members. Raises PeerLostError."""
        deadline = time.monotonic() + timeout_s
        for link in self.links.values():
            threading.Thread(target=self._call, args=(link, deadline), name="wire-lane", daemon=True).start()
        with self.changed:
            while missing := [link for link in self.links.values() if len(link.lanes) < 2 * self._lanes]:
                self.check()
                late = [link for link in missing if time.monotonic() > deadline + self._relay_open_s(link)]
                if late:
                    self._lose_unconnected(late)
                self.changed.wait(TICK_S)

    def serve(self, connection: Connection, hello: WireFrame) -> None:
        """Accept a peer's lane, and use the lane until its end."""
        header, node = hello.header, hello.payload.decode(errors="replace")
        link = next((one for one in self.links.values() if one.peer.node == node), None)
        if link is None or not connection.is_from(link.peer):
            connection.send(Header(FrameKind.REFUSED), b"not_a_member")
            return
        # The caller's view of the direction is the opposite one.
        lane, sends = header.part, not header.bucket
        with self.changed:
            if connection.is_relayed and self.group.rank < link.rank:
                self.changed.wait_for(lambda: link.unreached or link.caller is not None or self.failure, PROBE_S)
            refused = b"closed" if self.failure or lane >= self._lanes or (lane, sends) in link.lanes else b""
            if link.caller == self.group.rank:
                refused = CALLED
            elif not refused:
                link.caller = link.rank
        if refused:
            connection.send(Header(FrameKind.REFUSED), refused)
            return
        if not connection.is_relayed:
            self._dialer.note_caller(link.peer)
        connection.send(Header(FrameKind.WELCOME, epoch=self.group.epoch))
        connection.flush()
        self._use(link, connection, lane, sends)

    def exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return the payloads of all members by rank."""
        with self.changed:
            self._pause_before_exchange()
            self.check()
            number = self._exchange
        self.tell(Header(FrameKind.EXCHANGE, epoch=self.group.epoch, call=number), payload)
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while missing := [link for link in self.links.values() if number not in link.payloads]:
                self.check(timeout_s)
                gone = [link.peer.node for link in missing if link.left]
                if gone:
                    self.lose(gone, "left")
                elif time.monotonic() > max(deadline, self.excused_at + timeout_s):
                    self.lose([link.peer.node for link in missing], "silent", "no payload within the time limit")
                self.changed.wait(TICK_S)
            self._exchange += 1
            found = {rank: link.payloads.pop(number) for rank, link in self.links.items()}
        return [found.get(rank, payload) for rank in range(self.group.size)]

    @property
    def excused_at(self) -> float:
        """Return the newest time at which a peer may have been silent without a fault; -inf for none."""
        return max([-math.inf, *(link.excused_at for link in self.links.values())])

    def _pause_before_exchange(self) -> None:
        """Wait if a peer is relayed, because requests cost money: longer with each exchange without a reduce."""
        reduces = -1 if self.reduction is None else self.reduction.number
        if reduces != self._calm_since:
            self._calm_since, self._calm_exchanges = reduces, 0
        if any(link.is_relayed for link in self.links.values()):
            pause_s = min(CALM_S * 1.5**self._calm_exchanges, LONGEST_CALM_S)
            self.changed.wait_for(lambda: self.failure is not None, pause_s if self._calm_exchanges else 0)
        self._calm_exchanges += 1

    def tell(self, header: Header, payload: bytes = b"") -> None:
        """Send a control frame to all peers."""
        for link in self.links.values():
            link.control.put(Outgoing((next(self._told),), header, payload))

    def check(self, silence_s: float | None = None) -> None:
        """Raise the failure of the group; `silence_s`: limit of a peer's silence. The caller holds `changed`."""
        if self.failure is None and silence_s is not None:
            silent = [link.peer.node for link in self.links.values() if link.is_silent(silence_s)]
            if silent:
                self.lose(silent, "silent", "no sign of life within the time limit")
        if isinstance(self.failure, PeerLostError):
            raise PeerLostError(self._lost, self.failure.cause, self.failure.message)
        if self.failure is not None:
            raise self.failure

    def lose(self, nodes: list[str], cause: str, message: str = "", *, told: bool = False) -> None:
        """Note lost peers, and tell the others, unless a peer has told this member."""
        with self.changed:
            first = self.failure is None
            self.fail(PeerLostError(nodes, cause, message))
            self._lost += [node for node in nodes if node not in self._lost]
        if first and not told:
            self.tell(Header(FrameKind.LOST, epoch=self.group.epoch), " ".join([cause, *nodes]).encode())

    def fail(self, error: Exception) -> None:
        """Let all calls raise an error from now on; the first error counts."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def close(self, *, goodbye: bool) -> None:
        """Close all lanes; `goodbye`: tell the peers that this member leaves in order. Later calls have no effect."""
        with self.changed:
            closed, self._closed = self._closed, True
        if closed:
            return
        self.fail(GroupAbortedError("the group is closed"))
        if goodbye:
            self._send_goodbye()
        for link in self.links.values():
            for queue in (link.control, *[link.data] * self._lanes):
                queue.put(Outgoing((), None))
            for connection in [*link.lanes.values()]:
                connection.interrupt()

    def join(self) -> None:
        """Wait for the end of all lanes after `close`: no thread writes to the buckets any more."""
        for thread in self._threads:
            thread.join()

    def _send_goodbye(self) -> None:
        said: list[threading.Event] = []
        flush_s = 0.0
        for link in self.links.values():
            if (CONTROL_LANE, True) in link.lanes and not link.left and link.peer.node not in self._lost:
                said.append(threading.Event())
                flush_s = max(flush_s, link.lanes[CONTROL_LANE, True].flush_s)
                header = Header(FrameKind.GOODBYE, epoch=self.group.epoch)
                link.control.put(Outgoing((next(self._told),), header, sent=said[-1].set))
        deadline = time.monotonic() + flush_s
        for event in said:
            event.wait(max(0.0, deadline - time.monotonic()))

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received."""
        connections = [one for link in self.links.values() for one in [*link.lanes.values()]]
        return sum(one.sent_bytes for one in connections), sum(one.received_bytes for one in connections)

    @property
    def round_trip_s(self) -> float:
        """Return the time to the farthest peer and back."""
        lanes = [
            one for link in self.links.values() for (lane, _), one in [*link.lanes.items()] if lane == CONTROL_LANE
        ]
        return max((one.round_trip_s for one in lanes), default=0.0)

    def _relay_open_s(self, link: Link) -> float:
        """Return the time by which the relay may prolong the opening of an epoch."""
        may_relay = self._dialer.relay is not None and link.unreached is not None
        return RELAY_OPEN_S if may_relay and not self._dialer.has_met(link.peer) else 0.0

    def _lose_unconnected(self, links: list[Link]) -> None:
        errors = [link.unreached for link in links if link.unreached is not None]
        causes = {error.cause for error in errors}
        cause = causes.pop() if len(causes) == 1 and len(errors) == len(links) else "silent"
        message = "; ".join(error.message for error in errors) or "no connection within the time limit"
        self.lose([link.peer.node for link in links], cause, message)

    def _call(self, link: Link, deadline: float) -> None:
        """Connect all lanes of a peer, unless the peer does.

        One of the members may be behind a NAT, which lets connections out only. Therefore both call. The later member
        begins, and the earlier one decides whose connections count.
        """
        own = self.group.peers[self.group.rank]
        decides = self.group.rank < link.rank
        if decides and own.addresses and not self._dialer.leads(link.peer):
            with self.changed:
                self.changed.wait_for(lambda: link.caller is not None or self.failure is not None, HEAD_START_S)
        if link.caller is not None:
            return
        connection = self._reach(link, decides, deadline)
        if connection is None:
            return
        if connection.is_relayed:
            deadline += RELAY_OPEN_S
        with self.changed:
            is_late = link.caller is not None
            if decides and not is_late:
                link.caller = self.group.rank
        if is_late:
            connection.close()
            return
        if decides:
            self._dialer.lead(link.peer)
        if self._greet(link, connection, CONTROL_LANE, True, deadline):
            link.caller = self.group.rank
            for lane, sends in product(range(self._lanes), (True, False)):
                if (lane, sends) != (CONTROL_LANE, True):
                    arguments = (link, lane, sends, deadline)
                    threading.Thread(target=self._dial_lane, args=arguments, name="wire-lane", daemon=True).start()
            self._use(link, connection, CONTROL_LANE, True)

    def _reach(self, link: Link, decides: bool, deadline: float) -> Connection | None:
        """Return a connection to a peer; None if only the peer may connect, or after the peer's loss."""
        try:
            return self._dialer.dial(link.peer, deadline - time.monotonic())
        except PeerLostError as error:
            relay = self._dialer.relay
            is_proof = error.cause == "refused" and self._dialer.has_reached(link.peer)
            may_be_called = relay is not None or self.group.peers[self.group.rank].addresses
            if link.caller is None and (is_proof or not may_be_called):
                self.lose([link.peer.node], error.cause, error.message)
            with self.changed:
                link.unreached = error
                self.changed.notify_all()
        if relay is None or is_proof:
            return None
        relay.expect()
        return None if decides else relay.dial(link.peer)

    def _dial_lane(self, link: Link, lane: int, sends: bool, deadline: float) -> None:
        relay = self._dialer.relay if link.unreached is not None else None
        connection: Connection
        try:
            if relay is not None:
                connection = relay.dial(link.peer)
            else:
                connection = self._dialer.dial(link.peer, deadline - time.monotonic())
        except PeerLostError as error:
            self.lose([link.peer.node], error.cause, error.message)
            return
        if self._greet(link, connection, lane, sends, deadline):
            self._use(link, connection, lane, sends)

    def _greet(self, link: Link, connection: Connection, lane: int, sends: bool, deadline: float) -> bool:
        """Open a lane on a connection; return False, and close the connection, if the peer refuses the lane."""
        header = Header(FrameKind.HELLO, epoch=self.group.epoch, part=lane, bucket=int(sends))
        try:
            connection.send(header, self.group.peers[self.group.rank].node.encode(), deadline - time.monotonic())
            answer = connection.receive(MAX_EXCHANGE_BYTES, deadline - time.monotonic())
        except (OSError, EOFError, FrameError) as error:
            connection.close()
            # The peer may have called while this member called by relay.
            if link.caller in (None, self.group.rank):
                self._end(link, lane, sends, error)
            return False
        if answer.header.kind == FrameKind.WELCOME:
            return True
        connection.close()
        if answer.payload != CALLED:
            reason = answer.payload.decode(errors="replace")
            cause = "stale_epoch" if reason == "stale_epoch" else "refused"
            self.lose([link.peer.node], cause, f"the peer refuses the connection: {reason}")
        return False

    def _use(self, link: Link, connection: Connection, lane: int, sends: bool) -> None:
        """Send or receive until the connection or the epoch ends."""
        with self.changed:
            if self._closed:
                connection.close()
                return
            link.lanes[lane, sends] = connection
            self._threads.append(threading.current_thread())
            self.changed.notify_all()
        try:
            if sends:
                self._send(connection, link.control if lane == CONTROL_LANE else link.data, lane)
            elif lane == CONTROL_LANE:
                self._receive_control(link, connection)
            else:
                self._receive_data(link, connection)
        except (OSError, EOFError, FrameError) as error:
            self._end(link, lane, sends, error)
        except Exception as error:  # noqa: BLE001 - raised by the present or the next call
            self.fail(error)
        finally:
            connection.close()

    @staticmethod
    def _send(connection: Connection, queue: PriorityQueue[Outgoing], lane: int) -> None:
        while True:
            try:
                frame = queue.get_nowait()
            except Empty:
                connection.flush()
                try:
                    frame = queue.get(timeout=connection.ping_s if lane == CONTROL_LANE else None)
                except Empty:
                    frame = Outgoing((), Header(FrameKind.PING))
            if frame.header is None:
                return
            connection.send(frame.header, frame.payload)
            if lane == CONTROL_LANE:
                connection.flush()
            frame.sent()

    def _receive_control(self, link: Link, connection: Connection) -> None:
        while True:
            frame = connection.receive(MAX_EXCHANGE_BYTES)
            kind, header = frame.header.kind, frame.header
            if kind == FrameKind.PING:
                continue
            if header.epoch != self.group.epoch:
                raise FrameError(f"a frame of epoch {header.epoch} came in epoch {self.group.epoch}")
            if kind == FrameKind.GOODBYE:
                with self.changed:
                    link.left = True
                    self.changed.notify_all()
                return
            if kind == FrameKind.EXCHANGE:
                with self.changed:
                    # A peer ends an exchange with this member's payload only.
                    if header.call not in (self._exchange, self._exchange + 1) or header.call in link.payloads:
                        raise FrameError(f"payload {header.call} came in exchange {self._exchange}")
                    link.payloads[header.call] = frame.payload
                    self.changed.notify_all()
            elif kind == FrameKind.LOST:
                self._note_told(link, frame.payload)
            else:
                raise FrameError(f"a frame of kind {kind} came on the control lane")

    def _note_told(self, link: Link, payload: bytes) -> None:
        cause, *nodes = payload.decode(errors="replace").split(" ")
        members = [peer.node for peer in self.group.peers]
        own_node = members[self.group.rank]
        if not CAUSE.fullmatch(cause) or not nodes or not set(nodes) <= set(members):
            raise FrameError("the cause is no word, or the ids of lost nodes are not those of members")
        # A peer that has lost this member is lost to this member.
        self.lose([link.peer.node if node == own_node else node for node in nodes], cause, "told by a peer", told=True)

    def _receive_data(self, link: Link, connection: Connection) -> None:
        while True:
            header_data = connection.receive_header()
            header = parse_header(header_data)
            if header.epoch != self.group.epoch:
                raise FrameError(f"a frame of epoch {header.epoch} came in epoch {self.group.epoch}")
            reduction = self._reduction_of(header)
            connection.receive_payload(header_data, reduction.place(link.rank, header))
            reduction.arrived(link.rank, header)

    def _reduction_of(self, header: Header) -> PartReceiver:
        """Return the reduction of a frame; a peer may begin a reduction before this member does."""
        with self.changed:
            self.changed.wait_for(lambda: self.failure or (self.reduction and self.reduction.number >= header.call))
            self.check()
            if self.reduction is None or self.reduction.number != header.call:
                raise FrameError(f"a frame of reduction {header.call} came too late")
            return self.reduction

    def _end(self, link: Link, lane: int, sends: bool, error: ElasticError | OSError | EOFError) -> None:
        """Judge the end of a lane."""
        if lane != CONTROL_LANE or sends:
            with self.changed:
                self.changed.wait_for(lambda: link.left or self.failure is not None, VERDICT_S)
        with self.changed:
            if link.left or self.failure is not None:
                return
        cause = "protocol" if isinstance(error, FrameError) else "connection_reset"
        self.lose([link.peer.node], "silent" if isinstance(error, TimeoutError) else cause, str(error))
