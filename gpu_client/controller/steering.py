"""What a session has of rules and commands: they arrive at any moment, and act between two steps.

Alone, a process evaluates and acts within `reported`. With several processes the first one evaluates what all of them
reported after step n once their votes of it are heard, behind step n+1; that there is something to do is in its next
vote, so all do it after step n+2. No other step waits, but for those before a command that is to be done again.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from baton.contract.rules.document.rule import REPORT
from baton.contract.rules.metrics import canonical_name
from gpu_client.controller.action_executor import Hook, Loop, Offer, Performer, Profiler, Source
from gpu_client.controller.epoch_tracker import Ended, Epochs
from gpu_client.controller.event_reporter import Send, Teller
from gpu_client.controller.knobs import Knob
from gpu_client.controller.measurements import Signals, Times
from gpu_client.controller.orders import SAID_ONCE, Commands, Ending, Order, Waiting
from gpu_client.controller.rank_aggregation import Gathering, Observed, Peers
from gpu_client.controller.rollback import Rollbacks
from gpu_client.controller.rule_engine import Engine

log = logging.getLogger("baton.rules")

T = TypeVar("T")
Note = Callable[[int, Mapping[str, object]], None]


class Steering:
    """The controller of one process."""

    def __init__(self, loop: Loop, peers: Peers, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is in force before `begin`; what is received before it is not lost."""
        self._loop = loop
        self._peers = peers
        self._pid = os.getpid()
        self._closed = False
        self._times = Times(clock)
        self._started = False
        self._step = 0
        self._last = False
        self._epochs = Epochs()
        self._inbox: deque[Mapping[str, Any]] = deque()
        self._teller = Teller(peers.first, clock, self._epochs.at)
        self._commands = Commands(clock, self._result)
        self._heard = False  # whether the first process has an agent, without which some ends are for nothing
        self._waiting = Waiting()
        self._unseen: list[Observed] = []
        """What several processes had reported when the checkpoint was taken, where there is only one now."""
        self._shared_rules: Mapping[str, Any] | None = None
        self._rollbacks = Rollbacks()
        self._ending = Ending()
        self._saved_here = False
        self.engine = Engine(self._teller.decided)
        self._offer = Offer()
        self._note: Note | None = None
        self._performer = Performer(
            loop, self._offer, self._leave, lambda *came_of: self._teller.outcome(*came_of, step=self._step)
        )
        self._gathering = Gathering() if peers.size > 1 else None
        self.signals = Signals(clock)
        self.live = False  # whether there is anything to do at a step: asked at every one

    def begin(self, start: Mapping[str, Any], send: Send | None, note: Note | None = None, *, step: int = 0) -> None:
        """Take what the agent said at the beginning; `send` tells the agent, None where there is none.

        note: is told the metrics of evaluations, for the job's history.

        start: `rules`, `commands`, `rollbacks`, `ends`, `ran_s`, as in baton.contract.steering.Control. step: of the
            checkpoint from which the training is to go on.
        """
        self._step = step
        self._teller.send = send
        self._note = note
        self._ending.begin(start.get("ends") if send is not None else None)  # alone, to start again is to go on
        self._times.begin(start.get("ran_s"))
        self._rollbacks.begin(start.get("rollbacks") or [])
        if start.get("rules"):
            self._install({"type": "rules", **start["rules"]})
        if self._peers.first:
            # Before what has come in the meantime: that is newer.
            known = [{"type": "command", **command} for command in start.get("commands") or []]
            self._inbox.extendleft(map(self._commands.stamped, reversed(known)))
        self._refresh()

    # For the loop

    def offer(
        self,
        *,
        knobs: Mapping[str, Knob] | None = None,
        metrics: Mapping[str, Source] | None = None,
        hooks: Mapping[str, Hook] | None = None,
        profiler: Profiler | None = None,
        evaluate: bool = False,
        skip_batch: bool = False,
    ) -> None:
        """Say what rules and commands may do with this loop besides stopping and saving; before `session.resume`.

        knobs: by name, `{"lr": LearningRate(optimizer, scheduler)}`. metrics: the user's own, asked at each step where
            a rule reads them. hooks: actions of the user's own. evaluate: the loop looks at `evaluation_due`.
            profiler: the session's. skip_batch: it reports before optimizer.step() and looks at `batch_unwanted`.
        """
        self._offer.knobs.update(knobs or {})
        self._offer.metrics.update({canonical_name(name): source for name, source in (metrics or {}).items()})
        self._offer.hooks.update(hooks or {})
        self._offer.profiler = profiler or self._offer.profiler
        self._offer.evaluates = self._offer.evaluates or evaluate
        # With several processes what a rule says of a batch comes too late.
        self._offer.skips_batches = self._offer.skips_batches or (skip_batch and self._peers.size == 1)

    @property
    def evaluation_due(self) -> bool:
        """Whether somebody wants an evaluation now; asking takes note of it."""
        wanted, self._performer.evaluation_wanted = self._performer.evaluation_wanted, False
        return wanted

    @property
    def batch_unwanted(self) -> bool:
        """Whether the gradients of this batch are not to be applied; asking takes note of it."""
        unwanted, self._performer.batch_unwanted = self._performer.batch_unwanted, False
        return unwanted

    @property
    def finishing(self) -> bool:
        """Whether a rule or command ended the training as complete: leave the loop and write the outputs."""
        return self._performer.finishing

    def evaluated(self, step: int, metrics: Mapping[str, object] | None = None, **more: object) -> None:
        """An evaluation is done: rules know `loss` of it as `eval.loss`."""
        found = {**(metrics or {}), **more}
        named = {f"eval.{name}": value for name, value in found.items()}
        if self._note is not None:
            self._note(step, named)
        self.happened("evaluate", step, named)

    def measured(self, step: int) -> dict[str, float]:
        """What the agent is told beside a report: mean times of the steps since the report before it."""
        return self.signals.since_told(step)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches; how long each was waited for is the metric `data.wait`. A `ResumableLoader` needs no timing."""
        return self.signals.timed(batches)

    # What arrives

    def receive(self, message: Mapping[str, Any]) -> None:
        """Rules or a command from the agent; from any thread."""
        self._inbox.append(self._commands.stamped(message))
        self.live = True

    # What the loop says

    def reported(self, step: int, metrics: Mapping[str, object], *, last: bool = False, event: str = "") -> None:
        """A step is done; `last`: as far as is known none comes after it. Never raises.

        event: `step`; `log`, of a step that was done already; else a step that has metrics is both.
        """
        event = event or (REPORT if metrics else "step")
        self._step, self._last = step, last
        if self._offer.profiler is not None and self._offer.profiler.active:
            self._offer.profiler.stepped(step)
        if not self._started:
            self._started = True
            self.happened("start", max(0, step - 1), {})
        if "epoch" in metrics:
            self._ended(self._epochs.before(step, metrics))
        engine, active = self.engine, self.engine.active
        found = metrics
        if event != "log":
            reads, offer = engine.reads, self._offer
            found = self.signals.at_step(metrics, step=step, reads=reads, times=self._times, offer=offer)
        if self._gathering is not None:
            if active:
                self._gathering.hand_in(step, found, now=self._times.now(), logged=event != "step")
        elif self._inbox or not active or self._commands.waiting:
            orders = self._arrived(step)
            if engine.active:
                orders += engine.observe(found, step=step, now=self._times.now(), event=event)
            self._carry_out(orders)
        elif decided := engine.observe(found, step=step, now=self._times.now(), event=event):
            self._carry_out(decided)
        if "epoch" in metrics:
            self._ended(self._epochs.after(step, metrics, last=last))
        if self._teller.hears:
            self._tell_statuses()

    def happened(self, event: str, step: int, metrics: Mapping[str, object]) -> None:
        """Something else than a step: `evaluate`, `save`, `epoch`, `end`."""
        if event == "save":
            self.signals.saved()
        if not self.engine.active or not self._peers.first:
            return
        observed = Observed(event, step, self._times.now(), {**metrics, "step": step})
        if self._gathering is None:
            self._carry_out(self._observe([observed]))
        else:
            self._gathering.note(observed)

    def _ended(self, ended: Ended | None) -> None:
        if ended is not None:
            self.happened("epoch", ended.step, {"epoch": ended.epoch})

    # Several processes

    def contribution(self) -> list[float]:
        """What this rank adds to a vote: as many numbers on every rank, none where there are no rules."""
        self._waiting.offer()
        return self._gathering.contribution(self.engine) if self._gathering is not None and self.engine.active else []

    def heard(self, rows: Sequence[Sequence[float]]) -> None:
        """What each of the ranks added, in their order; every rank is told at the same vote."""
        if self._gathering is None or not self.engine.active:
            return
        found = self._gathering.heard(rows, self.engine)
        if self._peers.first:
            self._waiting.add(self._observe(found))

    @property
    def news(self) -> bool:
        """Whether the first process has something for all; False on the others."""
        # Commands are to be done again after some step: which one comes next only the loop knows.
        return bool(self._waiting.offered or self._inbox or self._commands.waiting)

    def share(self) -> None:
        """Every rank calls this at the same moment: what the first one has is done by all of them."""
        mine = None
        if self._peers.first:
            orders = [order.as_values() for order in [*self._waiting.take(), *self._arrived(self._step)]]
            mine = {"orders": orders, "rules": self._shared_rules, "heard": self._teller.hears}
            self._shared_rules = None
        shared = self._peers.share(mine)
        self._heard = shared["heard"]
        if not self._peers.first and shared["rules"]:
            self._install(shared["rules"])
        self._carry_out([Order.of_values(values) for values in shared["orders"]])
        self._refresh()

    def _observe(self, found: Iterable[Observed]) -> list[Order]:
        orders: list[Order] = []
        for event, step, now, metrics, self._teller.odd_one in found:
            orders += self.engine.observe(metrics, step=step, now=now, event=event)
        self._teller.odd_one = 0
        return orders

    # Saved and taken back

    @property
    def has_state(self) -> bool:
        """Whether a checkpoint without it would forget something."""
        return self.engine.active or bool(self._commands.sets_seq or self._rollbacks.done) or self._ending.announced

    def state_dict(self) -> dict[str, Any]:
        """Counters, and what of commands and rollbacks the training's state has in it. Plain JSON."""
        self._loop.settle()
        return {
            "engine": self.engine.state_dict(),
            **self._times.state(),
            "started": self._started,
            **self._epochs.state(),
            "sets_seq": self._commands.sets_seq,
            "rollbacks": self._rollbacks.done,
            **self._waiting.state(),
            "ending": self._ending.state(),
            "unseen": self._gathering.state(self.engine) if self._gathering is not None else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where that was saved."""
        self._times.load_state(state)
        self._started = bool(state.get("started", True))
        self._epochs.load_state(state)
        self._commands.sets_seq = int(state.get("sets_seq", 0))
        self._rollbacks.done = int(state.get("rollbacks", 0))
        self.engine.load_state_dict(state.get("engine", {}), step=self._step)
        if self._peers.first:
            self._waiting.load_state(state)
            if (left := self._ending.left_over(state.get("ending"), self.engine.wants)) is not None:
                self._commands.done_again = left.command
                self._waiting.add_first(left)
            unseen = state.get("unseen", ())
            if self._gathering is not None:
                self._gathering.load_state(unseen)
            else:
                self._unseen = [Observed.of_values(one) for one in unseen]
        self._saved_here = True

    def resumed(self, step: int, states: Iterable[object], *, timed: bool = False) -> None:
        """The training goes on after `step`: later decisions are applied to it. timed: its loaders are, elsewhere."""
        self._step = step
        states = list(states)
        self.signals.follow_loaders(() if timed else states)
        for told in self._rollbacks.made_up_for(self._offer.knobs, states):
            self._teller.decided({**told, "revision": self.engine.revision, "step": step})
        if self._gathering is None:
            # If several processes wrote the checkpoint: what they had not come to.
            orders, self._unseen = [*self._waiting.take_all(), *self._observe(self._unseen)], []
            self._carry_out(orders)
        if self._saved_here:
            # The state was taken before rules could hear that it was saved.
            self._saved_here = False
            self.happened("save", step, {})
        self._refresh()

    def close(self) -> None:
        """The end of the training, as rules can see it. May be called twice, and does nothing in a forked child."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self.engine.active:
            self.happened("end", self._step, {})
            if self._gathering is not None:
                # Who was asked to leave, leaves them to the next attempt: its checkpoint tells of them.
                leaves = self._loop.stopping and not (self._last or self._performer.stopped)
                still, too_late = ([], []) if leaves else self._waiting.take_last()
                for order in too_late:
                    self._teller.outcome(order, "rejected", "the training was over before all did it", step=self._step)
                self._carry_out([*still, *self._observe(self._gathering.rest())])
            self._tell_statuses(at_once=True)
        if self._offer.profiler is not None:
            self._offer.profiler.close()
        self.signals.close()

    # Inside

    def _refresh(self) -> None:
        profiling = self._offer.profiler is not None and self._offer.profiler.active
        self.live = self.engine.active or profiling or bool(self._waiting or self._commands.waiting)
        if self._inbox:  # looked at last: what comes from now on sets it itself
            self.live = True

    def _arrived(self, step: int) -> list[Order]:
        """What has arrived since the last step. Rules come into force at once, on the first process."""
        orders: list[Order] = []
        while self._inbox:
            message = self._inbox.popleft()
            if message.get("type") == "rules":
                if self._install(message):
                    self._shared_rules = message
            elif (order := self._commands.order_of(message, step)) is not None:
                orders.append(order)
        orders += self._commands.due_again(step)
        self._refresh()
        return orders

    def _install(self, message: Mapping[str, Any]) -> bool:
        """Whether those rules are in force now."""
        try:
            revision, text = int(message["revision"]), str(message["text"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            log.warning("rules cannot be read: %s", error)
            return False
        if revision <= self.engine.revision:
            return False
        if self._gathering is not None and not self.engine.active:
            self._gathering.forget()
        reason = self.engine.install(revision, text, step=self._step)
        self.signals.follow(self.engine.reads)
        if reason:
            self._teller.in_force(self.engine.revision, self._step, rejected=revision, reason=reason)
            return False
        self._teller.in_force(revision, self._step)
        return True

    def _carry_out(self, orders: Iterable[Order]) -> None:
        for order in orders:
            if order.action in SAID_ONCE and not self._peers.first:
                continue
            # Several processes act later than it was decided.
            outcome, said = self._performer.perform(replace(order, step=self._step) if order.takes_steps else order)
            if order.command:
                if outcome == "applied":
                    self._commands.applied(order)
                self._result(order.command, "applied" if outcome == "applied" else "rejected", said)
            self._teller.outcome(order, outcome, said, step=self._step)

    def _leave(self, order: Order) -> bool:
        """Tell the agent how the training ends."""
        self._teller.leaving(order)
        heard = self._heard or self._teller.hears
        if heard:
            self._ending.announce(order)
        return heard

    def _result(self, seq: int, status: str, message: str) -> None:
        self._teller.result(seq, status, message, step=self._step)

    def _tell_statuses(self, *, at_once: bool = False) -> None:
        if self.engine.active:
            self._teller.statuses(self.engine.statuses, at_once=at_once)
