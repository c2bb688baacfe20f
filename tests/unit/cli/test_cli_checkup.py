from __future__ import annotations

import pytest

from baton.contract.names import Scope
from gpu_client.cli.admin.doctor import (
    CheckStatus,
    judge_bandwidth,
    judge_clock,
    judge_latency,
    judge_scopes,
    judge_versions,
)

SERVER = 1_790_000_000


@pytest.mark.parametrize(
    ("here", "trip_s", "status", "finding"),
    [
        (SERVER, 0.01, CheckStatus.OK, "agrees"),
        (SERVER + 0.99, 0.01, CheckStatus.OK, "agrees"),
        (SERVER + 2.4, 1.5, CheckStatus.OK, "agrees"),
        (SERVER + 4.0, 0.0, CheckStatus.OK, "3 s ahead of"),
        (SERVER + 8.0, 0.0, CheckStatus.WARN, "7 s ahead of"),
        (SERVER - 7200, 0.0, CheckStatus.FAIL, "2 h behind"),
    ],
)
def test_clocks(here: float, trip_s: float, status: CheckStatus, finding: str) -> None:
    found = judge_clock(here, SERVER, trip_s)
    assert (found.status, bool(found.remedy)) == (status, status is not CheckStatus.OK)
    assert finding in found.finding


@pytest.mark.parametrize(
    ("ours", "theirs", "status"),
    [
        ("0.1.0", "0.1.0", CheckStatus.OK),
        ("0.1.7", "0.1.0", CheckStatus.OK),
        ("0.2.0", "0.1.0", CheckStatus.WARN),
        ("source", "0.1.0", CheckStatus.WARN),
    ],
)
def test_versions(ours: str, theirs: str, status: CheckStatus) -> None:
    assert judge_versions(ours, theirs).status is status


def test_scopes() -> None:
    assert judge_scopes(frozenset(Scope)).finding == "valid; scopes: submit, worker, admin, ring, enroll, view"
    assert judge_scopes(frozenset({Scope.WORKER})).status is CheckStatus.WARN
    assert judge_scopes(frozenset()).status is CheckStatus.FAIL


def test_speed() -> None:
    assert (judge_latency(0.02).status, judge_latency(3.0).status) == (CheckStatus.OK, CheckStatus.WARN)
    assert judge_bandwidth("upload", 2e6).finding == "at least 2.0 MB/s, with 1.0 MB"
    assert judge_bandwidth("upload", 1e3).status is CheckStatus.WARN
