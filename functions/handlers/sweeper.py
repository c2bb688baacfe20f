"""Lambda entry point of the sweeper: once a minute, returns dead attempts' jobs to their queues."""

from __future__ import annotations

from typing import Any

from functions.api.sweeping import sweep
from functions.handlers.starting import start_logging
from functions.handlers.wiring import build_context, build_metrics

start_logging()
context = build_context()
metrics = build_metrics()


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one EventBridge Scheduler event."""
    swept = sweep(context.jobs, context.leases, context.clock.now())
    metrics.put({"QueueAge": swept.queue_age_s, "HeartbeatLag": swept.heartbeat_lag_s})
    return swept.as_dict()
