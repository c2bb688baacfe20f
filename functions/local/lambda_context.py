"""Lambda's context argument for handlers on this machine."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from typing import Any

LambdaHandler = Callable[[dict[str, Any], Any], dict[str, Any]]

HANDLER_TIMEOUT_S = 30.0


class LocalContext:
    """Context argument of one invocation."""

    function_version = "$LATEST"
    memory_limit_in_mb = 1024
    log_group_name = "local"
    log_stream_name = "local"

    def __init__(self, function_name: str, *, timeout_s: float = HANDLER_TIMEOUT_S) -> None:
        self.function_name = function_name
        self.invoked_function_arn = f"arn:aws:lambda:us-east-1:000000000000:function:{function_name}"
        self.aws_request_id = new_request_id()
        self._deadline = time.monotonic() + timeout_s

    def get_remaining_time_in_millis(self) -> int:
        """Return the milliseconds until Lambda would end the deployed function; the local stack ends no handler."""
        return max(0, int((self._deadline - time.monotonic()) * 1000))


def new_request_id() -> str:
    """Return a random request id of 16 characters, in the form of API Gateway."""
    return base64.urlsafe_b64encode(secrets.token_bytes(11)).decode("ascii")
