"""Nodes that do not reach each other exchange bytes through presigned URLs."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.elastic.relay import MAX_DOWNLOADS, MAX_RELAY_OBJECT_BYTES
from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from functions.domain.errors import WriteConflict
from functions.domain.jobs.transaction import Transaction
from tests.functional.api.calls import PROGRAM
from tests.kits.api.harness import TENANT, Answer, Api, Held

CHANNEL = "9f86d081"


def name(nodes: list[Held], seat: int) -> str:
    return f"{seat}.{nodes[seat].epoch}.0000000{seat}"


def relay(nodes: list[Held], seat: int, **body: Any) -> Answer:
    return nodes[seat].post(f"/job/{nodes[seat].id}/world/relay", {"node": name(nodes, seat), **body})


@pytest.fixture
def nodes(api: Api) -> list[Held]:
    """Two members of a world, by seat."""
    api.submit(nodes={"min": 2, "max": 2})
    held = sorted((api.claim(machine_id=f"m-{one}") for one in range(2)), key=lambda one: one.item["world"]["seat"])
    for seat in (0, 1):
        body = {"node": name(held, seat), "program": PROGRAM}
        held[seat].post(f"/job/{held[seat].id}/world/join", body).ok()
    proposal = {"node": name(held, 0), "epoch": 0, "members": [name(held, 0), name(held, 1)]}
    held[0].post(f"/job/{held[0].id}/world/epoch", proposal).ok()
    return held


def store(api: Api, nodes: list[Held], number: int, data: bytes) -> Answer:
    upload = {"to": name(nodes, 1), "channel": CHANNEL, "number": number, "size_bytes": len(data)}
    signed = relay(nodes, 0, upload=upload).ok()["upload"]
    return api.send("PUT", signed["url"], signed["headers"], data)


def stored(api: Api, nodes: list[Held]) -> list[str]:
    prefix = f"jobs/{nodes[0].item['world']['job']}/relay/"
    page = api.context.objects.list(TENANT, CHECKPOINTS_BUCKET, prefix, limit=100)
    return [one.key.removeprefix(prefix) for one in page.items]


def test_a_node_reads_what_its_peer_has_sent(api: Api, nodes: list[Held]) -> None:
    assert relay(nodes, 1, calls=True).ok()["calls"] == []
    assert store(api, nodes, 0, b"hello").status == 200
    assert relay(nodes, 1, calls=True).ok()["calls"] == [{"node": name(nodes, 0), "channel": CHANNEL}]
    source = {"source": name(nodes, 0), "channel": CHANNEL}
    urls = relay(nodes, 1, download={**source, "number": 0}).ok()["downloads"]
    assert len(urls) == MAX_DOWNLOADS
    assert api.send("GET", urls[0]).text == "hello"
    assert api.send("GET", urls[1]).status == 404
    assert store(api, nodes, 1, b"more").status == 200
    assert api.send("GET", urls[1]).text == "more"
    assert store(api, nodes, 1, b"less").status == 412
    assert len(stored(api, nodes)) == 2
    relay(nodes, 1, download={**source, "number": 1}).ok()
    assert relay(nodes, 1, calls=True).ok()["calls"] == []
    assert len(stored(api, nodes)) == 1
    relay(nodes, 1, download={**source, "number": MAX_DOWNLOADS}).ok()
    assert stored(api, nodes) == []
    world = api.get(f"/job/{nodes[0].item['world']['job']}/world").ok()
    assert [one["relay"] for one in world["nodes"]] == [True, True]


def test_a_call_is_marked_also_after_a_conflict_and_unmarked_nodes_cost_no_list(
    api: Api, nodes: list[Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.context.objects, "list", lambda *_, **__: pytest.fail("a list of objects"))
    assert relay(nodes, 1, calls=True).ok()["calls"] == []
    monkeypatch.undo()
    apply, conflicts = api.context.jobs.apply, [1, 1]

    def disturbed(change: Transaction) -> Any:
        if conflicts:
            conflicts.pop()
            raise WriteConflict
        return apply(change)

    monkeypatch.setattr(api.context.jobs, "apply", disturbed)
    assert store(api, nodes, 0, b"hello").status == 200
    assert [one["node"] for one in relay(nodes, 1, calls=True).ok()["calls"]] == [name(nodes, 0)]


def test_the_url_accepts_the_declared_number_of_bytes_only(api: Api, nodes: list[Held]) -> None:
    upload = {"to": name(nodes, 1), "channel": CHANNEL, "number": 3, "size_bytes": 4}
    signed = relay(nodes, 0, upload=upload).ok()["upload"]
    assert api.send("PUT", signed["url"], signed["headers"], b"five!").status >= 400
    relay(nodes, 0, upload={**upload, "size_bytes": MAX_RELAY_OBJECT_BYTES + 1}).refused(
        ErrorCode.INVALID_VALUE, "upload.size_bytes"
    )
    assert stored(api, nodes) == []


def test_only_present_nodes_exchange_bytes(api: Api, nodes: list[Held]) -> None:
    upload = {"to": "1.1.ffffffff", "channel": CHANNEL, "number": 0, "size_bytes": 4}
    with api.unchanged():
        relay(nodes, 0, upload=upload).refused(ErrorCode.NOT_A_MEMBER, "node")
        relay(nodes, 0, node=name(nodes, 1), calls=True).refused(ErrorCode.INVALID_VALUE, "node")
    download = {"source": name(nodes, 1), "channel": CHANNEL, "number": 0}
    nodes[0].release().ok()
    relay(nodes, 0, download=download).refused(ErrorCode.LEASE_LOST)


def test_the_unread_objects_of_an_ended_job_are_deleted(api: Api, nodes: list[Held]) -> None:
    for number in (0, 7):
        store(api, nodes, number, b"unread")
    assert len(stored(api, nodes)) == 2
    api.post(f"/job/{nodes[0].item['world']['job']}/stop").ok()
    for _ in range(3):
        api.clock.advance(7200)
        api.sweep()
    assert stored(api, nodes) == []
