"""Lambda entry point of the sweeper: once a minute, returns dead attempts' jobs to their queues."""

from __future__ import annotations

from typing import Any

from functions.api.sweeping import sweep
from functions.handlers.wiring import build_context, start_logging

start_logging()
context = build_context()


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one EventBridge Scheduler event."""
    return sweep(context.jobs, context.leases, context.clock.now()).as_dict()
