"""Decide whether and when the agent repeats a call."""

from __future__ import annotations

from baton.contract.errors import ErrorCode
from gpu_client.transport.errors import ApiError

MAX_PAUSE_S = 30.0
"""Longest pause between two tries, unless the caller names another."""


def may_pass(error: ApiError) -> bool:
    """Return True for a refusal by a proxy or gateway, or for a conflict: repeating the call may succeed."""
    return error.foreign or error.code == ErrorCode.CONFLICT


def backoff_s(first_s: float, tries: int, longest_s: float = MAX_PAUSE_S) -> float:
    """Return the seconds to wait after `tries` earlier pauses: `first_s`, doubled each time, at most `longest_s`."""
    return min(first_s * 2.0 ** min(tries, 16), longest_s)
