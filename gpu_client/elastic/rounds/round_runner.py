"""Perform the actions of a round protocol in a background thread of the training process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.contract.elastic.world import WorldView
from gpu_client.elastic.engines.engine import Engine, Peer
from gpu_client.elastic.errors import ElasticError, GroupAbortedError, PeerLostError
from gpu_client.elastic.membership.world_calls import WorldCalls
from gpu_client.elastic.recovery.part_reader import STOP_POLL_S, PartReader
from gpu_client.elastic.recovery.state_transfer import StateDescription, StateTransfer
from gpu_client.elastic.rounds.local_progress import LocalProgress
from gpu_client.elastic.rounds.round_actions import (
    Action,
    CallWorld,
    DescribePeers,
    ExchangeStatus,
    FetchParts,
    OpenGroup,
    ReduceBuckets,
    Sleep,
    StartWorldCall,
    TakeWorldAnswer,
    call_world,
)

Answer = TypeVar("Answer")
PARALLEL_CALLS = 9
DESCRIBE_S = 3.0
"""Time for the other peers to describe their states, from the calls on."""

log = logging.getLogger("baton.elastic")


@dataclass(frozen=True)
class EngineTimeouts:
    """Limits in seconds without an answer of a peer.

    A joining node that dies between its admission and its first call costs the others `open_s`.
    """

    open_s: float = 8.0
    exchange_s: float = 20.0
    reduce_s: float = 20.0


class RoundRunner:
    """Thread that runs a protocol until its end, an error, or `stop`."""

    def __init__(
        self,
        protocol: Generator[Action, Any, None],
        progress: LocalProgress,
        *,
        engine: Engine,
        world: WorldCalls,
        transfer: StateTransfer,
        timeouts: EngineTimeouts,
    ) -> None:
        self._protocol = protocol
        self._progress = progress
        self._engine = engine
        self._world = world
        self._transfer = transfer
        self._timeouts = timeouts
        self._pool = ThreadPoolExecutor(PARALLEL_CALLS, thread_name_prefix="baton-elastic")
        self._parts = PartReader(transfer)
        self._answer: Future[WorldView] | None = None
        self._descriptions: dict[Peer, Future[StateDescription]] = {}
        """Newest calls; a peer without an answer is not called again."""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="baton-rounds", daemon=True)
        self.error: BaseException | None = None
        """Cause of an end that nobody has requested."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Return False before the start and after the end."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float | None = None) -> None:
        """End the thread, wherever it is in a round."""
        with self._progress.changed:
            self._is_stopping = True
            self._progress.changed.notify_all()
        self._engine.abort()
        self._transfer.close()
        if self._thread.ident is None:
            self._engine.close()
        self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the thread."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._drive()
        except GroupAbortedError:
            log.debug("the round thread has been stopped")
        except BaseException as error:  # noqa: BLE001 - the main thread raises the error.
            self.error = error
        finally:
            self._engine.close()
            self._transfer.close()
            self._parts.close()
            self._pool.shutdown(wait=False, cancel_futures=True)
            # No round will come: the main thread must not wait.
            self._progress.notify(is_apart=True, is_ended=True)

    def _drive(self) -> None:
        action = next(self._protocol)
        while True:
            try:
                try:
                    result = self._perform(action)
                except ElasticError as error:
                    action = self._protocol.throw(error)
                else:
                    action = self._protocol.send(result)
            except StopIteration:
                return

    def _perform(self, action: Action) -> object:
        if self._is_stopping:
            raise GroupAbortedError("the node has been stopped")
        match action:
            case OpenGroup(group):
                self._engine.open(group, self._timeouts.open_s)
            case ExchangeStatus(payload):
                return self._engine.exchange(payload, self._timeouts.exchange_s)
            case ReduceBuckets(number, buckets, weights, completed):
                self._engine.reduce(number, buckets, weights, self._timeouts.reduce_s, completed)
            case CallWorld(request):
                return call_world(self._world, request)
            case StartWorldCall(request):
                self._answer = self._pool.submit(call_world, self._world, request)
            case TakeWorldAnswer():
                return self._take_answer()
            case DescribePeers(peers):
                return self._describe(peers)
            case FetchParts(requests):
                return self._parts.read(requests, lambda: self._is_stopping)
            case Sleep(seconds):
                with self._progress.changed:
                    if not self._is_stopping:
                        self._progress.changed.wait(seconds)
        return None

    def _take_answer(self) -> WorldView | ElasticError | None:
        if self._answer is None or not self._answer.done():
            return None
        answer, self._answer = self._answer, None
        return _result_of(answer)

    def _describe(self, peers: Sequence[Peer]) -> list[Any]:
        """Return the answers of the peers; once one peer has answered, the others have DESCRIBE_S.

        A frozen peer answers nothing for a long time, in which the states of the other peers move on.
        """
        deadline = time.monotonic() + DESCRIBE_S
        pending = {peer: one for peer, one in self._descriptions.items() if not one.done()}
        calls = {peer: pending.get(peer) or self._pool.submit(self._transfer.describe, peer) for peer in peers}
        self._descriptions = pending | calls

        def suffices() -> bool:
            is_answered = any(one.done() and one.exception() is None for one in calls.values())
            return is_answered and time.monotonic() > deadline

        self._wait(calls.values(), suffices)
        silent = "the peer has not described its state yet"
        return [
            _result_of(one) if one.done() else PeerLostError([peer.node], "silent", silent)
            for peer, one in calls.items()
        ]

    def _wait(self, futures: Iterable[Future[Any]], suffices: Callable[[], bool]) -> None:
        """Wait for calls of peers, until `suffices` at most. Raises GroupAbortedError after `stop`."""
        while wait(futures, STOP_POLL_S).not_done and not suffices():
            if self._is_stopping:
                raise GroupAbortedError("the node has been stopped")


def _result_of(future: Future[Answer]) -> Answer | ElasticError:
    try:
        return future.result()
    except ElasticError as error:
        return error
