"""The context argument of a handler that runs on this machine."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from typing import Any

LambdaHandler = Callable[[dict[str, Any], Any], dict[str, Any]]

HANDLER_TIMEOUT_S = 30.0


class LocalContext:
    """What handlers find in Lambda's context argument."""

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
        """Milliseconds until the deployed function would be ended. Nothing is ended here."""
        return max(0, int((self._deadline - time.monotonic()) * 1000))


def new_request_id() -> str:
    """Sixteen characters, shaped like the gateway's request ids."""
    return base64.urlsafe_b64encode(secrets.token_bytes(11)).decode("ascii")
