"""Generating as a program does it: seeds in, samples out, until there are enough or it is told to stop.

A generator is a function of a seed (`make(seed)` gives a sample), a class whose instances are such functions (what is
dear, as a model, is loaded once), or a generator function that is given an iterator of seeds and yields a sample for
each, in their order, as many at a time as it likes.

What was put stays: a kill costs the sample in the making, and those of a pack that is not full. Under a name that is
kept (a job's) the next process counts on from there.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from gpu_client.ring.core.maintenance import Keeper
from gpu_client.ring.core.rate_limiter import Flow
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import RingError, SampleRefused, StoreFull, WaitedTooLong, WriterFenced
from gpu_client.ring.format.records import WRITERS, content_of
from gpu_client.ring.generating.named_counter import Tally, tally_key
from gpu_client.ring.generating.seeds import Seeds
from gpu_client.ring.generating.writer import RingWriter

logger = logging.getLogger("baton.ring")

T = TypeVar("T")

TELL_EVERY_S = 0.5
RATES_OVER_S = 2.0
MOST_FAILURES = 10
"""Samples in a row that could not be made, or were refused: then it is no accident."""
STORE_PATIENCE_S = 600.0
"""For so long a place that cannot be reached is tried again."""
STOPPING_PATIENCE_S = 30.0
"""For so long when told to stop: whoever says so does not wait for ever."""

Samples = Callable[[Iterator[int]], Iterator[object]]
"""From seeds to samples, one for each."""


class GeneratorFault(Exception):  # noqa: N818 - said of the user's code
    """The generator does not do what one does."""


class Progress(Protocol):
    """Who is told how far it is, and says when to stop: a training session, or a program of its own."""

    @property
    def should_stop(self) -> bool: ...

    def report(self, step: int, total: int, **metrics: object) -> None:
        """`step` samples of `total` were put, of 0 where there is no end."""

    def phase(self, name: str, done: int, total: int) -> None:
        """It waits."""


class Made(NamedTuple):
    """What a generation has come to. `put`: under its name, in all its processes."""

    put: int
    refused: int
    failed: int
    waited_s: float


def samples_of(generator: Callable[..., Any], options: Mapping[str, Any]) -> Samples:
    """Any form of generator as a function from seeds to samples. Raises TypeError for options that it does not take."""
    if inspect.isgeneratorfunction(generator):
        inspect.signature(generator).bind(iter(()), **options)
        return lambda seeds: generator(seeds, **options)
    made: Any = generator(**options) if inspect.isclass(generator) else generator
    if inspect.isgeneratorfunction(made) or inspect.isgeneratorfunction(getattr(made, "__call__", None)):  # noqa: B004
        whole: Samples = made
        return whole
    given = {} if inspect.isclass(generator) else options
    _bind(made, given)
    return lambda seeds: (made(seed, **given) for seed in seeds)


def _bind(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without one
        return
    signature.bind(0, **options)


class Generation:
    """One process that generates into a ring. Made by a program; `run` is all of it."""

    def __init__(
        self,
        ring: Ring,
        samples: Samples,
        progress: Progress,
        *,
        name: str = "",
        again: bool = True,
        count: int | None = None,
        first_seed: int = 0,
        generator: str = "",
        version: str = "",
        keeper: Keeper | None = None,
        threads: bool = True,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`name`: of the writer; one that is given is kept: whoever has it goes on where the last one ended. `again`:
        whether anybody may come to have it; what was put under one that never comes again is forgotten with its writer.

        `count`: samples under that name; endless unless given. `first_seed`: none is less. `generator`, `version`:
        for the samples' headers. Raises RingMismatch.
        """
        self._ring, self._samples, self._progress = ring, samples, progress
        self._count = count
        self._clock, self._pause = clock, pause
        self._seeds = Seeds(ring.store, first_seed, clock=clock)
        self._keeper = keeper or Keeper(ring, name or "generator")
        self._threads = threads

        def begun(under: str) -> RingWriter:
            return RingWriter(
                ring,
                under,
                generator=generator,
                version=version,
                keeper=self._keeper,
                patience_s=float("inf"),
                threads=threads,
                clock=clock,
                pause=pause,
                gives_up=self._waits,
            )

        self._begun = begun
        self._writer = begun(name)
        # The writer may be another one by the time it is asked.
        holds_name = lambda: self._writer.holds_name()  # noqa: E731, PLW0108
        self._tally = Tally(ring.store, tally_key(name, again=again), holds_name) if name else None
        self._before = self._tally.take() if self._tally else 0
        """Put by processes, or writers, before this one."""
        self._taken = self._before
        self._refused = self._failed = self._in_a_row = 0
        self._waited_s = 0.0
        self._put_bytes = 0
        self._told_at = -float("inf")
        self._asked_at = clock()
        self._ticks = 0
        self._standing = Standing(ring.settings.cap, clock)

    def run(self) -> Made:
        """Until there are `count`, or it is told to stop. Raises GeneratorFault, or what the generator raised last; and
        RingError where samples were lost."""
        if self._threads:
            self._keeper.start()
        try:
            self._tell(at_once=True)
            while not self._done():
                self._some()
        finally:
            self._end()
        return Made(self._put, self._refused, self._failed, self._waited_s + self._writer.waited_s)

    @property
    def _put(self) -> int:
        return self._before + self._writer.put_samples

    def _over(self) -> bool:
        return self._progress.should_stop or (self._count is not None and self._taken >= self._count)

    def _done(self) -> bool:
        """Whether it is over, with all that was put stored and noted."""
        if not self._over():
            return False
        tally = self._tally
        try:
            self._to_the_end(self._writer.flush)
            if tally is not None:
                self._to_the_end(lambda: tally.note(self._put))
        except WriterFenced:
            if self._progress.should_stop or not self._begin_again():
                raise
            logger.warning("samples of a pack came too late: others are made")
        return self._over()

    def _some(self) -> None:
        """Until the generator ends, of itself or by an error: then it is begun again."""
        given: deque[int] = deque()
        began = self._taken + self._refused
        made = self._samples(self._wanted(given))
        while not self._over():
            try:
                sample = next(made)
            except StopIteration:
                break
            except (RingError, GeneratorFault):
                raise
            except Exception as error:
                self._failed += 1
                self._in_a_row += 1
                if self._in_a_row >= MOST_FAILURES:
                    raise
                logger.warning("no sample of seed %s: %r", given[0] if given else None, error, exc_info=True)
                return
            if not given:
                raise GeneratorFault("the generator yields a sample without having taken a seed for it")
            self._store(sample, given.popleft())
        if self._taken + self._refused == began and not self._over():
            raise GeneratorFault("the generator ends without a sample, though there are seeds")

    def _wanted(self, given: deque[int]) -> Iterator[int]:
        """Seeds for the samples that are still to be made; `given` has those that none came for yet."""
        while not self._over() and (self._count is None or self._taken + len(given) < self._count):
            seed = self._patiently(lambda: next(self._seeds))
            if seed is None:
                return
            given.append(seed)
            yield seed

    def _store(self, sample: object, seed: int) -> None:
        while True:
            self._asked_at = self._clock()
            try:
                self._put_patiently(sample, seed)
            except SampleRefused as error:
                self._refused += 1
                self._in_a_row += 1
                if self._in_a_row >= MOST_FAILURES:
                    raise GeneratorFault(
                        f"{self._in_a_row} samples in a row were refused or not made; the last one: {error}"
                    ) from error
                logger.warning("the sample of seed %d was refused: %s", seed, error)
            except (WaitedTooLong, StoreFull):
                if not self._progress.should_stop:
                    raise
                return  # told to stop while it waited
            except WriterFenced:
                # What was claimed may count all the same: rather lost than there twice.
                claimed = self._writer.unsure
                if self._begin_again() and not claimed:
                    continue
                logger.warning("the sample of seed %d came too late: it may be lost", seed)
            else:
                self._in_a_row = 0
            break
        self._tell()

    def _put_patiently(self, sample: object, seed: int) -> None:
        tried = False

        def put() -> bool:
            nonlocal tried
            if tried and self._writer.unsure:
                # The sample is stored already: it lacks its claim.
                self._writer.flush()
            else:
                tried = True
                self._writer.put(sample, seed=seed)
            return True

        if not self._patiently(put):
            self._to_the_end(put)
        self._taken += 1

    def _begin_again(self) -> bool:
        """After having been taken for dead; False when told to stop before it could. Raises WriterFenced where another
        process has the name."""
        name = self._writer.name
        tries = 0

        def begun() -> RingWriter:
            nonlocal tries
            tries += 1
            holder = content_of(self._ring.store.record(f"{WRITERS}{name}"))
            # One that has put nothing yet may be of the last try, of which the store's answer was lost.
            if holder and not holder.get("dead") and (tries == 1 or "put" in holder):
                raise WriterFenced(f"another process generates as {name}", "Give each a name of its own")
            return self._begun(name)

        writer = self._patiently(begun)
        if writer is None:
            return False
        logger.warning("%s was taken for dead: it begins again", name)
        put = self._put
        # Others may have had the name meanwhile. Told to stop before the count is taken it is not noted any more.
        tally = self._tally
        counted = self._patiently(lambda: tally.take(put)) if tally is not None else put
        self._before = self._taken = put if counted is None else counted
        self._waited_s += self._writer.waited_s
        self._put_bytes += self._writer.put_bytes
        self._leave_writer()
        self._writer = writer
        return True

    def _patiently(self, action: Callable[[], T], *, to_the_end: bool = False) -> T | None:
        """What it gives, tried again while the store cannot be reached; None when told to stop meanwhile, but
        `to_the_end`."""
        began_at, wait_s = self._clock(), TELL_EVERY_S
        while True:
            try:
                return action()
            except OSError as error:
                stopping = self._progress.should_stop
                if stopping and not to_the_end:
                    return None
                if self._clock() - began_at > (STOPPING_PATIENCE_S if stopping else STORE_PATIENCE_S):
                    raise
                logger.warning("the ring cannot be reached now: %s", error)
            self._pause(wait_s)
            wait_s = min(wait_s * 2, 10.0)

    def _to_the_end(self, action: Callable[[], object]) -> None:
        try:
            self._patiently(action, to_the_end=True)
        except OSError as error:
            why = f"what was put last could not be stored: {error}"
            raise RingError(why, "Start it again, to make more") from error

    def _waits(self) -> bool:
        """Asked again and again while a sample waits for readers, or for room: whether to give up."""
        now = self._clock()
        if now - self._told_at >= TELL_EVERY_S:
            waiting_s = now - self._asked_at
            self._ticks += 1
            if self._ticks % 2:
                # To a watch over jobs that do nothing: there is nothing wrong with this one.
                self._told_at = now
                self._progress.phase("waiting_for_readers_s", int(waiting_s), int(waiting_s))
            else:
                self._tell(waiting_s=waiting_s)
        return self._progress.should_stop

    def _tell(self, *, at_once: bool = False, waiting_s: float = 0.0) -> None:
        now = self._clock()
        if not at_once and now - self._told_at < TELL_EVERY_S:
            return
        self._told_at = now
        if self._tally is not None:
            try:
                self._tally.note(self._put)
            except OSError as error:
                logger.warning("how many samples were put cannot be noted now: %s", error)
        found = self._standing.at(self._keeper, self._waited_s + self._writer.waited_s + waiting_s)
        put_bytes = self._put_bytes + self._writer.put_bytes
        counts = {"refused": self._refused, "failed": self._failed, "ring.put_bytes": put_bytes}
        self._progress.report(self._put, self._count or 0, **found, **counts)

    def _end(self) -> None:
        # As long as the name is held: behind it the count is the next one's.
        self._tell(at_once=True)
        self._leave_writer()
        try:
            self._keeper.close()
        except OSError as error:
            logger.warning("the ring cannot be left to others now: %s", error)
        self._tell(at_once=True)

    def _leave_writer(self) -> None:
        try:
            self._writer.close()
        except (RingError, OSError) as error:
            # Of one that is fenced, or ends by another error; or all is stored, and others find out that it is gone.
            logger.warning("the writer cannot be closed as it should: %s", error)


