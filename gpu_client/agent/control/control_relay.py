"""Relay rules and commands from heartbeats to the training, and the training's answers back.

Heartbeats also carry reports on damaged ring objects. The relay keeps each answer until the control plane has accepted
the answer (at least once). The relay decides nothing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from baton.contract.base import MAX_STEP
from baton.contract.worker.calls import HeartbeatAnswer
from baton.contract.worker.control import (
    MAX_DECISIONS,
    MAX_RESULTS,
    MAX_STATUSES,
    Command,
    CommandResult,
    Control,
    ControlReport,
    Decision,
    EndedBy,
    LeaveByRule,
    Rollback,
    RuleStatus,
)
from gpu_client.agent.control.channel_messages import TrainingProgress
from gpu_client.agent.control.channel_server import ChannelServer
from gpu_client.agent.control.preset_monitor import PresetMonitor

logger = logging.getLogger("baton.job")

MAX_WAITING = 2000
"""Decisions that wait for acceptance; the relay counts and drops later decisions."""
MAX_REASON_CHARS = 1024
MAX_QUARANTINED_REPORTED = 20
"""Damaged objects with a report each in an attempt; afterwards a report follows each doubling of the count, and the
end of the attempt."""
MAX_QUARANTINED = 100_000
"""Largest count of damaged objects."""
UNSTEERED_AFTER_S = 60.0
"""Seconds without a connection after which a training counts as unsteered, which means that no rule can act."""
UNSTEERED = "the training does not use Baton's session, so nothing in it can go by rules"


class RuleExit(NamedTuple):
    """End of the training by a rule or command."""

    kind: str
    """`stop`, `rollback`, `pause` or `requeue`."""
    ended_by: EndedBy
    arguments: Mapping[str, Any]

    @property
    def failed(self) -> bool:
        """Return True if the rule fails the job."""
        return self.kind == "stop" and self.arguments.get("outcome") == "failed"

    @property
    def reason(self) -> str:
        """Return the reason in words."""
        source = f"rule {self.ended_by.rule}" if self.ended_by.rule else f"command {self.ended_by.command}"
        return f"{source} at step {self.ended_by.step}: {self.ended_by.message}".rstrip(": ")


class ControlRelay:
    """Relay of one attempt's rules and commands.

    The heartbeat thread calls `report` and `acknowledge`, the attempt's thread all other methods.
    """

    def __init__(
        self,
        control: Control | None,
        *,
        attempt: int = 1,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`attempt`: number of the attempt. `now`: seconds since 1970, for records only. `clock`: monotonic seconds."""
        self._control = control or Control()
        self._now = now
        self._clock = clock
        self._lock = threading.Lock()
        self._channel: ChannelServer | None = None
        self._base = 0
        """Job steps before the present recipe step. Each recipe step counts its training steps from 0."""
        self._started_at: float | None = None
        self._rules = self._control.rules
        self._preset_revision = 0
        """Revision of the rules that the presets have applied."""
        self._any_rule = True
        """True if `_preset_revision` contains a rule of the job itself."""
        self._presets = PresetMonitor(self._preset_decided, attempt=attempt, clock=clock)
        self._commands: dict[int, Command] = {command.seq: command for command in self._control.commands}
        self._known_since: dict[int, tuple[float, float]] = {
            seq: (clock(), command.expires_at - command.issued_at) for seq, command in self._commands.items()
        }
        """Arrival time of a waiting command and its time to live at arrival, in seconds."""
        self._received = self._control.commands_seq
        self._in_force = 0
        self._in_force_step: int | None = None
        self._rejected: int | None = None
        self._reason = ""
        self._results: list[CommandResult] = []
        self._decisions: list[Decision] = []
        self._number = 0
        self._statuses: list[RuleStatus] | None = None
        self._left_out = 0
        self._quarantined: set[tuple[str, str]] = set()
        """Damaged objects of the attempt, by ring and key."""
        self._quarantined_reported = 0
        self._unreported: dict[str, Any] | None = None
        """The newest damaged object without a report."""
        self._accepts_exit = True
        self.rule_exit: RuleExit | None = None
        """Rule exit in progress; None without a rule exit."""

    # Called by the attempt

    def write_start(self, path: Path) -> None:
        """Write the training process's initial rules and commands (BATON_CONTROL). Raises OSError."""
        with self._lock:
            start = self._control.model_dump(mode="json")
            if "ends" not in self._control.model_fields_set:
                del start["ends"]  # The control plane has sent no count, and 0 would be false.
            start["rules"] = self._rules.model_dump(mode="json") if self._rules else None
            start["commands"] = [self._sendable(one) for one in self._commands.values() if self._is_current(one)]
            # A later recipe step begins with a checkpoint whose number is one below the step's first step.
            start["rollbacks"] = [one for one in start["rollbacks"] if one["to_step"] >= self._base - 1]
        path.write_text(json.dumps(start), encoding="utf-8")

    def attach(
        self,
        channel: ChannelServer,
        *,
        base: int = 0,
        storing: Callable[[], bool] = lambda: False,
        log_line: Callable[[str], object] = lambda line: None,
        missed: Callable[[], int] = lambda: 0,
    ) -> None:
        """Attach to the channel of the next training process. Call before `write_start`.

        base: job steps before this recipe step. The presets use the other arguments.
        """
        self._presets.attach(channel, base=base, storing=storing, log_line=log_line, missed=missed)
        with self._lock:
            self._channel, self._base = channel, base
            self._started_at = self._clock()
            self._in_force = 0
            # The next step, or the next try of this step, may end in another way.
            self.rule_exit, self._accepts_exit = None, True

    def detach(self) -> None:
        """Detach from an ended process, after `poll` has taken its messages."""
        self._presets.detach()
        with self._lock:
            self._report_quarantined()

    def poll(self) -> None:
        """Process the training's messages since the last call, and evaluate the presets."""
        self._poll_presets()
        channel = self._channel
        for message in channel.take_steering() if channel else ():
            try:
                with self._lock:
                    self._apply_message(message)
            except (ValidationError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
                logger.warning("ignored a message of the training on rules: %s: %s", message.get("type"), error)

    def stuck_s(self) -> float:
        """Return the seconds without progress of a training that is stuck by the presets; 0.0 otherwise."""
        return self._presets.stuck_s()

    # Called by the heartbeats

    def report(self, progress: TrainingProgress | None = None) -> ControlReport:
        """Return the unaccepted decisions and results, and the rules in force.

        `progress` supplies NaN and infinite values.
        """
        more = {"nonfinite": dict(progress.nonfinite)} if progress and progress.nonfinite else {}
        with self._lock:
            self._detect_unsteered()
            return ControlReport(
                rules_revision=self._rules.revision if self._rules else 0,
                commands_seq=self._received,
                step=self._in_force_step if self._rules and self._in_force == self._rules.revision else None,
                rejected=self._rejected,
                reason=self._reason,
                results=self._results[:MAX_RESULTS],
                decisions=self._decisions[:MAX_DECISIONS],
                statuses=self._statuses,
                **more,
            )

    @property
    def has_backlog(self) -> bool:
        """Return True if one report cannot hold all decisions and results."""
        return len(self._decisions) > MAX_DECISIONS or len(self._results) > MAX_RESULTS

    def acknowledge(self, report: ControlReport, answer: HeartbeatAnswer | None) -> None:
        """Drop the accepted decisions and results; send the answer's new rules and commands to the training."""
        with self._lock:
            self._results = [one for one in self._results if one not in report.results]
            accepted = max((one.number for one in report.decisions), default=0)
            self._decisions = [one for one in self._decisions if one.number > accepted]
            if self._statuses is report.statuses or self._statuses == report.statuses:
                self._statuses = None
            if answer is None:
                return
            rules = answer.rules
            if rules is not None and rules.revision > (self._rules.revision if self._rules else 0):
                self._rules = rules
                if self._channel is not None:
                    self._channel.send_steering({"type": "rules", "revision": rules.revision, "text": rules.text})
            for command in answer.commands:
                if command.seq > self._received and command.seq not in self._known_since:
                    self._commands[command.seq] = command
                    self._known_since[command.seq] = self._clock(), command.expires_at - answer.server_time
                    if self._channel is not None:
                        self._channel.send_steering({"type": "command", **self._sendable(command)})
            if answer.commands_seq is not None:
                self._received = max(self._received, answer.commands_seq)

    # Lock held

    def _is_current(self, command: Command) -> bool:
        """Return True unless another recipe step, which is another training, applied the command."""
        return command.status == "waiting" or command.step is None or command.step >= self._base

    def _job_step(self, step: Any) -> Any:
        """Convert a step of the training to a step of the job. The consumer checks values that are no steps."""
        return min(step + self._base, MAX_STEP) if self._base and type(step) is int else step

    def _sendable(self, command: Command) -> dict[str, Any]:
        record = command.model_dump(mode="json", include={"seq", "kind", "arguments", "status", "step"})
        if command.step is not None:
            record["step"] = command.step - self._base
        if command.status == "waiting":
            since, life_s = self._known_since[command.seq]
            record["expires_in_s"] = life_s - (self._clock() - since)
        return record

    def _apply_message(self, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind == "rules_in_force":
            # An invalid value would break every later heartbeat, therefore the relay validates the record here.
            record = ControlReport(
                rules_revision=message["revision"],
                commands_seq=0,
                step=self._job_step(message["step"]),
                rejected=message.get("rejected"),
                reason=str(message.get("reason", ""))[:MAX_REASON_CHARS],
            )
            self._in_force, self._in_force_step = record.rules_revision, record.step
            self._rejected, self._reason = record.rejected, record.reason
        elif kind == "rule_statuses":
            self._statuses = [RuleStatus.model_validate(one) for one in message["statuses"][:MAX_STATUSES]]
        elif kind == "decision":
            self._decide({**message, "step": self._job_step(message["step"])})
        elif kind == "quarantined":
            self._note_quarantined(message)
        elif kind == "command_result":
            fields = {name: message[name] for name in CommandResult.model_fields}
            result = CommandResult.model_validate({**fields, "step": self._job_step(fields["step"])})
            self._results.append(result)
            known = self._commands.get(result.seq)
            if known is not None and result.status == "applied" and known.kind == "set":
                self._commands[result.seq] = known.model_copy(update={"status": "applied", "step": result.step})
            else:
                self._commands.pop(result.seq, None)
        elif kind == "leaving" and self._accepts_exit:
            origin, arguments = dict(message["ended_by"]), dict(message["arguments"])
            if "before_step" in arguments:
                arguments["before_step"] = self._job_step(arguments["before_step"])
            ended_by = EndedBy.model_validate({**origin, "step": self._job_step(origin["step"])})
            rule_exit = RuleExit(str(message["kind"]), ended_by, arguments)
            if rule_exit.kind != "stop":
                encode_rule_exit(rule_exit)  # Raises for an exit that no report can carry: such an exit must not begin.
            self.rule_exit, self._accepts_exit = rule_exit, False

    def _poll_presets(self) -> None:
        """Evaluate the presets in the attempt's thread and without the lock, so that heartbeats do not wait."""
        rules = self._rules
        if rules is not None and rules.revision != self._preset_revision:
            self._preset_revision = rules.revision
            self._any_rule = self._presets.set_rules(rules.text)
        self._presets.poll()

    def _preset_decided(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._decide(message)

    def _decide(self, message: Mapping[str, Any]) -> None:
        if len(self._decisions) >= MAX_WAITING:
            if not self._left_out:
                logger.warning(
                    "more than %d decisions of rules wait for acceptance: later ones are dropped", MAX_WAITING
                )
            self._left_out += 1
            return
        fields = {name: message[name] for name in Decision.model_fields if name in message}
        fields |= {"number": self._number + 1, "type": message["decision"], "at": int(self._now())}
        self._decisions.append(Decision.model_validate(fields))
        self._number += 1

    def _note_quarantined(self, message: Mapping[str, Any]) -> None:
        """Count a damaged object once, even if several processes report it. The decision names the last step."""
        progress = self._channel.progress() if self._channel is not None else None
        count = len(self._quarantined) + 1
        record = Decision(
            number=1,
            type="ring.quarantined",
            step=self._job_step(progress.step if progress is not None else 0),
            rank=message.get("rank", 0),
            at=int(self._now()),
            ring=message["ring"],
            object=message["object"],
            objects=count,
            message=str(message.get("message", ""))[:MAX_REASON_CHARS],
        )
        which = message["ring"], message["object"]
        if which in self._quarantined or count > MAX_QUARANTINED:
            return
        self._quarantined.add(which)
        self._unreported = {**record.model_dump(exclude={"type"}), "decision": record.type}
        if count <= MAX_QUARANTINED_REPORTED or count >= 2 * self._quarantined_reported:
            self._report_quarantined()

    def _report_quarantined(self) -> None:
        untold, self._unreported = self._unreported, None
        if untold is not None:
            self._decide(untold)
            self._quarantined_reported = len(self._quarantined)

    def _detect_unsteered(self) -> None:
        """Reject the rules of a training without a session, because such a training never answers."""
        if not self._any_rule:
            return
        if self._rules is None or self._in_force or self._rejected or self._channel is None or self._started_at is None:
            return
        if self._clock() - self._started_at > UNSTEERED_AFTER_S and not self._channel.has_steered_peer():
            self._rejected, self._reason = self._rules.revision, UNSTEERED


def encode_rule_exit(rule_exit: RuleExit) -> LeaveByRule:
    """Convert to the wire model. Raises ValidationError for an unknown kind or value."""
    arguments = rule_exit.arguments
    rollback = None
    if rule_exit.kind == "rollback":
        rollback = Rollback.model_validate(
            {name: arguments[name] for name in Rollback.model_fields if name in arguments}
        )
    return LeaveByRule(
        kind=rule_exit.kind,
        ended_by=rule_exit.ended_by,
        rollback=rollback,
        exclude_host=rule_exit.kind == "requeue" and bool(arguments.get("exclude_host")),
    )
