"""Record the billed units of an elastic job's calls: polls, reports, leases of shards, relayed objects."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BaseModel

from baton.contract.elastic.data import DataProgress, DataRequest
from baton.contract.elastic.nodes import NodesSpec
from baton.contract.elastic.relay import RelayDownload, RelayRequest, RelayUpload
from baton.contract.elastic.world import EpochProposal, JoinRequest, NodeProgram, NodeReport, RoundReport, WorldReport
from baton.contract.worker.calls import HeartbeatRequest, WorkItem
from bench.costs.units import Billed
from bench.harness.plane import Plane, submission
from functions.api.worlds.seat_settlement import settle_job
from functions.domain.worlds.seats import with_seats
from gpu_client.elastic.engines.wire.identity import NodeIdentity

NODES = 8
QUEUE, CHANNEL = "elastic", "9f86d081"
EARLIER_REPORTS = 40
"""Reports after which the world has as many rounds as it keeps."""
Measure = Callable[[Callable[[], object]], Billed]
"""Runs a call and returns its billed units."""


class ElasticRecording:
    """Elastic job whose calls are billed. call, run: bill a call of the API, and one inside of a sweep."""

    def __init__(self, plane: Plane, *, call: Measure, run: Measure) -> None:
        self._plane = plane
        self._bill_call, self._bill_run = call, run
        self._items: list[WorkItem] = []
        self._round = 0
        self.job_id = ""
        """The elastic job, after the run."""

    def run(self) -> dict[str, Billed]:
        """Let 8 nodes form a world with a full history, and bill what they call while they train."""
        plane = self._plane
        plain = submission(QUEUE, plane.context.clock.now()).job
        spec = plain.spec.model_copy(update={"nodes": NodesSpec(min=NODES, max=NODES)})
        change = with_seats(submission(QUEUE, plane.context.clock.now(), spec=spec))
        plane.context.jobs.apply(change)
        for _ in range(NODES):
            found = plane.claim(queue=QUEUE, machine_id=str(uuid.uuid4()), runs_nodes=True)
            self._items.append(WorkItem.model_validate(found[0]))
        self._form()
        for _ in range(EARLIER_REPORTS):
            self._report()
        lease = DataRequest(node=self._name(0), plan_sha256="9f" * 32, positions=10_000, epoch=1, want=4)
        self._call(0, "data", lease)
        trained = DataProgress(finished=[[0, 1]])
        upload = RelayUpload(to=self._name(1), channel=CHANNEL, number=1, size_bytes=512)
        self._call(0, "relay", RelayRequest(node=self._name(0), upload=upload.model_copy(update={"number": 0})))
        signed = self._bill_call(partial(self._call, 0, "relay", RelayRequest(node=self._name(0), upload=upload)))
        download = RelayDownload(source=self._name(0), channel=CHANNEL, number=16)
        now, self.job_id = plane.context.clock.now(), change.job.id
        settled = self._bill_run(lambda: settle_job(plane.context.jobs, self.job_id, now))
        return {
            "node heartbeat": self._bill_call(self._heartbeat),
            "world poll": self._bill_call(partial(self._call, 0, "", None)),
            "world report": self._bill_call(self._report),
            "shard lease": self._bill_call(
                partial(self._call, 0, "data", lease.model_copy(update={"pending": trained, "want": 5}))
            ),
            "relay upload": {**signed, "s3_put": 1},
            "relay download": self._bill_call(
                partial(self._call, 1, "relay", RelayRequest(node=self._name(1), download=download))
            ),
            "relay question": self._bill_call(
                partial(self._call, 1, "relay", RelayRequest(node=self._name(1), calls=True))
            ),
            "elastic job in a sweep": {unit: count for unit, count in settled.items() if unit != "lambda"},
        }

    def _name(self, at: int) -> str:
        seat = self._items[at].world
        assert seat is not None
        return f"{seat.seat}.{self._items[at].epoch}.{seat.seat:08x}"

    def _form(self) -> None:
        program = NodeProgram(torch="2.13.0", engine="wire", codec="int8", parameters=10**9, model_sha256="9f" * 32)
        for at in range(NODES):
            identity = NodeIdentity()
            request = JoinRequest(
                node=self._name(at), addresses=["203.0.113.7:47100"], certificate=identity.certificate, program=program
            )
            self._call(at, "join", request)
        members = [self._name(at) for at in range(NODES)]
        self._call(0, "epoch", EpochProposal(node=members[0], epoch=0, members=members))

    def _report(self) -> None:
        self._round += 1
        one = RoundReport(
            round=self._round,
            epoch=1,
            contributors=NODES,
            tokens=819_200,
            round_s=15.25,
            reduce_s=1.5,
            sent_bytes=10**9,
        )
        nodes = [
            NodeReport(node=self._name(at), state="training", tokens=102_400, link_mbit_s=480.5) for at in range(NODES)
        ]
        self._call(0, "report", WorldReport(node=self._name(0), epoch=1, rounds=[one], nodes=nodes))

    def _heartbeat(self) -> None:
        item = self._items[0]
        metrics = {"loss": 0.0421, "world.loss": 0.0433, "world.round_s": 15.25, "world.stall": 0.5}
        self._plane.worker_call(
            "POST /heartbeat/{id}",
            path={"id": item.id},
            body=HeartbeatRequest(step=1200, total_steps=5000, metrics=metrics, phase="training"),
            headers={"x-lease-token": item.lease_token},
        )

    def _call(self, at: int, name: str, body: BaseModel | None) -> Any:
        item = self._items[at]
        route = f"POST /job/{{id}}/world/{name}" if name else "GET /job/{id}/world"
        return self._plane.worker_call(
            route, path={"id": item.id}, body=body, headers={"x-lease-token": item.lease_token}
        )
