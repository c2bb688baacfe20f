"""What every Lambda function needs at its start, and loads quickly: a clock, a log."""

from __future__ import annotations

import logging
import os
import sys
import time

from aws_lambda_powertools import Logger


class ServerClock:
    """The machine's clock. Lambda's machines are synchronised by AWS."""

    def now(self) -> int:
        """Whole seconds since 1970."""
        return int(time.time())


def start_logging() -> None:
    """Structured logs for everything under `baton`."""
    # Lambda keeps both streams; a program that runs the handlers itself may want standard output for its own.
    powertools = Logger(service="baton", stream=sys.stderr)
    root = logging.getLogger("baton")
    root.handlers = list(powertools.handlers)
    root.setLevel(os.environ.get("BATON_LOG_LEVEL", "INFO").upper())
    root.propagate = False
