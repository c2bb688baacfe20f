"""Generate samples from seeds until there are enough or a stop is requested.

A generator is a function of a seed (`make(seed)` returns a sample), a class whose instances are such functions
(expensive objects such as a model are loaded once), or a generator function that receives an iterator of seeds and
yields one sample for each, in order, in batches of any size.

Samples that were put stay: a kill costs the sample in the making and an incomplete pack. Under a kept name (of a job)
the next process continues the count.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from gpu_client.ring.core.back_pressure import RingFlow
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import RingError, SampleRefused, StoreFull, WaitedTooLong, WriterFenced
from gpu_client.ring.format.records import WRITERS, decode_record
from gpu_client.ring.generating.named_counter import NamedCounter, counter_key
from gpu_client.ring.generating.seeds import SeedSource
from gpu_client.ring.generating.writer import RingWriter

logger = logging.getLogger("baton.ring")

T = TypeVar("T")

REPORT_INTERVAL_S = 0.5
RATE_WINDOW_S = 2.0
MAX_FAILURES = 10
"""Number of consecutive failed or refused samples after which the generation fails."""
STORE_PATIENCE_S = 600.0
"""Time for which an unreachable store is retried (s)."""
STOPPING_PATIENCE_S = 30.0
"""Time for which an unreachable store is retried after a stop request (s)."""

Samples = Callable[[Iterator[int]], Iterator[object]]
"""Maps seeds to samples, one for each."""


class GeneratorFault(Exception):  # noqa: N818 - said of the user's code
    """The generator violates its interface."""


class GenerationProgress(Protocol):
    """Receiver of progress that can request a stop: a training session, or a standalone program."""

    @property
    def should_stop(self) -> bool: ...

    def report(self, step: int, total: int, **metrics: object) -> None:
        """Report `step` of `total` samples; `total` 0 means endless."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Report a wait."""


class GenerationCounts(NamedTuple):
    """Result of a generation. `put`: samples under its name, over all processes."""

    put: int
    refused: int
    failed: int
    waited_s: float


def adapt_generator(generator: Callable[..., Any], options: Mapping[str, Any]) -> Samples:
    """Convert any form of generator to a function from seeds to samples. Raises TypeError for unaccepted options."""
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


