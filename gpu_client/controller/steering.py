"""What a session has of rules and commands: they arrive at any moment, and act between two steps.

Alone, a process evaluates and acts within `reported`. With several processes the first one evaluates what all of them
reported, gathered behind the training and read one step later; what is to be done is shared at the call at which ranks
agree anyway, so that all do it after the same step, and no step waits for rules.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from contract.rules.metrics import canonical_name
from gpu_client.controller.commands import Commands
from gpu_client.controller.engine import Engine
from gpu_client.controller.knobs import Knob
from gpu_client.controller.orders import Order
from gpu_client.controller.performing import Hook, Loop, Offer, Performer, Source
from gpu_client.controller.reducing import Gathering, Peers
from gpu_client.controller.signals import Signals

log = logging.getLogger("baton.rules")

STATUS_EVERY_S = 15.0
MAX_TOLD_CHARS = 1000
MAX_OPERANDS = 32

T = TypeVar("T")
Send = Callable[[Mapping[str, Any]], object]


@runtime_checkable
class Skipping(Protocol):
    """A state of the training that can pass over batches."""

    def skip(self, batches: int) -> object: ...


class Steering:
    """The controller of one process."""

    def __init__(self, loop: Loop, peers: Peers, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is in force before `begin`; what is received before it is not lost."""
        self._peers = peers
        self._clock = clock
        self._send: Send | None = None
        self._began = clock()
        self._now_base = 0.0
        self._ran_s = 0.0
        self._started = False
        self._step = 0
        self._epoch: int | None = None
        self._said_at = -math.inf
        self._inbox: deque[Mapping[str, Any]] = deque()
        self._commands = Commands(clock, lambda seq: self._result(seq, "expired", "no step ended in time"))
        self._waiting: list[Order] = []
        """Decided by the first of several processes, and not shared yet."""
        self._shared_rules: Mapping[str, Any] | None = None
        self._rollbacks: list[Mapping[str, Any]] = []
        self._rollbacks_done = 0
        self._left = False
        self.engine = Engine(self._decided)
        self._offer = Offer()
        self._performer = Performer(loop, self._offer, self._leave)
        self._gathering = Gathering(peers) if peers.size > 1 else None
        self._signals = Signals(clock)
        self.live = False
        """Whether there is anything to do at a step: asked at every one."""

    def begin(self, start: Mapping[str, Any], send: Send | None) -> None:
        """Take what the agent said at the beginning; `send` tells the agent, None where there is none.

        start: `rules`, `commands`, `rollbacks`, `ran_s`, as in contract.steering.Control.
        """
        self._send = send
        self._ran_s = float(start.get("ran_s") or 0)
        self._rollbacks = list(start.get("rollbacks") or [])
        if start.get("rules"):
            self._install({"type": "rules", **start["rules"]})
        if self._peers.first:
            for command in start.get("commands") or []:
                self.receive({"type": "command", **command})
        self._refresh()

    # For the loop

    def offer(
        self,
        *,
        knobs: Mapping[str, Knob] | None = None,
        metrics: Mapping[str, Source] | None = None,
        hooks: Mapping[str, Hook] | None = None,
        evaluate: bool = False,
        skip_batch: bool = False,
    ) -> None:
        """Say what rules and commands may do with this loop besides stopping and saving; before `session.resume`.

        knobs: by name, `{"lr": LearningRate(optimizer, scheduler)}`. metrics: the user's own, asked at each step where
            a rule reads them. hooks: actions of the user's own. evaluate: the loop looks at `evaluation_due`.
            skip_batch: it reports before optimizer.step() and looks at `batch_unwanted`.
        """
        self._offer.knobs.update(knobs or {})
        self._offer.metrics.update({canonical_name(name): source for name, source in (metrics or {}).items()})
        self._offer.hooks.update(hooks or {})
        self._offer.evaluates = self._offer.evaluates or evaluate
        # With several processes what a rule says of a batch comes a step too late.
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

    def evaluated(self, step: int, **metrics: object) -> None:
        """An evaluation is done: rules know `loss` of it as `eval.loss`."""
        self.happened("evaluate", step, {f"eval.{name}": value for name, value in metrics.items()})

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches; how long each was waited for is the metric `data.wait`."""
        iterator = iter(batches)
        while True:
            began = self._clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._signals.waited(self._clock() - began)
            yield batch

    # What arrives

    def receive(self, message: Mapping[str, Any]) -> None:
        """Rules or a command from the agent; from any thread."""
        self._inbox.append(self._commands.stamped(message))
        self.live = True

    # What the loop says

    def reported(self, step: int, metrics: Mapping[str, object]) -> None:
        """A step is done. Never raises."""
        self._step = step
        if not self._started:
            self._started = True
            self.happened("start", step - 1, {})
        found = self._signals.at_step(metrics, step=step, reads=self.engine.reads, wall=self._wall(), offer=self._offer)
        if self._gathering is None:
            orders = self._arrived(step)
            if self.engine.active:
                orders += self.engine.observe(found, step=step, now=self._now())
            self._carry_out(orders)
        else:
            gathered = self._gathering.exchange(step, found, self.engine)
            if self._peers.first and gathered is not None:
                self._waiting += self.engine.observe(gathered[1], step=gathered[0], now=self._now())
        self._look_for_epoch(step, metrics)
        self._tell_statuses()

    def happened(self, event: str, step: int, metrics: Mapping[str, object]) -> None:
        """Something else than a step: `evaluate`, `save`, `epoch`, `end`."""
        if event == "save":
            self._signals.saved()
        if not self.live or not self._peers.first:
            return
        if self.engine.active:
            orders = self.engine.observe({**metrics, "step": step}, step=step, now=self._now(), event=event)
            if self._gathering is None:
                self._carry_out(list(orders))
            else:
                self._waiting += orders

    def _look_for_epoch(self, step: int, metrics: Mapping[str, object]) -> None:
        epoch = metrics.get("epoch")
        if isinstance(epoch, int | float) and math.isfinite(epoch) and int(epoch) != self._epoch:
            before, self._epoch = self._epoch, int(epoch)
            if before is not None:
                self.happened("epoch", step, {"epoch": epoch})

    # Several processes

    @property
    def news(self) -> bool:
        """Whether the first process has something for all; False on the others."""
        return bool(self._waiting or self._inbox)

    def share(self) -> None:
        """Every rank calls this at the same moment: what the first one has is done by all of them."""
        mine = None
        if self._peers.first:
            self._waiting += self._arrived(self._step)
            mine = {
                "orders": [order.as_values() for order in self._waiting],
                "rules": self._shared_rules,
            }
            self._waiting, self._shared_rules = [], None
        shared = self._peers.share(mine)
        if not self._peers.first and shared["rules"]:
            self._install(shared["rules"])
        self._carry_out([Order.of_values(values) for values in shared["orders"]])
        self._refresh()

    # Saved and taken back

    @property
    def has_state(self) -> bool:
        """Whether a checkpoint without it would forget something."""
        return self.engine.active or self._commands.sets_seq > 0 or self._rollbacks_done > 0

    def state_dict(self) -> dict[str, Any]:
        """Counters, and what of commands and rollbacks the training's state has in it."""
        return {
            "engine": self.engine.state_dict(),
            "now": self._now(),
            "sets_seq": self._commands.sets_seq,
            "rollbacks": self._rollbacks_done,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where that was saved."""
        self._now_base = float(state["now"]) - (self._clock() - self._began)
        self._commands.sets_seq = int(state["sets_seq"])
        self._rollbacks_done = int(state["rollbacks"])
        self.engine.load_state_dict(state["engine"], step=self._step)

    def resumed(self, step: int, states: Iterable[object]) -> None:
        """The training goes on after `step`: what was decided later than its checkpoint is applied to it."""
        self._step = step
        states = list(states)
        for one in self._rollbacks:
            if int(one["number"]) > self._rollbacks_done:
                self._rolled_back(one, states)
        self._refresh()

    def close(self) -> None:
        """The end of the training, as rules can see it."""
        if self.live:
            self.happened("end", self._step, {})
            self._tell_statuses(at_once=True)
        self._signals.close()

    # Inside

    def _now(self) -> float:
        return self._now_base + self._clock() - self._began

    def _wall(self) -> float:
        return self._ran_s + self._clock() - self._began

    def _refresh(self) -> None:
        self.live = self.engine.active or bool(self._inbox or self._waiting or self._commands.waiting)

    def _arrived(self, step: int) -> list[Order]:
        """What has arrived since the last step. Rules come into force at once, on the first process."""
        orders: list[Order] = []
        while self._inbox:
            message = self._inbox.popleft()
            if message.get("type") == "rules":
                self._install(message)
                self._shared_rules = message
            elif (order := self._commands.order_of(message, step)) is not None:
                orders.append(order)
        orders += self._commands.due_again(step)
        self._refresh()
        return orders

    def _install(self, message: Mapping[str, Any]) -> None:
        revision = int(message["revision"])
        if revision <= self.engine.revision:
            return
        reason = self.engine.install(revision, str(message["text"]), step=self._step)
        self._signals.follow(self.engine.reads)
        told = {"type": "rules_in_force", "revision": self.engine.revision, "step": self._step}
        self._say({**told, "rejected": revision, "reason": reason} if reason else told)
        if reason:
            log.warning("revision %d of the rules is rejected: %s", revision, reason)
        self._said_at = -math.inf

    def _carry_out(self, orders: Iterable[Order]) -> None:
        for order in orders:
            outcome, said = self._performer.perform(order)
            if order.command:
                if outcome == "applied":
                    self._commands.applied(order)
                self._result(order.command, "applied" if outcome == "applied" else "rejected", said)
            told = {"type": f"action.{outcome}", "revision": order.revision, "step": self._step}
            whose = {"rule": order.rule} if order.rule else {"command": order.command}
            self._decided({**told, **whose, "actions": [order.action], "message": said})

    def _leave(self, order: Order) -> bool:
        """Tell the agent how the training ends. Only the first end counts."""
        if self._send is None:
            return False
        if not self._left:
            self._left = True
            ended_by = {"revision": order.revision, "step": order.step, "message": order.why[:MAX_TOLD_CHARS]}
            ended_by |= {"rule": order.rule} if order.rule else {"command": order.command}
            arguments = {**order.arguments, "before_step": order.onset}
            self._say({"type": "leaving", "kind": order.action, "ended_by": ended_by, "arguments": arguments})
        return True

    def _rolled_back(self, one: Mapping[str, Any], states: Iterable[object]) -> None:
        """After a rollback the training goes on otherwise than before: with other batches, at a lower rate."""
        done: list[str] = []
        lacks: list[str] = []
        factor, skip = float(one.get("lr_factor", 1.0)), int(one.get("skip", 0))
        if factor != 1.0:
            scale = getattr(self._offer.knobs.get("lr"), "scale", None)
            if scale is not None:
                scale(factor)
                done.append(f"learning rate times {factor:g}")
            else:
                lacks.append("the learning rate stays: no knob 'lr' is offered before session.resume()")
        if skip:
            data = [state for state in states if isinstance(state, Skipping)]
            for state in data:
                state.skip(skip)
            told = done if data else lacks
            told.append(f"{skip} batches skipped" if data else "no batch is skipped: no state has skip(batches)")
        self._rollbacks_done = int(one["number"])
        kind = "action.failed" if lacks else "action.applied"
        message = "; ".join((*done, *lacks)) or "goes on as it was"
        told_of = {"rule": one["rule"], "step": self._step, "actions": ["rollback"], "message": message}
        self._decided({"type": kind, "revision": self.engine.revision, **told_of})

    def _decided(self, decision: dict[str, Any]) -> None:
        if not self._peers.first:
            return
        decision["operands"] = dict(list(decision.get("operands", {}).items())[:MAX_OPERANDS])
        decision["message"] = str(decision.get("message", ""))[:MAX_TOLD_CHARS]
        level = logging.INFO if decision.get("severity") == "info" else logging.WARNING
        log.log(level, "%s", _line(decision))
        self._say({**decision, "type": "decision", "decision": decision["type"]})
        self._said_at = -math.inf  # how rules stand has changed

    def _result(self, seq: int, status: str, message: str) -> None:
        said = message[:MAX_TOLD_CHARS]
        self._say({"type": "command_result", "seq": seq, "status": status, "step": self._step, "message": said})

    def _tell_statuses(self, *, at_once: bool = False) -> None:
        now = self._clock()
        if self.engine.active and self._peers.first and (at_once or now - self._said_at >= STATUS_EVERY_S):
            self._said_at = now
            self._say({"type": "rule_statuses", "statuses": self.engine.statuses()})

    def _say(self, message: Mapping[str, Any]) -> None:
        if self._send is not None and self._peers.first:
            self._send(message)


def _line(decision: Mapping[str, Any]) -> str:
    """For the job's log: `[rules] step 120: rule.fired spike: loss = 7.25 -> rollback`."""
    who = decision.get("rule") or (f"command {decision['command']}" if decision.get("command") else "")
    operands = ", ".join(f"{text} = {value}" for text, value in decision["operands"].items())
    parts = [f"[rules] step {decision['step']}: {decision['type']} {who}".rstrip(), operands, decision["message"]]
    line = ": ".join(part for part in parts if part)
    actions = ", ".join(decision.get("actions", ()))
    return f"{line} -> {actions}" if actions and decision["type"] == "rule.fired" else line
