"""Lambda entry point of the sweeper: once a minute, requeue the jobs of dead attempts and run due retentions."""

from __future__ import annotations

from typing import Any

from functions.api.checkpoints.retention_runner import run_due_retentions
from functions.api.operations.service_probe import probe_api
from functions.api.operations.sweeper import sweep
from functions.handlers.startup import Invocation, start_logging
from functions.handlers.wiring import build_context, build_metrics

start_logging()
context = build_context()
metrics = build_metrics()


def handler(event: dict[str, Any], lambda_context: Invocation) -> dict[str, Any]:
    """Answer one event of EventBridge Scheduler."""

    def time_left_s() -> float:
        return lambda_context.get_remaining_time_in_millis() / 1000

    swept = sweep(
        context.jobs,
        context.leases,
        context.clock,
        sweep_interval_s=context.settings.sweep_interval_s,
        api_answers=lambda: probe_api(context.settings.probe_url),
        time_left_s=time_left_s,
        report=metrics.put,
    )
    return swept.as_dict() | {"retentions": run_due_retentions(context, context.clock.now())}
