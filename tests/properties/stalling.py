"""Calls of the API that stop before each call of a store, and go on when they are told to, or never."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from functions.api.http.context import Context
from functions.domain.checkpoints.packs import FUNCTION_TIMEOUT_S, SWEEPER_TIMEOUT_S, PackSnapshot, PackWrite
from tests.kits.api.harness import Answer, Api


class Killed(BaseException):
    """The function was ended where it stood; nothing in it may catch this."""


class StalledCall:
    """A call of the API in its own thread. Only one thread runs at a time: a step waits until the call pauses again."""

    def __init__(
        self, api: Api, send: Callable[[Api], Answer], offer: Any = None, *, lives_s: int = FUNCTION_TIMEOUT_S
    ) -> None:
        """Begin the call; `offer`: what the call commits, if anything. `lives_s`: the longest life of its function."""
        self.offer = offer
        self.lives_s = lives_s
        self.started_at = api.clock.now()
        self.answer: Answer | None = None
        self.done = False
        self.killed = False
        self._error: BaseException | None = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        stalling = Api(stalling_context(api.context, self._pause), api.clock, api.memory, dict(api.keys))
        self._thread = threading.Thread(target=self._run, args=(send, stalling), daemon=True)
        self._thread.start()

    def step(self, times: int = 1) -> None:
        """Let the call make `times` calls of the stores."""
        for _ in range(times):
            if self.done:
                break
            self._go.release()
            self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def finish(self) -> Answer:
        """Let the call run to its end; return its answer."""
        while not self.done:
            self.step()
        assert self.answer is not None
        return self.answer

    def kill(self) -> None:
        """End the call before its next call of a store."""
        self.killed = True
        while not self.done:
            self.step()
        self._thread.join()

    def _run(self, send: Callable[[Api], Answer], api: Api) -> None:
        try:
            self._pause()
            self.answer = send(api)
        except Killed:
            pass
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self.done = True
        self._stopped.release()

    _first = True

    def _pause(self) -> None:
        if self._first:
            self._first = False
        else:
            self._stopped.release()
        self._go.acquire()
        if self.killed:
            raise Killed


def stalled_sweep(api: Api) -> StalledCall:
    """Begin a stalled retention of the sweeper, whose function lives longer than a call of the API."""

    def send(stalling: Api) -> Answer:
        return Answer(200, {}, json.dumps(stalling.retain()))

    return StalledCall(api, send, lives_s=SWEEPER_TIMEOUT_S)


class _Stalling:
    """A store whose every call is preceded by a pause."""

    def __init__(self, store: Any, pause: Callable[[], None]) -> None:
        self._store, self._pause = store, pause

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method) or name.startswith("presign"):
            return method

        def paused(*args: Any, **more: Any) -> Any:
            self._pause()
            return method(*args, **more)

        return paused


class _StallingPacks(_Stalling):
    """A store of packs with a pause before each pack: the real store sends many requests for many packs."""

    def add_references(self, tenant: str, job_id: str, sightings: Sequence[PackSnapshot]) -> bool:
        done = True
        for sighting in sightings:
            self._pause()
            done = self._store.add_references(tenant, job_id, [sighting]) and done
        return done

    def mark_suspect(self, tenant: str, job_id: str, digests: Iterable[str]) -> None:
        for digest in digests:
            self._pause()
            self._store.mark_suspect(tenant, job_id, [digest])

    def remove_references(self, tenant: str, job_id: str, writes: Sequence[PackWrite]) -> set[str]:
        refused: set[str] = set()
        for write in writes:
            self._pause()
            refused |= self._store.remove_references(tenant, job_id, [write])
        return refused


class _StallingObjects(_Stalling):
    """A store of objects with a pause before each object."""

    def head_many(self, tenant: str, bucket: str, keys: Iterable[str]) -> Any:
        found = {}
        for key in keys:
            self._pause()
            found |= self._store.head_many(tenant, bucket, [key])
        return found

    def delete_many(self, tenant: str, bucket: str, keys: Sequence[str]) -> None:
        for key in keys:
            self._pause()
            self._store.delete_many(tenant, bucket, [key])


def stalling_context(context: Context, pause: Callable[[], None]) -> Context:
    """Return a context of the same stores with a pause before each call, except calls about API keys."""
    stalled: Any = replace(
        context,
        jobs=_Stalling(context.jobs, pause),  # type: ignore[arg-type]
        leases=_Stalling(context.leases, pause),  # type: ignore[arg-type]
        packs=_StallingPacks(context.packs, pause),  # type: ignore[arg-type]
        objects=_StallingObjects(context.objects, pause),  # type: ignore[arg-type]
    )
    return stalled
