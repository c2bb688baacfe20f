"""Metrics for alarms and graphs: log lines in CloudWatch's embedded metric format.

A line costs no request and needs no library. The functions write a line where an attempt ends; the sweeper and the
controller of the fleets write a line a minute. Zeros are not written, so an idle deployment pays for no metric; alarms
treat missing values as good.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TextIO

from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import AttemptEnd, FailureClass
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
    "FleetTicks": "Count",
    "FleetTicksUnfinished": "Count",
    "FleetStarting": "Count",
    "FleetReady": "Count",
    "FleetBusy": "Count",
    "FleetEnding": "Count",
    "FleetUnknownStatuses": "Count",
    "FleetUsdPerHour": "None",
}
"""Every metric and its unit. Failures of the training and node faults are counted apart, as in the job's counters.

`QueueAge`: seconds for which the longest waiting job has been claimable. `HeartbeatLag`: seconds since the oldest
expired lease that is not yet revoked expired. `FleetTicks`: ticks that looked after every fleet.
`FleetTicksUnfinished`: ticks that did not, while there is a fleet. `FleetUnknownStatuses`: machines whose status by
their provider is unknown to the driver. `Fleet...`: machines of all fleets, by states, and their price.
"""


class CloudWatchMetrics:
    """Writer of metrics to a stream that becomes the function's log; without a stage the metrics are discarded."""

    def __init__(self, stage: str | None, stream: TextIO, clock: Clock) -> None:
        self._stage = stage
        self._stream = stream
        self._clock = clock

    def put(self, values: Mapping[str, float]) -> None:
        """Write the values other than zero; the names are keys of UNITS."""
        written = {name: value for name, value in values.items() if value}
        if self._stage is None or not written:
            return
        line = {
            "_aws": {
                "Timestamp": self._clock.now() * 1000,
                "CloudWatchMetrics": [
                    {
                        "Namespace": NAMESPACE,
                        "Dimensions": [[DIMENSION]],
                        "Metrics": [{"Name": name, "Unit": UNITS[name]} for name in written],
                    }
                ],
            },
            DIMENSION: self._stage,
            **written,
        }
        # One write, so that lines of several threads do not mix.
        self._stream.write(f"{json.dumps(line, separators=(',', ':'))}\n")
        self._stream.flush()


_INTENDED = FailureClass.STOPPED_BY_RULE
"""A rule intended this end; no counter of the job counts such an end as a failure."""


def count_ends(change: Transaction) -> dict[str, int]:
    """Count the ends of attempts and jobs in a committed transaction, by metric."""
    counts: dict[str, int] = {}
    attempt = change.attempt
    match attempt.end if attempt is not None else None:
        case AttemptEnd.COMPLETE:
            counts["AttemptsCompleted"] = 1
        case AttemptEnd.INTERRUPTED:
            counts["DeadAttempts"] = 1
        case AttemptEnd.FAILED if attempt is not None and attempt.failure_class not in (None, _INTENDED):
            assert attempt.failure_class is not None
            counts["NodeFaults" if attempt.failure_class.node_fault else "AttemptsFailed"] = 1
    if any(event.type is EventType.FAILED for event in change.events):
        counts["JobsFailed"] = 1
    return counts
