"""Receive the rules and commands of a session at any time, and act on them between two steps.

A single process evaluates and acts within `report_step`. With several ranks, the first rank reads the votes after step
n+1 and evaluates the reports of step n; its next vote announces the orders, and all ranks act after step n+2. Steps
wait for a vote only before the replay of a command.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from baton.contract.rules.document.rule import REPORT
from baton.contract.rules.metrics import canonical_name
from gpu_client.controller.action_executor import (
    ActionExecutor,
    LoopCapabilities,
    Profiler,
    TrainingLoop,
    UserHook,
    UserMetric,
)
from gpu_client.controller.epoch_tracker import EndedEpoch, EpochTracker
from gpu_client.controller.event_reporter import EventReporter, Send
from gpu_client.controller.learning_rate import Knob
from gpu_client.controller.measurements import Measurements, TrainingClock
from gpu_client.controller.orders import ONCE_PER_TRAINING, CommandQueue, Order, OrderQueue, Outcome, PendingExit
from gpu_client.controller.rank_aggregation import Observation, RankAggregator, RankPeers
from gpu_client.controller.rollback import RollbackTracker
from gpu_client.controller.rule_engine import RuleEngine
from gpu_client.controller.world_steering import NodeOrder, WorldSteering, find_refusal

log = logging.getLogger("baton.rules")

T = TypeVar("T")
AddMetrics = Callable[[int, Mapping[str, object]], None]


class Steering:
    """Controller of one process."""

    def __init__(
        self,
        loop: TrainingLoop,
        peers: RankPeers,
        *,
        clock: Callable[[], float] = time.monotonic,
        elastic: bool = False,
    ) -> None:
        """Make a controller without rules, which keeps messages until `begin`. elastic: of a node of an elastic job."""
        self._loop = loop
        self._peers = peers
        self._pid = os.getpid()
        self._closed = False
        self._times = TrainingClock(clock)
        self._started = False
        self._step = 0
        self._last = False
        self._epochs = EpochTracker()
        self._inbox: deque[Mapping[str, Any]] = deque()
        self._reporter = EventReporter(peers.first, clock, self._epochs.at)
        self._commands = CommandQueue(clock, self._result)
        self._first_has_agent = False  # Exits require an agent.
        self._orders = OrderQueue()
        self._unevaluated: list[Observation] = []
        """Reports of several ranks from the checkpoint, in a run with a single rank."""
        self._shared_rules: Mapping[str, Any] | None = None
        self._rollbacks = RollbackTracker()
        self._ending = PendingExit()
        self._restored = False
        self.engine = RuleEngine(self._decide)
        self.world = WorldSteering(self.engine, self._times.now, self._report_known) if elastic else None
        """Rules and commands of all nodes; None outside of elastic jobs."""
        self.note_metrics: Callable[[Mapping[str, object]], object] = lambda found: None
        """Receives this node's metrics for the other nodes."""
        self._capabilities = LoopCapabilities()
        self._add_metrics: AddMetrics | None = None
        self._executor = ActionExecutor(
            loop,
            self._capabilities,
            self._leave,
            lambda *outcome: self._reporter.report_outcome(*outcome, step=self._step),
        )
        self._aggregator = RankAggregator() if peers.size > 1 else None
        self.signals = Measurements(clock)
        self.live = False  # True if a step has work; every step reads the flag.

    def begin(
        self, start: Mapping[str, Any], send: Send | None, note: AddMetrics | None = None, *, step: int = 0
    ) -> None:
        """Apply the start state. `send` sends a message to the agent; None without an agent.

        note: receives the metrics of evaluations, for the job's history.

        start: `rules`, `commands`, `rollbacks`, `ends`, `ran_s`, as in `Control` of the contract. step: step of the
            checkpoint from which the training continues.
        """
        self._step = step
        self._reporter.send = send
        self._add_metrics = note
        # Without an agent, a restart continues the training.
        self._ending.begin(start.get("ends") if send is not None and self.world is None else None)
        self._times.begin(start.get("ran_s"))
        self._rollbacks.begin(start.get("rollbacks") or [])
        if start.get("rules"):
            self._install({"type": "rules", **start["rules"]})
        if self._peers.first:
            # Messages in the inbox are newer than the start state, therefore the start's commands go to the front.
            known = [{"type": "command", **command} for command in start.get("commands") or []]
            self._inbox.extendleft(map(self._commands.with_deadline, reversed(known)))
        self._refresh()

    # Calls of the loop

    def offer(
        self,
        *,
        knobs: Mapping[str, Knob] | None = None,
        metrics: Mapping[str, UserMetric] | None = None,
        hooks: Mapping[str, UserHook] | None = None,
        profiler: Profiler | None = None,
        evaluate: bool = False,
        skip_batch: bool = False,
    ) -> None:
        """Declare capabilities of this loop besides stopping and saving; before `session.resume`.

        knobs: knobs by name, `{"lr": LearningRate(optimizer, scheduler)}`. metrics: the user's metrics, called at each
            step if a rule reads the metric. hooks: the user's actions. evaluate: the loop reads `evaluation_due`.
            profiler: the session's profiler. skip_batch: the loop reports before optimizer.step() and reads
            `batch_unwanted`.
        """
        self._capabilities.knobs.update(knobs or {})
        self._capabilities.metrics.update({canonical_name(name): source for name, source in (metrics or {}).items()})
        self._capabilities.hooks.update(hooks or {})
        self._capabilities.profiler = profiler or self._capabilities.profiler
        self._capabilities.evaluates = self._capabilities.evaluates or evaluate
        # With several ranks the decision about a batch comes after the batch, therefore only one rank can skip a batch.
        self._capabilities.skips_batches = self._capabilities.skips_batches or (skip_batch and self._peers.size == 1)

    @property
    def evaluation_due(self) -> bool:
        """Return True once after each request for an evaluation."""
        requested, self._executor.evaluation_requested = self._executor.evaluation_requested, False
        return requested

    @property
    def batch_unwanted(self) -> bool:
        """Return True once after each request to skip the gradients of this batch."""
        requested, self._executor.skip_requested = self._executor.skip_requested, False
        return requested

    @property
    def finishing(self) -> bool:
        """Return True after a rule or command ended the training as complete: leave the loop, write the outputs."""
        return self._executor.finishing

    def evaluated(self, step: int, metrics: Mapping[str, object] | None = None, **more: object) -> None:
        """Report an evaluation; in rules, its metric `loss` is `eval.loss`."""
        found = {**(metrics or {}), **more}
        named = {f"eval.{name}": value for name, value in found.items()}
        if self._add_metrics is not None:
            self._add_metrics(step, named)
        self.report_event("evaluate", step, named)

    def measured(self, step: int) -> dict[str, float]:
        """Return the mean times of the steps since the last report to the agent."""
        return self.signals.since_last_report(step)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches and measure each wait as the metric `data.wait`; a `ResumableLoader` measures its own."""
        return self.signals.timed(batches)

    # Messages

    def receive(self, message: Mapping[str, Any]) -> None:
        """Receive rules or a command of the agent. Thread-safe."""
        self._inbox.append(self._commands.with_deadline(message))
        self.live = True

    # Reports of the loop

    def report_step(self, step: int, metrics: Mapping[str, object], *, last: bool = False, event: str = "") -> None:
        """Report a step; `last`: no further step is known. Never raises.

        event: `step`; `log` for a further report of a step; by default a step with metrics is both.
        """
        event = event or (REPORT if metrics else "step")
        self._step, self._last = step, last
        if self._capabilities.profiler is not None and self._capabilities.profiler.active:
            self._capabilities.profiler.stepped(step)
        if not self._started:
            self._started = True
            self.report_event("start", max(0, step - 1), {})
        if "epoch" in metrics:
            self._ended(self._epochs.before(step, metrics))
        found = metrics
        if event != "log":
            reads, capabilities = self.engine.reads, self._capabilities
            found = self.signals.step_metrics(
                metrics, step=step, reads=reads, times=self._times, capabilities=capabilities
            )
        self._evaluate(step, found, event)
        if "epoch" in metrics:
            self._ended(self._epochs.after(step, metrics, last=last))
        if self._reporter.connected:
            self._report_statuses()

    def _evaluate(self, step: int, found: Mapping[str, object], event: str) -> None:
        engine, active = self.engine, self.engine.active
        if self.world is not None:
            self._follow_world(self.world, step, found)
        elif self._aggregator is not None:
            if active:
                self._aggregator.add_step(step, found, now=self._times.now(), logged=event != "step")
        elif self._inbox or not active or self._commands.has_replays:
            orders = self._arrived(step)
            if engine.active:
                orders += engine.observe(found, step=step, now=self._times.now(), event=event)
            self._carry_out(orders)
        elif decided := engine.observe(found, step=step, now=self._times.now(), event=event):
            self._carry_out(decided)

    def _follow_world(self, world: WorldSteering, step: int, metrics: Mapping[str, object]) -> None:
        """Hand this node's metrics and messages to the world, and carry out the world's orders.

        Rules count rounds; reports name the step of the script, which also names its checkpoints.
        """
        if self.engine.active:
            self.note_metrics(metrics)
        if self._aggregator is None:
            self._arrived(step)
        for decision in world.take_decisions():
            self._reporter.report_decision({**decision, "step": step})
        for one in world.take_orders():
            order = replace(one.order, step=step)
            if self._aggregator is None:
                self._carry_out([order], one)
            elif one.saves or order.action != "save":
                self._orders.add([order])

    def report_event(self, event: str, step: int, metrics: Mapping[str, object]) -> None:
        """Report an event that is no step: `evaluate`, `save`, `epoch`, `end`."""
        if event == "save":
            self.signals.checkpoint_saved()
        if self.world is not None:
            self.note_metrics(metrics)
            return
        if not self.engine.active or not self._peers.first:
            return
        observed = Observation(event, step, self._times.now(), {**metrics, "step": step})
        if self._aggregator is None:
            self._carry_out(self._observe([observed]))
        else:
            self._aggregator.add_event(observed)

    def _ended(self, ended: EndedEpoch | None) -> None:
        if ended is not None:
            self.report_event("epoch", ended.step, {"epoch": ended.epoch})

    # Several ranks

    def contribution(self) -> list[float]:
        """Return the numbers of this rank's vote: equally many on every rank, none without rules."""
        self._orders.mark_announced()
        return self._aggregator.contribution(self.engine) if self._aggregator is not None and self.engine.active else []

    def receive_rows(self, rows: Sequence[Sequence[float]]) -> None:
        """Receive the numbers of all ranks, ordered by rank; all ranks receive the numbers at one vote."""
        if self._aggregator is None or not self.engine.active:
            return
        found = self._aggregator.reduce_rows(rows, self.engine)
        if self._peers.first:
            self._orders.add(self._observe(found))

    @property
    def has_news(self) -> bool:
        """Return True if the first rank has news for all ranks; False on other ranks."""
        # Only the loop knows the next step, therefore waiting replays count as news.
        return bool(self._orders.announced or self._inbox or self._commands.has_replays)

    def share(self) -> None:
        """Broadcast the first rank's orders and rules, and carry them out. Collective call of all ranks."""
        mine = None
        if self._peers.first:
            orders = [order.as_values() for order in [*self._orders.take(), *self._arrived(self._step)]]
            mine = {"orders": orders, "rules": self._shared_rules, "heard": self._reporter.connected}
            self._shared_rules = None
        shared = self._peers.share(mine)
        self._first_has_agent = shared["heard"]
        if not self._peers.first and shared["rules"]:
            self._install(shared["rules"])
        leads = self.world is None or bool(self.world.leads)
        for values in shared["orders"]:
            order = Order.of_values(values)
            self._carry_out([order], None if self.world is None else NodeOrder(order, saves=True, leads=leads))
        self._refresh()

    def _observe(self, found: Iterable[Observation]) -> list[Order]:
        orders: list[Order] = []
        for event, step, now, metrics, self._reporter.nonfinite_rank in found:
            orders += self.engine.observe(metrics, step=step, now=now, event=event)
        self._reporter.nonfinite_rank = 0
        return orders

    # State

    @property
    def has_state(self) -> bool:
        """Return True if a checkpoint needs the state."""
        return (
            self.engine.active
            or self.world is not None
            or bool(self._commands.sets_seq or self._rollbacks.done)
            or self._ending.announced
        )

    def state_dict(self) -> dict[str, Any]:
        """Return counters, orders, and the commands and rollbacks that the training's state contains. Plain JSON."""
        self._loop.settle()
        with self._guard:
            engine = self.engine.state_dict()
        return {
            "engine": engine,
            "world": None if self.world is None else self.world.state_dict(),
            **self._times.state(),
            "started": self._started,
            **self._epochs.state(),
            "sets_seq": self._commands.sets_seq,
            "rollbacks": self._rollbacks.done,
            **self._orders.state(),
            "ending": self._ending.state(),
            "unseen": self._aggregator.state(self.engine) if self._aggregator is not None else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._times.load_state(state)
        self._started = bool(state.get("started", True))
        self._epochs.load_state(state)
        self._commands.sets_seq = int(state.get("sets_seq", 0))
        self._rollbacks.done = int(state.get("rollbacks", 0))
        self.engine.load_state_dict(state.get("engine", {}), step=self._step)
        if self.world is not None:
            self.world.load_state_dict(state.get("world") or {})
        if self._peers.first:
            self._orders.load_state(state)
            if (left := self._ending.unreported(state.get("ending"), self.engine.is_in_force)) is not None:
                self._commands.restored_seq = left.command
                self._orders.add_first(left)
            saved = state.get("unseen", ())
            if self._aggregator is not None:
                self._aggregator.load_state(saved)
            else:
                self._unevaluated = [Observation.of_values(one) for one in saved]
        self._restored = True

    def resume(self, step: int, states: Iterable[object], *, timed: bool = False) -> None:
        """Continue after `step`, with later rollbacks and orders. timed: another object measures the loaders."""
        self._step = step
        states = list(states)
        self.signals.follow_loaders(() if timed else states)
        for decision in self._rollbacks.apply_missing(self._capabilities.knobs, states):
            self._reporter.report_decision({**decision, "revision": self.engine.revision, "step": step})
        if self._aggregator is None:
            # Several ranks wrote the checkpoint, and this single rank processes their unevaluated reports.
            orders, self._unevaluated = [*self._orders.take_all(), *self._observe(self._unevaluated)], []
            self._carry_out(orders)
        if self._restored:
            # The checkpoint precedes the evaluation of its own `save` event, therefore the event follows now.
            self._restored = False
            self.report_event("save", step, {})
        self._refresh()

    def close(self) -> None:
        """Report the end of the training to the rules. May be called twice; does nothing in a forked child."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self.world is not None:
            self._follow_world(self.world, self._step, {})
            self._report_statuses(at_once=True)
        elif self.engine.active:
            self.report_event("end", self._step, {})
            if self._aggregator is not None:
                # The checkpoint of a training that stops on request contains these orders for the next attempt.
                leaves = self._loop.stopping and not (self._last or self._executor.stopped)
                in_time, too_late = ([], []) if leaves else self._orders.take_last()
                for order in too_late:
                    self._reporter.report_outcome(
                        order, "rejected", "the training ended before all ranks acted", step=self._step
                    )
                self._carry_out([*in_time, *self._observe(self._aggregator.take_rest())])
            self._report_statuses(at_once=True)
        if self._capabilities.profiler is not None:
            self._capabilities.profiler.close()
        self.signals.close()

    # Internals

    def _refresh(self) -> None:
        profiling = self._capabilities.profiler is not None and self._capabilities.profiler.active
        has_orders = bool(self._orders or self._commands.has_replays)
        self.live = self.engine.active or self.world is not None or profiling or has_orders
        if self._inbox:  # The read comes last, because a later message sets the flag itself.
            self.live = True

    def _arrived(self, step: int) -> list[Order]:
        """Return the orders of the messages since the last step. The first rank installs new rules at once."""
        orders: list[Order] = []
        while self._inbox:
            message = self._inbox.popleft()
            if message.get("type") == "rules":
                if self._install(message):
                    self._shared_rules = message
            elif self.world is not None:
                self.world.add_command(message, step, self._commands.is_expired)
            elif (order := self._commands.order_of(message, step)) is not None:
                orders.append(order)
        orders += self._commands.due_replays(step)
        self._refresh()
        return orders

    def _install(self, message: Mapping[str, Any]) -> bool:
        """Put rules into force. Returns False for rejected or outdated rules."""
        try:
            revision, text = int(message["revision"]), str(message["text"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            log.warning("rules cannot be read: %s", error)
            return False
        if revision <= self.engine.revision:
            return False
        if self._aggregator is not None and not self.engine.active:
            self._aggregator.clear()
        with self._guard:
            reason = self.engine.install(revision, text, step=self._step)
        self.signals.follow(self.engine.reads)
        if reason:
            self._reporter.report_rules(self.engine.revision, self._step, rejected=revision, reason=reason)
            return False
        self._reporter.report_rules(revision, self._step)
        return True

    def _carry_out(self, orders: Iterable[Order], node: NodeOrder | None = None) -> None:
        """Carry out orders. `node`: the part of this node in a world's order."""
        for order in orders:
            if order.action in ONCE_PER_TRAINING and not self._peers.first:
                continue
            # Several ranks act some steps after the decision, therefore the order gets the present step.
            outcome, text = self._execute(replace(order, step=self._step) if order.takes_steps else order, node)
            if order.command:
                if outcome == "applied":
                    self._commands.applied(order)
                self._result(order.command, "applied" if outcome == "applied" else "rejected", text)
            if node is None or node.leads:
                self._reporter.report_outcome(order, outcome, text, step=self._step)

    def _execute(self, order: Order, node: NodeOrder | None) -> tuple[Outcome, str]:
        if node is not None and (reason := find_refusal(order.action)):
            return "rejected", f"the training has several nodes: {reason}"
        if node is not None and order.action == "save" and not node.saves:
            return "applied", "the node that saves this round writes the checkpoint"
        return self._executor.execute(order)

    def _leave(self, order: Order) -> bool:
        """Send the exit to the agent. Returns False without an agent."""
        self._reporter.report_exit(order)
        reached = self._first_has_agent or self._reporter.connected
        if reached:
            self._ending.announce(order)
        return reached

    def _result(self, seq: int, status: str, message: str) -> None:
        self._reporter.report_command(seq, status, message, step=self._step)

    @property
    def _guard(self) -> AbstractContextManager[object]:
        """Return the lock of an engine that the round thread uses, too."""
        return nullcontext() if self.world is None else self.world.lock

    def _decide(self, decision: dict[str, Any]) -> None:
        if self.world is None:
            self._reporter.report_decision(decision)
        else:
            self.world.add_decision(decision)

    def _report_known(self, seq: int) -> None:
        self._result(seq, "applied", "before the checkpoint that the training resumed from")

    def _report_statuses(self, *, at_once: bool = False) -> None:
        if self.engine.active and (self.world is None or self.world.leads):
            with self._guard:
                self._reporter.report_statuses(self.engine.statuses, at_once=at_once)
