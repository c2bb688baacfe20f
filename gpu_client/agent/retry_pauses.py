"""Decide whether and when the agent repeats a call."""

from __future__ import annotations

from baton.contract.errors import ErrorCode
from gpu_client.transport.errors import ApiError

MAX_PAUSE_S = 30.0
"""Default of the longest pause between two tries, in seconds."""


def may_pass(error: ApiError) -> bool:
    """Return True if a repeated call may succeed: after a refusal by a proxy or gateway, or a conflict."""
    return error.foreign or error.code == ErrorCode.CONFLICT


def backoff_s(first_s: float, tries: int, longest_s: float = MAX_PAUSE_S) -> float:
    """Return the seconds to wait after `tries` earlier pauses: `first_s`, doubled each time, at most `longest_s`."""
    return min(first_s * 2.0 ** min(tries, 16), longest_s)
