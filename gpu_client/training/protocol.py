"""Define the messages between trainer and agent (JSON lines over a Unix stream socket, protocol 1) and exit codes.

The module imports the standard library only.

trainer -> agent::

    {"type": "hello", "pid": 123, "protocol": 1, "steering": true}
    {"type": "progress", "step": 120, "total": 500, "metrics": {"loss": 0.5}}
    {"type": "progress", "step": 0, "total": 500, "metrics": {...}, "phase": {"name": "images", "done": 7, "total": 20}}
    {"type": "progress", "step": 120, "total": 500, "metrics": {"lr": 0.1}, "nonfinite": {"loss": "nan"}}
    {"type": "progress", "step": 121, "total": 500, "metrics": {"loss": 0.4, "lr": 0.1},
      "points": [{"step": 120, "metrics": {"eval.loss": "inf"}}, {"step": 121, "metrics": {"loss": 0.4}}],
      "signals": {"step.time": 0.4, "data.wait": 0.1}}
    {"type": "checkpoint", "step": 100, "path": "/abs/output/checkpoint-100", "metrics": {"loss": 0.5}}
    {"type": "checkpoint", "step": 120, "path": "/abs/arena/checkpoint", "metrics": {"loss": 0.4}, "stall_s": 0.15}
    {"type": "artifact", "path": "/abs/output/validation/step-000100-0.png"}
    {"type": "rules_in_force", "revision": 2, "step": 120}      (with "rejected" and "reason" after a rejection)
    {"type": "rule_statuses", "statuses": [{"rule": "spike", "state": "armed", "said": "armed", "fires": 0}]}
    {"type": "decision", "decision": "rule.fired", "rule": "spike", "step": 120, "operands": {}, "actions": ["stop"]}
    {"type": "command_result", "seq": 3, "status": "applied", "step": 120, "message": "lr: 0.1 -> 0.05"}
    {"type": "leaving", "kind": "rollback", "ended_by": {"rule": "spike", "step": 120}, "arguments": {"to": "last"}}
    {"type": "quarantined", "ring": "/mnt/ring", "object": "samples/w/00000001-0000000002", "message": "...", "rank": 0}

agent -> trainer::

    {"type": "directive", "directive": "checkpoint"}
    {"type": "directive", "directive": "stacks"}
    {"type": "directive", "directive": "stop", "reason": "cancel", "checkpoint": false, "grace_s": 30.0}
    {"type": "rules", "revision": 2, "text": "rules: []"}
    {"type": "command", "seq": 3, "kind": "set", "arguments": {"knob": "lr", "factor": 0.5}, "expires_in_s": 600}

The path of a checkpoint is a directory of the output directory, or of the arena (BATON_ARENA: shared memory that the
agent makes). The agent owns a checkpoint in the arena until the agent removes the marker `baton.json`; no message
reports the removal, because a lost message would block the arena forever. `stall_s`: duration of the training's stall
in seconds. An artifact is a finished file of the output directory for display before the end. `phase`: the progress of
work between two steps; the metrics repeat its numbers as `<name>` and `<name>_total`. `total` is null if unknown.
`leaving`: the report of a training that is about to end; `gpu_client/controller` describes rules and commands.
`quarantined`: the report of a damaged and excluded ring object; any process of the job may send the message,
repeatedly, on a connection of its own, and without a hello (`gpu_client/ring/core/damage_report.py`).

Lines are UTF-8 and at most `MAX_LINE_BYTES` long; lines with rules have at most `MAX_RULES_LINE_BYTES`, and go only to
a trainer whose hello has "steering". Metrics are finite JSON numbers: the trainer drops a metric that is no number and
logs the metric once; `nonfinite` contains NaN and infinite metrics as "nan", "inf" or "-inf". `points` are the new
metrics by step, if they differ from the message's metrics: metrics of earlier steps, or of a dropped report.
`signals`: measurements of the session, the mean of the steps since the last message, in seconds. Both sides ignore
unknown message types, so that either side may introduce new types first.

A trainer that cannot train with its job's parameters or data prints one line of explanation and exits with
`BAD_INPUT_EXIT_CODE`: the attempt fails as `bad_input` with this line. A trainer of a correct job that lacks an
external resource exits with `UNAVAILABLE_EXIT_CODE`: the attempt fails as `transfer_failed`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROTOCOL = 1
MAX_LINE_BYTES = 64 * 1024
MAX_RULES_LINE_BYTES = 256 * 1024
"""Limit of a line from the agent, because 32 KiB of rules can take six times their size in JSON."""
ARENA_CHECKPOINT = "checkpoint"
"""Directory of the checkpoint in the arena."""
BAD_INPUT_EXIT_CODE = 65
"""Exit code EX_DATAERR of sysexits.h: the parameters or the data are at fault, not the program."""
UNAVAILABLE_EXIT_CODE = 75
"""Exit code EX_TEMPFAIL of sysexits.h: neither job nor program is at fault, and another attempt may succeed."""
STOP_REASONS = ("cancel", "pause", "release", "lease_lost", "rule")
STEERING_TYPES = ("rules", "command")
"""Types of the agent's messages that the controller handles."""


@dataclass(frozen=True)
class TrainerDirective:
    """Request of the agent to the training loop.

    kind: "checkpoint" (write a checkpoint at the next step boundary), "stacks" (print the stacks of all threads) or
    "stop". reason: reason of a stop, in `STOP_REASONS` or a newer word; empty otherwise. checkpoint: true if a stop
    saves a checkpoint first. grace_s: seconds from a stop to the end of the process; None if unknown.
    """

    kind: str
    reason: str = ""
    checkpoint: bool = False
    grace_s: float | None = None


def parse_message(line: bytes) -> dict[str, Any]:
    """Parse one line from the agent. Raises ValueError for a line that is no message."""
    message = json.loads(line)
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError("a message is a JSON object with a string 'type'")
    return message


def parse_directive(message: Mapping[str, Any]) -> TrainerDirective | None:
    """Return the directive in a message; None for an unknown type or directive. Raises ValueError."""
    if message["type"] != "directive":
        return None
    kind = message.get("directive")
    if kind in ("checkpoint", "stacks"):
        return TrainerDirective(kind)
    if kind != "stop":
        return None
    reason, checkpoint, grace_s = (message.get(name) for name in ("reason", "checkpoint", "grace_s"))
    if not isinstance(reason, str) or not reason or not isinstance(checkpoint, bool):
        raise ValueError("a stop has a 'reason' (string) and 'checkpoint' (true or false)")
    if grace_s is not None and not isinstance(grace_s, int | float):
        raise ValueError("'grace_s' of a stop is a number")
    return TrainerDirective("stop", reason, checkpoint, grace_s)


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode a message as one line. Raises ValueError for NaN and infinity."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
