from __future__ import annotations

import pytest

from baton.contract.names import Scope
from gpu_client.cli.admin.doctor import (
    Verdict,
    judge_bandwidth,
    judge_clock,
    judge_latency,
    judge_scopes,
    judge_versions,
)

SERVER = 1_790_000_000


@pytest.mark.parametrize(
    ("here", "trip_s", "verdict", "said"),
    [
        (SERVER, 0.01, Verdict.OK, "agrees"),
        (SERVER + 0.99, 0.01, Verdict.OK, "agrees"),
        (SERVER + 2.4, 1.5, Verdict.OK, "agrees"),
        (SERVER + 4.0, 0.0, Verdict.OK, "3 s ahead of"),
        (SERVER + 8.0, 0.0, Verdict.WARN, "7 s ahead of"),
        (SERVER - 7200, 0.0, Verdict.FAIL, "2 h behind"),
    ],
)
def test_clocks(here: float, trip_s: float, verdict: Verdict, said: str) -> None:
    found = judge_clock(here, SERVER, trip_s)
    assert (found.verdict, bool(found.remedy)) == (verdict, verdict is not Verdict.OK)
    assert said in found.said


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ("0.1.0", "0.1.0", Verdict.OK),
        ("0.1.7", "0.1.0", Verdict.OK),
        ("0.2.0", "0.1.0", Verdict.WARN),
        ("source", "0.1.0", Verdict.WARN),
    ],
)
def test_versions(ours: str, theirs: str, verdict: Verdict) -> None:
    assert judge_versions(ours, theirs).verdict is verdict


def test_scopes() -> None:
    assert judge_scopes(frozenset(Scope)).said == "valid; may: submit, worker, admin, ring"
    assert judge_scopes(frozenset({Scope.WORKER})).verdict is Verdict.WARN
    assert judge_scopes(frozenset()).verdict is Verdict.FAIL


def test_speed() -> None:
    assert (judge_latency(0.02).verdict, judge_latency(3.0).verdict) == (Verdict.OK, Verdict.WARN)
    assert judge_bandwidth("upload", 2e6).said == "at least 2.0 MB/s, with 1.0 MB"
    assert judge_bandwidth("upload", 1e3).verdict is Verdict.WARN