class Standing:
    """How the ring stands, in metrics for reports: of all who use it, but for `ring.idle`."""

    def __init__(self, cap: int, clock: Callable[[], float]) -> None:
        self._cap = cap
        self._clock = clock
        self._before: tuple[float, Flow, float] | None = None
        self._rates: dict[str, float] = {}

    def at(self, keeper: Keeper, waited_s: float) -> dict[str, float]:
        """`waited_s`: how long this generator has waited so far; `ring.idle` is the share of time, in percent."""
        now, flow = self._clock(), keeper.flow
        if self._before is None:
            self._before = now, flow, waited_s
        at, before, waited_before_s = self._before
        seconds = now - at
        if seconds >= RATES_OVER_S:
            self._before = now, flow, waited_s
            self._rates = {
                "ring.put_rate": max(flow.inserted - before.inserted, 0) / seconds,
                "ring.get_rate": max(flow.read - before.read, 0) / seconds,
                "ring.idle": 100 * min(max(waited_s - waited_before_s, 0) / seconds, 1.0),
            }
        found = dict(self._rates)
        if keeper.knows:
            found["ring.orphans"] = flow.orphans
        if keeper.knows and flow.inserted:
            found |= {"ring.fill": 100 * flow.readable / self._cap, "data.reuse": flow.read / flow.inserted}
        return found
