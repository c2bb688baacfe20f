"""Reduce float32 deltas by torch's gloo inside a trusted network: no encryption, no authentication, no compression.

gloo cannot interrupt an operation. Therefore each operation runs in a daemon thread on buffers of its own, which an
aborted call leaves behind until gloo's timeout.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpu_client.elastic.codecs import check_finite
from gpu_client.elastic.engines.engine import MAX_EXCHANGE_BYTES, Bucket, EngineTraffic, EpochGroup, named_in_errors
from gpu_client.elastic.errors import GroupAbortedError, PeerLostError

ROLL_CALL_S = 2.0
"""Time in which survivors of a failed operation answer, at most."""

Result = TypeVar("Result")


class GlooEngine:
    """Engine of one node. The first member of an epoch hosts the rendezvous at the last of its addresses.

    All members reach each other at the hosts of their first addresses, at ports that gloo chooses. listener: socket of
    this node's rendezvous; None to bind the address itself.
    """

    def __init__(self, listener: socket.socket | None = None) -> None:
        self._listener = listener
        self._server: Any = None
        """Rendezvous that this node hosts until its process ends, for all epochs that the node leads."""
        self._group: EpochGroup | None = None
        self._collectives: Any = None
        self._store: Any = None
        self._lock = threading.Lock()
        self._pending: Future[Any] | None = None
        self._aborted = False
        self._sent_bytes = self._received_bytes = 0

    def open(self, group: EpochGroup, timeout_s: float) -> None:
        """Meet all members at the first member's rendezvous, and connect. Raises PeerLostError."""
        self.close()
        self._aborted = False
        self._group = group
        if group.size > 1:
            self._store, self._collectives = self._call(lambda: self._connect(group, timeout_s), timeout_s)

    def exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Gather all payloads, padded to the longest."""
        if len(payload) > MAX_EXCHANGE_BYTES:
            raise ValueError(f"the payload has {len(payload)} bytes, at most {MAX_EXCHANGE_BYTES} are allowed")
        group = self._opened()
        if group.size == 1:
            return [payload]
        lengths = self._gather(torch.tensor([len(payload)]), timeout_s).tolist()
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        padded[: len(payload)] = torch.tensor(list(payload), dtype=torch.uint8)
        gathered = self._gather(padded, timeout_s).view(group.size, -1)
        return [bytes(row[:length].numpy()) for row, length in zip(gathered, lengths, strict=True)]

    def reduce(
        self,
        round_number: int,
        buckets: Sequence[Bucket],
        weights: Sequence[float],
        timeout_s: float,
        completed: Callable[[int], None],
    ) -> None:
        """Distribute the slices of each bucket, add the slices in the order of ranks, and gather the sums."""
        group = self._opened()
        contributors = [rank for rank, weight in enumerate(weights) if weight]
        for bucket in buckets:
            if group.rank in contributors:
                with named_in_errors(bucket, round_number):
                    check_finite(bucket.values)
            if group.size == 1:
                bucket.average.copy_(bucket.values)
            else:
                self._reduce_bucket(group, bucket, contributors, weights[group.rank], timeout_s)
            completed(bucket.index)

    def abort(self) -> None:
        """Fail the present call and all calls until the next `open`."""
        with self._lock:
            self._aborted = True
            if self._pending is not None:
                self._settle(self._pending.set_exception, GroupAbortedError("another thread has aborted the group"))

    def close(self) -> None:
        """Close the connections of the present group."""
        if self._collectives is not None:
            self._collectives.abort()
        self._collectives = self._store = self._group = None

    @property
    def traffic(self) -> EngineTraffic:
        """Return the bytes of the payloads moved since the start."""
        return EngineTraffic(self._sent_bytes, self._received_bytes)

    def _opened(self) -> EpochGroup:
        if self._group is None:
            raise GroupAbortedError("the group is closed")
        return self._group

    def _connect(self, group: EpochGroup, timeout_s: float) -> tuple[Any, Any]:
        deadline = time.monotonic() + timeout_s
        host, port = _host_and_port(group.peers[0].addresses[-1])
        if group.rank == 0 and self._server is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = self._listener or socket.create_server((host, port), family=family)
            self._server = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        try:
            client = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerLostError([group.peers[0].node], "refused", str(error)) from error
        store = dist.PrefixStore(f"epoch/{group.epoch}", client)
        absent, _ = _call_roll(group, store, "open", deadline - time.monotonic(), "here")
        if absent:
            raise PeerLostError(absent, "silent", "the members did not come to the rendezvous")
        options = dist.ProcessGroupGloo._Options()
        own_host = _host_and_port(group.peers[group.rank].addresses[0])[0]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
        options._timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        return store, dist.ProcessGroupGloo(store, group.rank, group.size, options)

    def _reduce_bucket(
        self, group: EpochGroup, bucket: Bucket, contributors: Sequence[int], weight: float, timeout_s: float
    ) -> None:
        length = -(-len(bucket.values) // group.size)
        weighted = torch.zeros(length * group.size)
        if weight:
            torch.mul(bucket.values, weight, out=weighted[: len(bucket.values)])
        slices = torch.empty_like(weighted)
        collectives = self._collectives
        self._run(lambda: collectives.alltoall_base(slices, weighted, [], [], timedelta(seconds=timeout_s)), timeout_s)
        self._count(4 * length)
        total = torch.zeros(length)
        for rank in contributors:
            total += slices[rank * length : (rank + 1) * length]
        bucket.average.copy_(self._gather(total, timeout_s)[: len(bucket.values)])

    def _gather(self, values: torch.Tensor, timeout_s: float) -> torch.Tensor:
        group, collectives = self._opened(), self._collectives
        gathered = values.new_empty(len(values) * group.size)
        self._run(lambda: collectives._allgather_base(gathered, values), timeout_s)
        self._count(values.nbytes)
        return gathered

    def _count(self, own_bytes: int) -> None:
        moved = own_bytes * (self._opened().size - 1)
        self._sent_bytes += moved
        self._received_bytes += moved

    def _run(self, start: Callable[[], Any], timeout_s: float) -> None:
        def operation() -> None:
            start().wait(timedelta(seconds=timeout_s))

        self._call(operation, timeout_s)

    def _call(self, operation: Callable[[], Result], timeout_s: float) -> Result:
        """Run an operation in a thread. A failed operation names the members that do not answer a roll call."""
        group, pending = self._opened(), Future[Result]()

        def run() -> None:
            try:
                self._settle(pending.set_result, operation())
            except RuntimeError as error:
                self._settle(pending.set_exception, self._diagnose(group, error, timeout_s))
            except Exception as error:  # noqa: BLE001 - raised by the waiting call
                self._settle(pending.set_exception, error)

        with self._lock:
            if self._aborted:
                raise GroupAbortedError("another thread has aborted the group")
            self._pending = pending
        threading.Thread(target=run, name="gloo", daemon=True).start()
        try:
            return pending.result(timeout_s + 2 * ROLL_CALL_S)
        except TimeoutError as error:
            # The store's own time limits do not cover a hung server.
            raise PeerLostError([group.peers[0].node], "silent", "the rendezvous does not answer") from error
        finally:
            with self._lock:
                self._pending = None

    def _diagnose(self, group: EpochGroup, error: RuntimeError, timeout_s: float) -> PeerLostError:
        cause = "silent" if "imeout" in str(error) or "imed out" in str(error) else "connection_reset"
        collectives, store = self._collectives, self._store
        if collectives is not None:
            # The other members' operations then fail, too, and they answer the roll call.
            collectives.abort()
        if store is None:
            return PeerLostError([], cause, str(error))
        try:
            absent, causes = _call_roll(group, store, "failure", min(timeout_s, ROLL_CALL_S), cause)
        except RuntimeError:
            absent, causes = [group.peers[0].node], {cause}
        # A member whose operation timed out closes its connections, which resets the operations of other survivors.
        return PeerLostError(absent, "silent" if "silent" in causes else cause, str(error))

    @staticmethod
    def _settle(settle: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(InvalidStateError):
            settle(outcome)


def _call_roll(
    group: EpochGroup, store: Any, occasion: str, timeout_s: float, answer: str
) -> tuple[list[str], set[str]]:
    """Answer, wait for the answers of all members, and return the nodes of absent members and the answers."""
    keys = [f"{occasion}/{rank}" for rank in range(group.size)]
    store.set(keys[group.rank], answer)
    present = keys
    try:
        store.wait(keys, timedelta(seconds=max(0.1, timeout_s)))
    except dist.DistStoreError:
        present = [key for key in keys if store.check([key])]
    absent = [peer.node for peer, key in zip(group.peers, keys, strict=True) if key not in present]
    return absent, {store.get(key).decode() for key in present}


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
