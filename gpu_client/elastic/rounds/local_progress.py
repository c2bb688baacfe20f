"""Hand deltas from the training's main thread to the round thread, and moves of the outer parameters back.

Two relations between local parameters, outer parameters and `delta` hold, and make a delta count exactly once:

- still (the main thread waits): local parameters = outer parameters - delta, written when the main thread goes on.
- training: the round thread adds each move of the outer parameters to `shift`, which the main thread adds to the local
  parameters at its next step. Progress since the last delta therefore survives each move.

A delta that a commit has included becomes zero, and in training its value goes into the shift. Only blocking rounds of
ready members leave the local parameters equal to the outer parameters bit for bit, as in plain DiLoCo.

With fragments, a delta has the buckets of the next round's fragment alone, because no delta outlives a round. For all
other buckets, the relation of the training holds at all times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from baton.contract.elastic.data import DataProgress
from gpu_client.elastic.codecs import Codec, check_finite
from gpu_client.elastic.errors import NotFiniteError
from gpu_client.elastic.parameters import Stripes, TrainedParameters


@dataclass(eq=False)
class Contribution:
    """Delta that the main thread has handed over. tokens: `LocalProgress.tokens` at this time."""

    tokens: int
    ready_at: float
    is_refused: bool = False
    """The delta was not finite."""
    data: DataProgress = field(default_factory=DataProgress)
    """Shards that the node has trained since its newest delta in a committed round."""


class LocalProgress:
    """Delta of the local training, shared by the main thread and the round thread; `changed` guards all fields.

    feedback: lossy codec of the engine whose rounding errors the next delta corrects (error feedback).
    allocate: returns a flat tensor of zeros that `TrainedParameters` can access. fragments: parts of the model, in one
    of which a round includes the delta; None for parts that are not copied apart.
    """

    contribution: Contribution | None = None
    is_started = False
    """The node has the group's outer state, and the training may begin."""
    is_apart = True
    """The node is in no group; the main thread does not wait for rounds."""
    is_hurried = False
    """The other members wait for this node's delta."""
    is_idle = False
    """The node has no data at present, and the others do not wait for its delta."""
    is_leaving = False
    is_ended = False
    """The round thread has ended."""
    is_stopping = False
    """The node leaves soon, and its delta should not wait for the others."""
    is_adopting = False
    """The outer parameters mix two rounds."""
    is_checkpoint_due = False
    """This node saves the state of the newest round."""
    step_s = 0.0
    moves = 0
    """Number of rounds that have moved the outer parameters."""
    periods = 0
    """Number of rounds that have begun, and of moves without a round: from there, inner steps count anew."""
    tokens = 0
    """Tokens that this node has trained."""
    next_fragment = 0
    """Fragment of the next round."""

    def __init__(
        self,
        outer: torch.Tensor,
        feedback: Codec | None = None,
        allocate: Callable[[], torch.Tensor] | None = None,
        fragments: Sequence[Stripes | None] = (None,),
        mix: float = 0.0,
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.outer = outer
        self._allocate = allocate or (lambda: torch.zeros_like(outer))
        self.delta = self._allocate()
        self.residual = torch.zeros_like(outer if feedback else outer[:0])
        """Part of earlier deltas that their rounding has kept out of the averages."""
        self._feedback = feedback
        self._sent = torch.empty_like(self.residual)
        self.data = DataProgress()
        """Shards trained at this node that no committed round contains."""
        self.metrics: Mapping[str, float] = {}
        """Metrics of this node that the next contribution bears."""
        self.world_metrics: Mapping[str, float] = {}
        """Metrics of the newest round."""
        self._is_begun = False
        self.counted = [0] * len(fragments)
        """By fragment, the tokens whose progress has counted in rounds, or is dropped."""
        self._taken = 1 - mix
        """Share of a round that the local parameters take during the training."""
        self._fragments = fragments
        self._shift: torch.Tensor | None = None
        self._shifted: set[int] = set()
        """Fragments with moves in the shift."""
        self._is_still = True
        self._held: Stripes | None = None
        """Buckets of the delta, which are still while `_is_still`; None for all buckets."""
        self._has_moved = False
        """The local parameters lack moves of still buckets."""
        self._is_clear = True
        """All of the delta is zero."""

    # --- main thread -------------------------------------------------------------------------------------------------

    def hold(self, parameters: TrainedParameters, fragment: int | None = None) -> None:
        """Compute the delta of the local parameters, which do not change until `proceed`. fragment: by default all."""
        held = None if fragment is None else self._fragments[fragment]
        # The copy of a large model takes seconds, in which the round thread must not wait for the lock.
        parameters.read(self.delta, held)
        with self.changed:
            for part in self._cut(held):
                torch.sub(self.outer[part], self.delta[part], out=self.delta[part])
            moved = self._shifted if held is None else self._shifted & {fragment}
            if moved and self._shift is not None:
                for part in self._cut(held):
                    self.delta[part].sub_(self._shift[part])
                    self._shift[part].zero_()
                self._shifted -= moved
                self._has_moved = True
            self._held, self._is_still, self._is_clear = held, True, False

    def hand_over(
        self,
        parameters: TrainedParameters,
        now: float,
        read_metrics: Callable[[], Mapping[str, float]] = dict,
    ) -> Contribution | None:
        """Make the delta of the local parameters this node's contribution; None while no group can take the delta.

        A delta with NaN or infinity is refused: the node contributes nothing and goes on from the outer parameters.
        """
        while not (self.is_apart or self.is_adopting or self.contribution is not None):
            fragment = self.next_fragment
            self.hold(parameters, fragment)
            if self._is_finite():
                contribution = Contribution(self.tokens, now, data=self.data)
            else:
                contribution = Contribution(self.tokens, now, is_refused=True)
            metrics = read_metrics()
            with self.changed:
                if fragment == self.next_fragment:
                    if contribution.is_refused:
                        self._take_outer()
                    self.contribution = contribution
                    self.metrics = metrics
                    self.is_hurried = False
                    self.changed.notify_all()
                    return contribution
            # A round without this node has ended meanwhile, and the next round concerns other buckets.
            self.proceed(parameters)
        return None

    def _is_finite(self) -> bool:
        try:
            for part in self._cut(self._held):
                check_finite(self.delta[part])
        except NotFiniteError:
            return False
        return True

    def _drop_progress(self) -> None:
        self.delta.zero_()
        self.counted = [self.tokens] * len(self.counted)
        self._is_clear = True

    def _take_outer(self) -> None:
        """Drop the progress; the next call of `proceed` sets the local parameters to the outer parameters."""
        self._drop_progress()
        if self._shift is not None:
            self._shift.zero_()
        self._shifted, self._held = set(), None
        self._is_still = self._has_moved = True

    def _cut(self, stripes: Stripes | None) -> Iterable[slice]:
        return (slice(None),) if stripes is None else stripes.cut(0, len(self.outer))

    @property
    def pending_tokens(self) -> list[int]:
        """Return the tokens that no round has counted, by fragment."""
        with self.changed:
            return [self.tokens - one for one in self.counted]

    def load_tokens(self, pending: Sequence[int]) -> None:
        """Restore the tokens that no round has counted; by fragment, or for the whole model."""
        self.tokens = max(pending)
        fragments = len(self.counted)
        self.counted = [self.tokens - pending[place % len(pending)] for place in range(fragments)]

    def proceed(self, parameters: TrainedParameters) -> None:
        """Write the moved outer parameters, less the delta, to the local parameters; the training goes on."""
        with self.changed:
            self.wait_for(lambda: not (self._is_still and self.is_adopting))
            # A round thread that has ended in an adoption leaves outer parameters of two rounds.
            if self._is_still and self._has_moved and not self.is_adopting:
                parameters.write(self.outer, None if self._is_clear else self.delta, self._held)
                self._has_moved = False
            self._is_still = False
            self.follow(parameters)

    def follow(self, parameters: TrainedParameters) -> None:
        """Apply the moves of the outer parameters to the local parameters during the training."""
        # The commit of a large model takes seconds, for which the training does not wait.
        if not self._shifted or not self.changed.acquire(blocking=False):
            return
        try:
            if self._is_still or self.is_adopting or self._shift is None:
                return
            for fragment in sorted(self._shifted):
                parameters.add(self._shift, self._fragments[fragment])
                for part in self._cut(self._fragments[fragment]):
                    self._shift[part].zero_()
            self._shifted = set()
        finally:
            self.changed.release()

    def settle(self, parameters: TrainedParameters) -> None:
        """Take the outer parameters as a whole once rounds have counted all progress of this node.

        A round during the training leaves the share `mix` of the local parameters, which no later round would count.
        """
        with self.changed:
            is_whole = self.is_started and not self.is_adopting
            if is_whole and not any(self.pending_tokens):
                self._take_outer()
        self.proceed(parameters)

    def wait_for(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `done` is true or the round thread has ended; return False after `timeout_s`."""
        with self.changed:
            return self.changed.wait_for(lambda: done() or self.is_ended, timeout_s)

    def pending_shift(self) -> torch.Tensor:
        """Return a copy of the moves that the local parameters lack; empty without moves."""
        with self.changed:
            return self._shift.clone() if self._shifted and self._shift is not None else torch.empty(0)

    # --- round thread ------------------------------------------------------------------------------------------------

    def weigh(self, contribution: Contribution, fragment: int) -> int:
        """Return the weight of a delta in a round of `fragment`."""
        return contribution.tokens - self.counted[fragment]

    def move(self, bucket: slice, change: Callable[[], object], *, mixes: bool = False) -> None:
        """Change a bucket of the outer parameters by `change`, under the lock of `changed`. mixes: by a round."""
        old = None if self._is_still_at(bucket) else self.outer[bucket].clone()
        change()
        if old is None:
            self._has_moved = True
        else:
            self._add_to_shift(bucket, self.outer[bucket] - old, mixes=mixes)

    def _is_still_at(self, bucket: slice) -> bool:
        return self._is_still and (self._held is None or self._held == self._fragments[self._fragment_of(bucket)])

    def _fragment_of(self, bucket: slice) -> int:
        first = self._fragments[0]
        return 0 if first is None else bucket.start // first.length % len(self._fragments)

    def prepare(self, bucket: slice, *, is_exact: bool) -> torch.Tensor:
        """Return the values of this node in a round. is_exact: the round has one member, and rounds nothing."""
        if self._feedback is None:
            return self.delta[bucket]
        values = torch.add(self.delta[bucket], self.residual[bucket], out=self._sent[bucket])
        if not is_exact:
            # A rounded value passes through the codec unchanged, therefore the average contains these very values.
            data = torch.empty(self._feedback.encoded_bytes(len(values)), dtype=torch.uint8)
            self._feedback.encode(values, data)
            self._feedback.decode(data, values)
        return values

    def include(self, bucket: slice, *, mixes: bool = False) -> None:
        """Note that the outer parameters contain this bucket of the delta. mixes: by a round of the present group."""
        if self._feedback is not None:
            self.residual[bucket] += self.delta[bucket] - self._sent[bucket]
        if not self._is_still_at(bucket):
            self._add_to_shift(bucket, self.delta[bucket], mixes=mixes)
        self.delta[bucket] = 0

    def _add_to_shift(self, bucket: slice, values: torch.Tensor, *, mixes: bool) -> None:
        if self._shift is None:
            self._shift = self._allocate()
        self._shift[bucket] += values * self._taken if mixes else values
        self._shifted.add(self._fragment_of(bucket))

    def begin_adoption(self) -> None:
        """Announce moves that leave the outer parameters mixed until `is_adopting` is False again."""
        with self.changed:
            self.is_adopting = True
            self.is_checkpoint_due = False  # The round that this node was to save has been overtaken.
            if not self.is_started:
                # A resumed checkpoint may contain progress that an earlier process has contributed.
                self._drop_progress()
                self.residual.zero_()
                self.data = DataProgress()
            elif not self._has_moved:
                # The main thread may go on before the adoption ends, therefore the shift begins now.
                self._is_still = False

    def begin_round(self) -> None:
        """Note that a round begins, from which the steps to the next round count."""
        with self.changed:
            if not self._is_begun:
                self._is_begun = True
                self.periods += 1
                self.changed.notify_all()

    def finish_round(self, *, included: float, fragment: int = 0) -> None:
        """End the contribution after a round of `fragment`, which has included this share of its buckets.

        The tokens of a delta that was passed over count in the next delta.
        """
        with self.changed:
            if self.contribution is not None and included:
                self.counted[fragment] = self.contribution.tokens
            is_whole = self._held is not None or len(self.counted) == 1
            self._is_clear = self._is_clear or (included == 1 and is_whole and self._held == self._fragments[fragment])
            self.contribution = None
            self.begin_round()
            self._is_begun = False
            self.moves += 1
            self.notify(is_hurried=False)

    def notify(self, **flags: bool) -> None:
        """Set flags, and wake the main thread."""
        with self.changed:
            for name, value in flags.items():
                setattr(self, name, value)
            self.changed.notify_all()
