"""An elastic training by the calls of its nodes: seats, epochs, rounds, shards. No process trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.contract.elastic.data import DataRequest
from baton.contract.elastic.world import EpochProposal, JoinRequest, WorldReport
from baton.contract.worker.calls import HeartbeatRequest, ReleaseRequest
from tests.e2e.console.scenes import HeldJob, Scene

PROGRAM = {
    "torch": "2.13.0", "engine": "wire", "codec": "int8", "parameters": 1_240_000_000, "model_sha256": "9f" * 32,
}  # fmt: skip
SHARDS = 96


class WorldWork:
    """Elastic job with its nodes by seat."""

    def __init__(self, scene: Scene, name: str, *, least: int = 2, most: int = 4) -> None:
        self.scene = scene
        self.job = scene.submit(name, nodes={"min": least, "max": most})
        self.nodes: dict[int, HeldJob] = {}
        self.members: list[int] = []
        self.epoch = 0
        self.round = 0

    def claim(self, machine: str, price_usd_per_hour: float | None = 0.34) -> int:
        """Claim a seat; returns the seat."""
        held = self.scene.claim(machine, price_usd_per_hour)
        assert held.work.world is not None
        self.nodes[held.work.world.seat] = held
        return held.work.world.seat

    def join(self, seat: int, *, ready: bool = True) -> None:
        """Ask to become a member."""
        body = {"node": self.node(seat), "program": PROGRAM, "ready": ready, "round": self.round}
        body["addresses"] = [f"203.0.113.{seat}:47100"]
        self._call("join_world", seat, JoinRequest.model_validate(body))

    def begin_epoch(self, *members: int, lost: Mapping[int, str] | None = None) -> None:
        """Begin the next epoch, proposed by the first member. `lost`: causes by seat."""
        body = {
            "node": self.node(members[0]), "epoch": self.epoch, "round": self.round,
            "members": [self.node(seat) for seat in members],
            "lost": [{"node": self.node(seat), "cause": cause} for seat, cause in (lost or {}).items()],
        }  # fmt: skip
        self._call("propose_epoch", members[0], EpochProposal.model_validate(body))
        self.members, self.epoch = list(members), self.epoch + 1

    def train(self, rounds: int, *, tokens: Mapping[int, int], round_s: float = 61, **more: Any) -> None:
        """Report rounds, with the tokens that each node contributed to the newest."""
        reported = []
        for _ in range(rounds):
            self.round += 1
            wobble = 1 + 0.15 * ((self.round * 7) % 5 - 2) / 2
            reported.append(
                {
                    "round": self.round, "epoch": self.epoch, "contributors": sum(one > 0 for one in tokens.values()),
                    "tokens": sum(tokens.values()), "round_s": round(round_s * wobble, 1),
                    "reduce_s": round(8.5 * wobble, 1), "sent_bytes": 1_860_000_000, **more,
                }
            )  # fmt: skip
        links = {seat: 480 - 70 * seat for seat in self.members}
        nodes = [
            {"node": self.node(seat), "state": "training", "tokens": tokens.get(seat, 0), "link_mbit_s": links[seat]}
            for seat in self.members
        ]
        body = {"node": self.node(self.members[0]), "epoch": self.epoch, "rounds": reported, "nodes": nodes}
        self._call("report_world", self.members[0], WorldReport.model_validate(body))

    def beat(self, seat: int, loss: float, stall: float) -> None:
        """Report the newest round by a heartbeat."""
        metrics = {"loss": loss, "world.loss": loss, "world.stall": stall, "world.nodes": len(self.members)}
        held = self.nodes[seat]
        request = HeartbeatRequest(step=self.round, total_steps=300, metrics=metrics)
        held.worker.heartbeat(held.work.id, held.work.lease_token, request)

    def lease_shards(self, seat: int, want: int, *, finished: Sequence[Sequence[int]] = ()) -> None:
        """Lease shards, and tell which ones the committed rounds contain."""
        body = {
            "node": self.node(seat), "plan_sha256": "9f" * 32, "positions": SHARDS, "epoch": self.epoch,
            "round": self.round, "concluded": True, "trained": {"finished": finished}, "want": want,
        }  # fmt: skip
        self._call("lease_shards", seat, DataRequest.model_validate(body))

    def leave(self, seat: int) -> None:
        """Give the seat back."""
        held = self.nodes[seat]
        held.worker.release(held.work.lease_token, ReleaseRequest(job_id=held.work.id, message="spot notice"))

    def silence(self, seat: int) -> None:
        """Let the lease of a seat run out; the sweeper revokes the lease."""
        self.scene.stack.expire_lease(self.nodes[seat].work.id)

    def node(self, seat: int) -> str:
        """Return the id of the node at a seat."""
        return f"{seat}.{self.nodes[seat].work.epoch}.{seat:08x}"

    def _call(self, name: str, seat: int, body: Any) -> Any:
        held = self.nodes[seat]
        return getattr(held.worker, name)(held.work.id, held.work.lease_token, body)


def rich_world(scene: Scene) -> WorldWork:
    """Make a training of four nodes: one was lost, one fetches the state, shards are leased."""
    work = WorldWork(scene, "llama-3b-diloco")
    seats = [
        work.claim(machine, price) for machine, price in (("vast-2947", 0.34), ("m-5512", 0.28), ("run-90aa", 0.41))
    ]
    for seat in seats:
        work.join(seat)
    work.begin_epoch(*seats)
    work.train(9, tokens=dict.fromkeys(seats, 12_800))
    for seat in seats:
        work.lease_shards(seat, 4)
    work.leave(seats[1])
    work.begin_epoch(seats[0], seats[2], lost={seats[1]: "left"})
    work.lease_shards(seats[0], 4, finished=[[0, 31]])
    work.train(14, tokens={seats[0]: 18_400, seats[2]: 9_100}, round_s=48)
    for number, seat in enumerate((seats[0], seats[2])):
        work.beat(seat, 2.31, 1.2 + 8.5 * number)
    work.join(work.claim("vast-3001", 0.39), ready=False)
    return work
