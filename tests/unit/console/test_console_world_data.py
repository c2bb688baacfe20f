"""The console's words on a world agree with the control plane's decisions."""

from __future__ import annotations

import json
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

from baton.contract.elastic.world import EpochProposal
from baton.contract.errors import ErrorCode
from cdk import NODE
from functions.domain.errors import Refusal
from functions.domain.seat_records import Seat
from functions.domain.worlds.membership import propose
from functions.domain.worlds.world_record import WorldNode, WorldRecord, view_world
from tests.kits.api.factories import JOB_ID, NOW, make_lease

SOURCE = Path(__file__).parents[3] / "console" / "src" / "world" / "world-data.js"
LIVE, EXPIRED, ENDED = "live", "expired", "ended"
LEASES = {
    LIVE: make_lease(),
    EXPIRED: make_lease().model_copy(update={"expires_at": NOW - 1}),
    ENDED: make_lease().model_copy(update={"closed": "interrupted"}),
}


def run(expression: str, given: Any) -> Any:
    """Evaluate an expression over the module `w` and `given`."""
    program = (
        "const given = JSON.parse(require('fs').readFileSync(0));"
        f"import(process.argv[1]).then((w) => console.log(JSON.stringify({expression})))"
    )
    done = subprocess.run(
        [str(NODE), "-e", program, SOURCE.as_uri()], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def name(seat: int) -> str:
    return f"{seat}.1.0000000{seat}"


def may_go_on(world: WorldRecord, states: tuple[str, ...]) -> bool:
    """Return True if the control plane lets the answering members begin an epoch alone."""
    leases = {seat: LEASES[state] for seat, state in enumerate(states)}
    left = [seat for seat, state in enumerate(states) if state == LIVE]
    if not left:
        return False
    proposal = EpochProposal(node=name(left[0]), epoch=world.epoch, members=[name(seat) for seat in left])
    seat = Seat(job=JOB_ID, seat=left[0], min=1, max=4)
    try:
        propose(world, proposal, seat, leases[left[0]], leases, now=NOW)
    except Refusal as refusal:
        assert refusal.code is ErrorCode.NO_MAJORITY
        return False
    return True


def test_the_quorum_is_that_of_the_control_plane() -> None:
    cases, expected = [], []
    for count in range(1, 5):
        for states in product((LIVE, EXPIRED, ENDED), repeat=count):
            members = [WorldNode(node=name(seat), joined_at=NOW) for seat in range(count)]
            world = WorldRecord(version=1, epoch=1, members=members)
            leases = {seat: LEASES[state] for seat, state in enumerate(states)}
            view = view_world(JOB_ID, world, leases, least=1, most=4, now=NOW)
            attempts = [
                {
                    "seat": seat,
                    "epoch": 1,
                    "started_at": 0,
                    "ended_at": 9 if state == ENDED else None,
                    "end": "interrupted",
                }
                for seat, state in enumerate(states)
            ]
            for one in attempts:
                one["price_usd_per_hour"] = None
            cases.append({"world": view.model_dump(mode="json"), "attempts": attempts})
            expected.append(may_go_on(world, states))
    found = run("given.map(({world, attempts}) => w.quorumOf(w.rowsOf(world, attempts, 10), world).holds)", cases)
    assert found == expected and {True, False} == set(expected)


def test_changes_and_exclusions_in_words() -> None:
    world = {"epoch": 4, "min": 2, "nodes": [{"seat": seat, "member": True} for seat in (0, 2, 5)]}
    lost = {"members": [0, 2], "joined": [], "lost": [{"seat": 5, "cause": "connection_reset"}], "round": 1233}
    texts = run(
        "[w.named([3]), w.named([0, 2, 5]), w.changeOf(given.lost), w.exclusionOf(given.world, [5]),"
        " w.exclusionOf(given.world, [0, 2, 5])]",
        {"world": world, "lost": lost},
    )
    assert texts[:3] == [
        "node 3",
        "nodes 0, 2 and 5",
        "Node 5 (its process or machine died) is out: 2 nodes from round 1,234 on.",
    ]
    assert texts[3].startswith("Epoch 5 begins at once with nodes 0 and 2, without a vote. They finish the round")
    assert texts[4].startswith("Epoch 5 begins without members: the world forms anew when 2 nodes have joined")


def test_each_seat_has_a_row_with_its_own_cost_and_a_reason_to_be_free() -> None:
    world = {
        "state": "training", "epoch": 1, "max": 3, "min": 1, "rounds": [], "advice": "", "shards": None,
        "nodes": [{"node": name(1), "seat": 1, "member": True, "ready": True, "lease_live": False, "tokens": 5,
                   "machine_id": "m-1", "state": "training"}],
    }  # fmt: skip
    shared = {"progress": None, "gpu_model": None, "provider": None, "machine_id": "m", "price_usd_per_hour": 3600}
    attempts = [
        {**shared, "seat": 0, "epoch": 1, "started_at": 0, "ended_at": 2, "end": "interrupted",
         "reason": {"code": "no_heartbeat"}},
        {**shared, "seat": 1, "epoch": 1, "started_at": 0, "ended_at": None, "end": None, "reason": None},
    ]  # fmt: skip
    rows, waits = run(
        "((rows) => [rows.map((one) => [one.seat, one.word, one.detail, one.usd]), w.waitsOf(given.world, rows, 0)])"
        "(w.rowsOf(given.world, given.attempts, 10))",
        {"world": world, "attempts": attempts},
    )
    assert rows == [
        [0, "free", "lost: no heartbeat", 2],
        [1, "silent", "its lease has run out", 10],
        [2, "free", "waits for a worker", None],
    ]
    assert waits[0]["tone"] == "bad" and waits[0]["text"].startswith("No member answers.")
