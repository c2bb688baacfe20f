"""Lambda entry point of the sweeper: once a minute, returns dead attempts' jobs to their queues, and lets go of what
ended jobs do not keep."""

from __future__ import annotations

from typing import Any

from functions.api.late_retention import run_due_retentions
from functions.api.sweeping import sweep
from functions.handlers.starting import start_logging
from functions.handlers.wiring import build_context, build_metrics

start_logging()
context = build_context()
metrics = build_metrics()


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one EventBridge Scheduler event."""
    began_at = context.clock.now()
    swept = sweep(context.jobs, context.leases, began_at)
    metrics.put({"QueueAge": swept.queue_age_s, "HeartbeatLag": swept.heartbeat_lag_s})
    return swept.as_dict() | {"retentions": run_due_retentions(context, began_at)}