class GenerationLoop:
    """Generating process; `run` does all the work."""

    def __init__(
        self,
        ring: Ring,
        samples: Samples,
        progress: GenerationProgress,
        *,
        name: str = "",
        again: bool = True,
        count: int | None = None,
        first_seed: int = 0,
        generator: str = "",
        version: str = "",
        maintainer: Maintainer | None = None,
        threads: bool = True,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`name`: of the writer; a given name is kept and continues the count of its last owner. `again`: whether a
        later process may take the name; otherwise its count is deleted with the writer.

        `count`: samples under the name; default endless. `first_seed`: minimum seed. `generator`, `version`: for the
        headers of the samples. Raises RingMismatch.
        """
        self._ring, self._samples, self._progress = ring, samples, progress
        self._count = count
        self._clock, self._pause = clock, pause
        self._seeds = SeedSource(ring.store, first_seed, clock=clock)
        self._maintainer = maintainer or Maintainer(ring, name or "generator")
        self._threads = threads

        def open_writer(under: str) -> RingWriter:
            return RingWriter(
                ring,
                under,
                generator=generator,
                version=version,
                maintainer=self._maintainer,
                patience_s=float("inf"),
                threads=threads,
                clock=clock,
                pause=pause,
                should_give_up=self._should_give_up,
            )

        self._open_writer = open_writer
        self._writer = open_writer(name)
        # Bound late: the writer may be replaced.
        owns_name = lambda: self._writer.owns_name()  # noqa: E731, PLW0108
        self._counter = NamedCounter(ring.store, counter_key(name, again=again), owns_name) if name else None
        self._before = self._counter.acquire() if self._counter else 0
        """Number of samples put by earlier processes or writers of the name."""
        self._taken = self._before
        self._refused = self._failed = self._failures_in_a_row = 0
        self._waited_s = 0.0
        self._put_bytes = 0
        self._reported_at = -float("inf")
        self._put_began_at = clock()
        self._ticks = 0
        self._metrics = RingMetrics(ring.settings.cap, clock)

    def run(self) -> GenerationCounts:
        """Generate until `count` or a stop request. Raises GeneratorFault, the generator's last exception, and
        RingError if samples were lost.
        """
        if self._threads:
            self._maintainer.start()
        try:
            self._report(at_once=True)
            while not self._finish_if_over():
                self._run_generator()
        finally:
            self._end()
        return GenerationCounts(self._put, self._refused, self._failed, self._waited_s + self._writer.waited_s)

    @property
    def _put(self) -> int:
        return self._before + self._writer.put_samples

    def _is_over(self) -> bool:
        return self._progress.should_stop or (self._count is not None and self._taken >= self._count)

    def _finish_if_over(self) -> bool:
        """Return True if the generation is over and all samples are stored and counted."""
        if not self._is_over():
            return False
        counter = self._counter
        try:
            self._until_stored(self._writer.flush)
            if counter is not None:
                self._until_stored(lambda: counter.save(self._put))
        except WriterFenced:
            if self._progress.should_stop or not self._reopen_writer():
                raise
            logger.warning("samples of a pack came too late: others are made")
        return self._is_over()

    def _run_generator(self) -> None:
        """Run the generator until it ends or fails; the caller starts it again."""
        given: deque[int] = deque()
        began = self._taken + self._refused
        made = self._samples(self._iter_seeds(given))
        while not self._is_over():
            try:
                sample = next(made)
            except StopIteration:
                break
            except (RingError, GeneratorFault):
                raise
            except Exception as error:
                self._failed += 1
                self._failures_in_a_row += 1
                if self._failures_in_a_row >= MAX_FAILURES:
                    raise
                logger.warning("no sample of seed %s: %r", given[0] if given else None, error, exc_info=True)
                return
            if not given:
                raise GeneratorFault("the generator yields a sample without taking a seed")
            self._store(sample, given.popleft())
        if self._taken + self._refused == began and not self._is_over():
            raise GeneratorFault("the generator ends without a sample although seeds are available")

    def _iter_seeds(self, given: deque[int]) -> Iterator[int]:
        """Yield seeds for the missing samples; `given` holds the seeds without a sample yet."""
        while not self._is_over() and (self._count is None or self._taken + len(given) < self._count):
            seed = self._with_retries(lambda: next(self._seeds))
            if seed is None:
                return
            given.append(seed)
            yield seed

    def _store(self, sample: object, seed: int) -> None:
        while True:
            self._put_began_at = self._clock()
            try:
                self._put_with_retries(sample, seed)
            except SampleRefused as error:
                self._refused += 1
                self._failures_in_a_row += 1
                if self._failures_in_a_row >= MAX_FAILURES:
                    raise GeneratorFault(
                        f"{self._failures_in_a_row} samples in a row were refused or not made; the last one: {error}"
                    ) from error
                logger.warning("the sample of seed %d was refused: %s", seed, error)
            except (WaitedTooLong, StoreFull):
                if not self._progress.should_stop:
                    raise
                return  # stop requested during the wait
            except WriterFenced:
                # The claim may have succeeded: at most once, do not retry.
                claimed = self._writer.commit_uncertain
                if self._reopen_writer() and not claimed:
                    continue
                logger.warning("the sample of seed %d came too late and may be lost", seed)
            else:
                self._failures_in_a_row = 0
            break
        self._report()

    def _put_with_retries(self, sample: object, seed: int) -> None:
        tried = False

        def put() -> bool:
            nonlocal tried
            if tried and self._writer.commit_uncertain:
                # The sample is stored and lacks only its claim.
                self._writer.flush()
            else:
                tried = True
                self._writer.put(sample, seed=seed)
            return True

        if not self._with_retries(put):
            self._until_stored(put)
        self._taken += 1

    def _reopen_writer(self) -> bool:
        """Open a new writer after being taken for dead. Returns False if a stop was requested first. Raises
        WriterFenced if another process has the name.
        """
        name = self._writer.name
        tries = 0

        def open_writer() -> RingWriter:
            nonlocal tries
            tries += 1
            holder = decode_record(self._ring.store.record(f"{WRITERS}{name}"))
            # A record without a count may be of our last try, whose answer was lost.
            if holder and not holder.get("dead") and (tries == 1 or "put" in holder):
                raise WriterFenced(f"another process generates as {name}", "Give each a name of its own")
            return self._open_writer(name)

        writer = self._with_retries(open_writer)
        if writer is None:
            return False
        logger.warning("%s counted as dead: beginning again", name)
        put = self._put
        # Another process may have had the name meanwhile. After a stop request the count is no longer saved.
        counter = self._counter
        counted = self._with_retries(lambda: counter.acquire(put)) if counter is not None else put
        self._before = self._taken = put if counted is None else counted
        self._waited_s += self._writer.waited_s
        self._put_bytes += self._writer.put_bytes
        self._leave_writer()
        self._writer = writer
        return True

    def _with_retries(self, action: Callable[[], T], *, even_if_stopping: bool = False) -> T | None:
        """Call `action` with retries while the store is unreachable. Returns None after a stop request, unless
        `even_if_stopping`.
        """
        began_at, wait_s = self._clock(), REPORT_INTERVAL_S
        while True:
            try:
                return action()
            except OSError as error:
                stopping = self._progress.should_stop
                if stopping and not even_if_stopping:
                    return None
                if self._clock() - began_at > (STOPPING_PATIENCE_S if stopping else STORE_PATIENCE_S):
                    raise
                logger.warning("the ring cannot be reached now: %s", error)
            self._pause(wait_s)
            wait_s = min(wait_s * 2, 10.0)

    def _until_stored(self, action: Callable[[], object]) -> None:
        try:
            self._with_retries(action, even_if_stopping=True)
        except OSError as error:
            why = f"the last samples could not be stored: {error}"
            raise RingError(why, "Start the generator again to replace them") from error

    def _should_give_up(self) -> bool:
        """Report progress while a sample waits for readers or space. Returns True to give up."""
        now = self._clock()
        if now - self._reported_at >= REPORT_INTERVAL_S:
            waiting_s = now - self._put_began_at
            self._ticks += 1
            if self._ticks % 2:
                # Keep the watchdog for idle jobs informed: waiting is no fault.
                self._reported_at = now
                self._progress.phase("waiting_for_readers_s", int(waiting_s), int(waiting_s))
            else:
                self._report(waiting_s=waiting_s)
        return self._progress.should_stop

    def _report(self, *, at_once: bool = False, waiting_s: float = 0.0) -> None:
        now = self._clock()
        if not at_once and now - self._reported_at < REPORT_INTERVAL_S:
            return
        self._reported_at = now
        if self._counter is not None:
            try:
                self._counter.save(self._put)
            except OSError as error:
                logger.warning("the count of samples cannot be saved now: %s", error)
        found = self._metrics.measure(self._maintainer, self._waited_s + self._writer.waited_s + waiting_s)
        put_bytes = self._put_bytes + self._writer.put_bytes
        counts = {"refused": self._refused, "failed": self._failed, "ring.put_bytes": put_bytes}
        self._progress.report(self._put, self._count or 0, **found, **counts)

    def _end(self) -> None:
        # While the name is held: afterwards the count belongs to the next owner.
        self._report(at_once=True)
        self._leave_writer()
        try:
            self._maintainer.close()
        except OSError as error:
            logger.warning("the maintenance lease cannot be released now: %s", error)
        self._report(at_once=True)

    def _leave_writer(self) -> None:
        try:
            self._writer.close()
        except (RingError, OSError) as error:
            # The writer is fenced or failed before; or all is stored, and other processes detect its departure.
            logger.warning("the writer cannot be closed cleanly: %s", error)


class RingMetrics:
    """Compute metrics of the ring for reports: over all its processes, except `ring.idle`."""

    def __init__(self, cap: int, clock: Callable[[], float]) -> None:
        self._cap = cap
        self._clock = clock
        self._before: tuple[float, RingFlow, float] | None = None
        self._rates: dict[str, float] = {}

    def measure(self, maintainer: Maintainer, waited_s: float) -> dict[str, float]:
        """Return the metrics. `waited_s`: total wait of this generator; `ring.idle` is its share of the time (%)."""
        now, flow = self._clock(), maintainer.flow
        if self._before is None:
            self._before = now, flow, waited_s
        at, before, waited_before_s = self._before
        seconds = now - at
        if seconds >= RATE_WINDOW_S:
            self._before = now, flow, waited_s
            self._rates = {
                "ring.put_rate": max(flow.inserted - before.inserted, 0) / seconds,
                "ring.get_rate": max(flow.read - before.read, 0) / seconds,
                "ring.idle": 100 * min(max(waited_s - waited_before_s, 0) / seconds, 1.0),
            }
        found = dict(self._rates)
        if maintainer.flow_known:
            found["ring.orphans"] = flow.orphans
        if maintainer.flow_known and flow.inserted:
            found |= {"ring.fill": 100 * flow.readable / self._cap, "data.reuse": flow.read / flow.inserted}
        return found
