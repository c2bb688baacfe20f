"""Clock, log and context argument of the Lambda functions; loads quickly."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Protocol

from aws_lambda_powertools import Logger


class Invocation(Protocol):
    """Context argument of Lambda."""

    def get_remaining_time_in_millis(self) -> int: ...


class ServerClock:
    """Clock of the machine, which AWS synchronizes."""

    def now(self) -> int:
        """Return whole seconds since 1970."""
        return int(time.time())


def start_logging() -> None:
    """Log the loggers under `baton` as JSON on standard error."""
    # Lambda keeps both streams; a local program that runs the handlers needs standard output for its own output.
    powertools = Logger(service="baton", stream=sys.stderr)
    root = logging.getLogger("baton")
    root.handlers = list(powertools.handlers)
    root.setLevel(os.environ.get("BATON_LOG_LEVEL", "INFO").upper())
    root.propagate = False
