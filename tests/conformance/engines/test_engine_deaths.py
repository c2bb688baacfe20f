"""All survivors name a member whose process dies or hangs inside a reduce."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
from conftest import MEMBERS
from member_process import Member

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("kind", MEMBERS)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("fault", "causes", "timeout_s", "limit_s"),
    # Limits allow for a loaded machine, also that of healthy survivors; the bench measures the times.
    [(signal.SIGKILL, {"connection_reset"}, 60.0, 40.0), (signal.SIGSTOP, {"silent"}, 6.0, 60.0)],
    ids=["killed", "stopped"],
)
def test_survivors_name_the_lost_member(
    kind: str, victim: int, fault: signal.Signals, causes: set[str], timeout_s: float, limit_s: float
) -> None:
    make, peers = MEMBERS[kind](3)
    with contextlib.ExitStack() as ended:
        members = [Member(make[rank], peers, rank, timeout_s) for rank in range(3)]
        for member in members:
            ended.callback(member.end)
        for member in members:
            member.report("made")
        for member in members:
            member.begin()
        for member in members:
            member.report("inside")
        members[victim].report("inside")
        members[victim].signal(fault)
        began = time.monotonic()
        found = [member.report("lost") for rank, member in enumerate(members) if rank != victim]
        for _, nodes, cause, lost_at in found:
            assert nodes == (peers[victim].node,)
            assert cause in causes
            assert lost_at - began < limit_s
