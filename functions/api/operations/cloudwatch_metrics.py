"""Numbers for alarms and graphs: lines of the log from which CloudWatch takes metrics (its embedded metric format).

No request and no library: one line where an attempt ends, and one a minute from the sweeper. What is zero is not
written, so a deployment where nothing happens pays for no metric; alarms take what is missing for good.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TextIO

from baton.contract.history import EventType
from baton.contract.jobs import AttemptEnd, FailureClass
from functions.domain.jobs.transaction import Transaction
from functions.domain.ports import Clock

NAMESPACE = "Baton"
DIMENSION = "stage"
UNITS: Mapping[str, str] = {
    "AttemptsCompleted": "Count",
    "AttemptsFailed": "Count",
    "NodeFaults": "Count",
    "DeadAttempts": "Count",
    "JobsFailed": "Count",
    "QueueAge": "Seconds",
    "HeartbeatLag": "Seconds",
}
"""Every metric. Failures of the training and faults of its machine are counted apart, as the job's counters are.

`QueueAge`: how long the job that waits longest could have been claimed. `HeartbeatLag`: for how long the oldest lease
that ran out has not been taken away.
"""


class Metrics:
    """Writes to a stream that becomes the function's log. Without a stage nothing is written."""

    def __init__(self, stage: str | None, stream: TextIO, clock: Clock) -> None:
        self._stage = stage
        self._stream = stream
        self._clock = clock

    def put(self, values: Mapping[str, int]) -> None:
        """Tell the values that are not zero, by names of UNITS."""
        told = {name: value for name, value in values.items() if value}
        if self._stage is None or not told:
            return
        line = {
            "_aws": {
                "Timestamp": self._clock.now() * 1000,
                "CloudWatchMetrics": [
                    {
                        "Namespace": NAMESPACE,
                        "Dimensions": [[DIMENSION]],
                        "Metrics": [{"Name": name, "Unit": UNITS[name]} for name in told],
                    }
                ],
            },
            DIMENSION: self._stage,
            **told,
        }
        # One call, so that lines of several threads do not mix.
        self._stream.write(f"{json.dumps(line, separators=(',', ':'))}\n")
        self._stream.flush()


_WANTED = FailureClass.STOPPED_BY_RULE
"""No mishap, and in none of the job's counters."""


def ends_in(change: Transaction) -> dict[str, int]:
    """How attempts and jobs end by a change that was written."""
    told: dict[str, int] = {}
    attempt = change.attempt
    match attempt.end if attempt is not None else None:
        case AttemptEnd.COMPLETE:
            told["AttemptsCompleted"] = 1
        case AttemptEnd.INTERRUPTED:
            told["DeadAttempts"] = 1
        case AttemptEnd.FAILED if attempt is not None and attempt.failure_class not in (None, _WANTED):
            assert attempt.failure_class is not None
            told["NodeFaults" if attempt.failure_class.node_fault else "AttemptsFailed"] = 1
    if any(event.type is EventType.FAILED for event in change.events):
        told["JobsFailed"] = 1
    return told
