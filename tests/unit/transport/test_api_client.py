"""The typed client: what each call sends, and how the longer ones recover."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from baton.contract.admin.keys import KeyCreate
from baton.contract.admin.webhooks import WebhookCreate
from baton.contract.base import MAX_STEP
from baton.contract.checkpoints.manifest import ChunkedFile, Manifest
from baton.contract.fleets.fleet import EnrollRequest, FleetSpec, MachineHeartbeat
from baton.contract.jobs.job import JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from baton.contract.names import Scope
from baton.contract.worker.calls import CompleteRequest, FailRequest, HeartbeatRequest, ReleaseRequest, WorkQuery
from baton.contract.worker.control import Directive
from baton.contract.worker.output import LogChunk
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.api.http import HttpClient
from gpu_client.transport.api.objects import files_below
from gpu_client.transport.errors import (
    ApiError,
    ChecksumMismatch,
    LeaseLost,
    NotFound,
    TokenRefused,
    TransferError,
    UnexpectedAnswer,
    Unreachable,
    UrlExpired,
)
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.manager import Transfer
from tests.unit.transport.scripted_server import Act, Handler, ScriptedServer, reply, reset

ID = "146683a1-cb76-4702-9fef-fcccd32594f1"
JOB = {
    "id": ID, "status": "pending", "state": "pending", "queue": "default", "priority": 50, "command": ["true"],
    "parameters": {}, "environment": {}, "inputs": [], "outputs": [], "requirements": {}, "policy": {}, "tags": {},
    "epoch": 0, "counters": {}, "created_at": 1, "updated_at": 1, "checkpoint_bucket": "b", "checkpoint_prefix": "p/",
    "instance_prompt": "kept although unknown",
}  # fmt: skip
WORK = {
    "id": ID, "status": "running", "epoch": 2, "lease_token": "t-1", "lease_duration_s": 90, "lease_expires_at": 99,
    "heartbeat_interval_s": 30, "server_time": 9, "command": ["true"], "parameters": {}, "environment": {},
    "inputs": [], "outputs": [], "data_bucket": "d", "checkpoint_bucket": "c", "checkpoint_prefix": "p/", "resume": [],
}  # fmt: skip
BEAT = {
    "status": "ok", "directive": "pause", "epoch": 2, "lease_expires_at": 99, "lease_duration_s": 90,
    "heartbeat_interval_s": 30, "server_time": 9,
}  # fmt: skip
EXPIRED = reply(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
OK = reply(200, {"status": "ok", "state": "complete"})


@pytest.fixture
def store() -> Iterator[ScriptedServer]:
    """S3, on another host than the API."""
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer, transfer: Transfer) -> Iterator[BatonClient]:
    http = HttpClient(server.url, "baton_k_secret", sleep=lambda _: None, read_timeout_s=5)
    with BatonClient(server.url, "", transfer=transfer, http=http) as made:
        yield made


def refusal(code: str, status: int = 409) -> Any:
    return reply(status, {"error": {"code": code, "message": code}})


def query_of(server: ScriptedServer, index: int = -1) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(server.seen[index].query).items()}


class TestSubmitter:
    def test_submit_sends_what_was_said_and_nothing_more(self, server: ScriptedServer, client: BatonClient) -> None:
        server.script("POST", "/job", reply(200, JOB))
        job = client.submit(JobSubmit(command=["true"], parameters={"none": None}, policy=Policy(max_failures=1)))
        assert (job.id, job.state) == (ID, JobState.PENDING)
        assert json.loads(server.seen[0].body) == {
            "command": ["true"],
            "parameters": {"none": None},
            "policy": {"max_failures": 1},
        }
        assert client.stats.requests == {"submit": 1}

    def test_retries_of_one_submit_carry_one_key(self, server: ScriptedServer, client: BatonClient) -> None:
        server.script("POST", "/job", reset, reply(503), reply(200, JOB), reply(200, JOB), reply(200, JOB))
        client.submit(JobSubmit(command=["true"]))
        client.submit(JobSubmit(command=["true"]))
        client.submit(JobSubmit(command=["true"]), idempotency_key="mine")
        keys = [request.headers["idempotency-key"] for request in server.seen]
        assert keys[0] == keys[1] == keys[2] != keys[3]
        assert keys[4] == "mine"

    def test_batch(self, server: ScriptedServer, client: BatonClient) -> None:
        server.script("POST", "/jobs/batch", reply(200, [JOB, JOB]))
        assert len(client.submit_batch([JobSubmit(command=["a"]), JobSubmit(command=["b"])])) == 2
        assert server.seen[0].headers["idempotency-key"]

    def test_lists_are_paged(self, server: ScriptedServer, client: BatonClient) -> None:
        server.script(
            "GET", "/jobs", reply(200, {"jobs": [JOB], "next_cursor": "c+/="}), reply(200, {"jobs": [JOB, JOB]})
        )
        found = pages(lambda cursor: client.jobs(status=JobState.RUNNING, limit=2, cursor=cursor))
        assert [len(page.jobs) for page in found] == [1, 2]
        assert query_of(server, 0) == {"status": "running", "limit": "2"}
        assert query_of(server, 1) == {"status": "running", "limit": "2", "cursor": "c+/="}

    def test_history(self, server: ScriptedServer, client: BatonClient) -> None:
        for name, call in (
            ("events", client.events),
            ("attempts", client.attempts),
            ("checkpoints", client.checkpoints),
        ):
            server.script("GET", f"/job/{ID}/{name}", reply(200, {name: []}))
            assert call(ID).next_cursor is None
            assert query_of(server)["limit"] == "100"
        server.script("GET", f"/job/{ID}/logs", reply(200, {"lines": []}))
        assert client.logs(ID).lines == []

    def test_metrics_are_read_to_the_end(self, server: ScriptedServer, client: BatonClient) -> None:
        point = {"epoch": 1, "step": 3, "at": 1.5, "metrics": {"loss": "-inf", "lr": 0.5}}
        server.script(
            "GET",
            f"/job/{ID}/metrics",
            reply(200, {"points": [point], "next_cursor": "c"}),
            reply(200, {"points": [{**point, "step": 4}], "next_cursor": "d"}),
            reply(200, {"points": [], "next_cursor": "d"}),
        )
        found = list(client.metric_points(ID))
        assert [(one.step, one.numbers()) for one in found] == [
            (step, {"loss": -math.inf, "lr": 0.5}) for step in (3, 4)
        ]
        assert [query_of(server, place).get("cursor") for place in range(3)] == [None, "c", "d"]

    def test_an_id_cannot_reach_another_route(self, server: ScriptedServer, client: BatonClient) -> None:
        with pytest.raises(NotFound):
            client.get_job("../keys")
        assert server.seen[0].path == "/job/..%2Fkeys"

    @pytest.mark.parametrize(
        ("command", "code", "state", "works"),
        [
            ("stop", "job_canceled", "canceled", True),
            ("pause", "illegal_transition", "paused", True),
            ("resume", "illegal_transition", "pending", True),
            ("retry", "illegal_transition", "running", True),
            ("resume", "illegal_transition", "failed", False),
        ],
    )
    def test_a_command_whose_answer_got_lost_has_worked(
        self, server: ScriptedServer, client: BatonClient, command: str, code: str, state: str, works: bool
    ) -> None:
        server.script("POST", f"/job/{ID}/{command}", reset, refusal(code))
        server.script("GET", f"/job/{ID}", reply(200, {**JOB, "state": state, "status": state}))
        if works:
            assert getattr(client, command)(ID).state == state
        else:
            with pytest.raises(ApiError):
                getattr(client, command)(ID)

    def test_a_command_that_is_refused_at_once_is_refused(self, server: ScriptedServer, client: BatonClient) -> None:
        server.script("POST", f"/job/{ID}/stop", refusal("job_canceled"))
        with pytest.raises(LeaseLost):
            client.stop(ID)

    def test_an_answer_of_another_world(self, server: ScriptedServer, client: BatonClient) -> None:
        server.script("GET", f"/job/{ID}", reply(200, {"id": ID, "state": "dancing"}))
        with pytest.raises(UnexpectedAnswer, match="get_job"):
            client.get_job(ID)


class TestWorker:
    def test_claim(self, server: ScriptedServer, client: BatonClient) -> None:
        server.script("GET", "/work", reply(200, []), reply(200, [WORK]))
        assert client.claim(WorkQuery()) is None
        item = client.claim(WorkQuery(queue="q", gpu_model="RTX 4090", vram_gib=24))
        assert item is not None
        assert (item.id, item.epoch, item.lease_token) == (ID, 2, "t-1")
        assert server.seen[1].headers["x-lease-aware"] == "1"
        assert query_of(server) == {"queue": "q", "gpu_model": "RTX 4090", "vram_gib": "24.0"}

    @pytest.mark.parametrize("trouble", [reset, reply(503)])
    def test_a_claim_is_tried_once(self, server: ScriptedServer, client: BatonClient, trouble: Act) -> None:
        """A lost answer carried a job: a second try took another. And an agent could not leave between the tries."""
        server.script("GET", "/work", trouble, reply(200, [WORK]))
        with pytest.raises(Unreachable):
            client.claim(WorkQuery())
        assert len(server.seen) == 1

    def test_every_write_carries_the_lease(self, server: ScriptedServer, client: BatonClient) -> None:
        empty = ChunkedFile(path="a", size_bytes=0, chunks=[])
        manifest = Manifest(version=2, job_id=ID, step=MAX_STEP, epoch=2, packs=[], chunks=[], files=[empty])
        server.routes |= {
            ("POST", f"/heartbeat/{ID}"): reply(200, BEAT),
            ("POST", f"/job/{ID}/checkpoints"): reply(200, {"committed": True, "step": 1, "epoch": 2}),
            ("POST", f"/job/{ID}/checkpoints/7/urls"): reply(200, {"urls": {"a": "u"}, "expires_at": 1}),
            ("POST", f"/job/{ID}/checkpoints/7/damaged"): OK,
            ("POST", f"/job/{ID}/artifacts"): reply(200, {"missing": []}),
            ("POST", "/complete"): OK,
            ("POST", "/fail"): OK,
            ("POST", "/release"): OK,
            ("POST", f"/job/{ID}/logs"): OK,
            ("GET", f"/job/{ID}/inputs"): reply(200, {"inputs": [], "expires_at": 1}),
        }
        assert client.heartbeat(ID, "t", HeartbeatRequest(step=3)).directive is Directive.PAUSE
        assert client.heartbeat(ID, "t").epoch == 2
        assert client.commit("t", manifest).committed
        assert client.blob_urls(ID, 7, [], lease_token="t").urls == {"a": "u"}
        client.report_damaged(ID, 7, "t", epoch=1, message="x" * 9999)
        assert client.declare_artifacts(ID, "t", [_artifact()]).missing == []
        assert client.complete("t", CompleteRequest(job_id=ID)).state == "complete"
        client.fail("t", FailRequest(job_id=ID))
        client.release("t", ReleaseRequest(job_id=ID))
        client.send_logs(ID, "t", LogChunk(first_line=0, lines=["x"]))
        assert len(list(client.inputs(ID, "t"))) == 1
        assert {request.headers.get("x-lease-token") for request in server.seen} == {"t"}
        assert len(json.loads(server.seen[4].body)["message"]) == 512
        assert client.stats.requests["heartbeat"] == 2

    def test_inputs_are_asked_for_page_by_page(self, server: ScriptedServer, client: BatonClient) -> None:
        page = {"inputs": [], "expires_at": 1}
        server.script("GET", f"/job/{ID}/inputs", reply(200, {**page, "next_cursor": "n"}), reply(200, page))
        found = client.inputs(ID, "t")
        next(found)
        assert len(server.seen) == 1
        assert len(list(found)) == 1
        assert query_of(server) == {"cursor": "n"}

    def test_a_budget_for_some_calls(self, server: ScriptedServer, client: BatonClient) -> None:
        server.routes["POST", f"/heartbeat/{ID}"] = reply(503, b"", {"Retry-After": "5"})
        with pytest.raises(Unreachable, match="after 1 try"):
            client.within(3).heartbeat(ID, "t")
        assert client.stats.requests == {"heartbeat": 1}


class TestAdmin:
    def test_keys(self, server: ScriptedServer, client: BatonClient) -> None:
        key = {"id": "k1", "name": "n", "tenant": "default", "scopes": ["submit"], "created_at": 1}
        server.script("POST", "/keys", reply(503), reply(200, {**key, "key": "baton_k1_s"}))
        server.script("GET", "/keys", reply(200, {"keys": [key]}))
        server.script("DELETE", "/keys/k1", reply(204))
        with pytest.raises(Unreachable):
            client.create_key(KeyCreate(name="n", scopes=[Scope.SUBMIT]))
        assert client.create_key(KeyCreate(name="n", scopes=[Scope.SUBMIT])).key == "baton_k1_s"
        assert [found.id for found in client.list_keys().keys] == ["k1"]
        client.revoke_key("k1")
        assert server.seen[-1].method == "DELETE"

    def test_webhooks(self, server: ScriptedServer, client: BatonClient) -> None:
        webhook = {"id": "0123456789abcdef0123", "url": "https://hooks.example.com/", "created_at": 1}
        server.script("POST", "/webhooks", reply(503), reply(200, {**webhook, "secret": "s"}))
        with pytest.raises(Unreachable):
            client.create_webhook(WebhookCreate(url=webhook["url"]))
        assert client.create_webhook(WebhookCreate(url=webhook["url"])).secret == "s"
        server.script("GET", "/webhooks", reply(503), reply(200, {"webhooks": [webhook]}))
        assert [found.id for found in client.list_webhooks()] == [webhook["id"]]
        server.script("GET", f"/webhooks/{webhook['id']}/deliveries", reply(200, {"deliveries": []}))
        assert client.deliveries(webhook["id"], limit=3, cursor="n").deliveries == []
        assert query_of(server) == {"limit": "3", "cursor": "n"}
        server.script("POST", f"/webhooks/{webhook['id']}/replay", reply(503), reply(200, {"queued": 2}))
        with pytest.raises(Unreachable):
            client.replay_webhook(webhook["id"], ID)
        assert client.replay_webhook(webhook["id"], ID, 4).queued == 2
        assert json.loads(server.seen[-1].body) == {"job_id": ID, "from_seq": 4}
        server.script("DELETE", f"/webhooks/{webhook['id']}", reply(204))
        client.delete_webhook(webhook["id"])
        assert server.seen[-1].method == "DELETE"

    def test_health(self, server: ScriptedServer, client: BatonClient) -> None:
        server.script("GET", "/health", reply(200, {"status": "ok", "version": "1", "server_time": 5}))
        assert client.health().version == "1"


class TestFleets:
    def test_fleets(self, server: ScriptedServer, client: BatonClient) -> None:
        spec = {"name": "nights", "providers": ["loopback"], "max_usd_per_hour": 0.5, "budget": {"total_usd": 20}}
        view = {"spec": spec, "created_at": 1, "updated_at": 1, "at": 2}
        server.script("PUT", "/fleets/nights", reply(503), reply(200, view))
        assert client.put_fleet(FleetSpec.model_validate(spec)).at == 2
        assert json.loads(server.seen[-1].body) == spec
        server.script("GET", "/fleets", reply(200, {"fleets": [view]}))
        server.script("GET", "/fleets/nights", reply(200, view))
        server.script("POST", "/fleets/nights/stop", reply(200, {**view, "stopped": True}))
        assert client.fleets().fleets == [client.fleet("nights")] and client.stop_fleet("nights").stopped
        server.script("GET", "/fleets/nights/machines", reply(200, {"machines": []}))
        assert client.ended_machines("nights", limit=3) == [] and query_of(server) == {"limit": "3"}
        server.script("GET", "/fleets/nights/events", reply(200, {"events": [{"at": 1, "type": "machine.gone"}]}))
        assert client.fleet_events("nights")[0].machine is None and query_of(server) == {"limit": "100"}
        server.script("GET", "/fleets/nights/machines/m-1/logs", reply(200, {"text": "started"}))
        server.script("GET", "/fleets/nights/machines/m-1/shell", reply(200, {"host": "h", "port": 22, "user": "u"}))
        assert client.machine_log("nights", "m-1").text == "started"
        assert client.machine_shell("nights", "m-1").host == "h"
        server.script("GET", f"/job/{ID}/machines", reply(200, {"fleets": [], "attempts": [], "usd": 0.3, "at": 1}))
        assert client.job_machines(ID).usd == 0.3

    def test_machines(self, server: ScriptedServer, client: BatonClient) -> None:
        answer = {
            "machine_id": "m",
            "api_key": "k",
            "queues": ["default"],
            "usd_per_hour": 1,
            "heartbeat_interval_s": 60,
        }
        busy = {"error": {"code": "conflict", "message": "The create of m is not recorded yet."}}
        server.script("POST", "/machines/enroll", reply(409, busy), reply(200, answer))
        assert client.enroll(EnrollRequest(gpus=1)).api_key == "k"
        assert json.loads(server.seen[-1].body) == {"gpus": 1}
        orders = {"state": "draining", "drain": True, "alone_s": 900, "heartbeat_interval_s": 60}
        server.script("POST", "/machines/heartbeat", reply(200, orders))
        assert client.machine_heartbeat(MachineHeartbeat(job_id=ID)).drain
        assert json.loads(server.seen[-1].body) == {"job_id": ID}


class TestObjects:
    def _uploads(self, store: ScriptedServer, *, suffix: str = "") -> Any:
        def act(handler: Handler) -> None:
            files = json.loads(handler.request_seen.body)["files"]
            targets = [
                {
                    "key": file["key"],
                    "url": f"{store.url}/{file['key']}{suffix}",
                    "headers": {"x-amz-checksum-crc64nvme": file["crc64nvme"]},
                }
                for file in files
            ]
            handler.answer(200, {"uploads": targets, "expires_at": 1})

        return act

    def test_many_files_in_batches(
        self,
        server: ScriptedServer,
        store: ScriptedServer,
        client: BatonClient,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("gpu_client.transport.api.objects.FILES_PER_BATCH", 4)
        for index in range(10):
            (tmp_path / f"{index}.png").write_bytes(bytes([index]) * index)
        server.routes["POST", "/uploads"] = self._uploads(store)
        stored = client.upload_files("training-data", files_below(tmp_path, prefix="digits/"))
        assert store.objects == {f"/digits/{index}.png": bytes([index]) * index for index in range(10)}
        assert stored["digits/3.png"] == digest_bytes(b"\x03\x03\x03")
        assert client.stats.requests == {"upload_urls": 3}
        assert all("x-api-key" not in request.headers for request in store.seen)
        assert json.loads(server.seen[0].body)["bucket"] == "training-data"

    def test_urls_that_ran_out_are_asked_for_again(
        self, server: ScriptedServer, store: ScriptedServer, client: BatonClient, tmp_path: Path
    ) -> None:
        (tmp_path / "a").write_bytes(b"a")
        server.script("POST", "/uploads", self._uploads(store, suffix=".old"), self._uploads(store))
        store.routes["PUT", "/a.old"] = EXPIRED
        client.upload_files("training-data", {"a": tmp_path / "a"})
        assert store.objects == {"/a": b"a"}
        server.routes["POST", "/uploads"] = self._uploads(store, suffix=".old")
        with pytest.raises(UrlExpired):
            client.upload_files("training-data", {"a": tmp_path / "a"})

    def test_a_file_that_cannot_be_read_is_named(self, client: BatonClient, tmp_path: Path) -> None:
        with pytest.raises(TransferError, match="absent"):
            client.upload_files("training-data", {"a": tmp_path / "absent"})
        (tmp_path / "dangling").symlink_to("nowhere")
        with pytest.raises(TransferError, match="dangling"):
            files_below(tmp_path)

    def test_download_by_token_and_url(
        self, server: ScriptedServer, store: ScriptedServer, client: BatonClient, tmp_path: Path
    ) -> None:
        key = "jobs/1/a b:ü%.bin"
        store.objects = {"/s3": b"model"}
        server.script("GET", "/download/token", reply(200, {"token": "one-time", "expires_at": 1}))
        path = "/download/training-checkpoints/jobs/1/a%20b%3A%C3%BC%25.bin"
        server.script("GET", path, reply(200, {"url": store.url + "/s3?sig=1", "expires_at": 1}))
        client.download("training-checkpoints", key, tmp_path / "out" / "model", digest=digest_bytes(b"model"))
        assert (tmp_path / "out" / "model").read_bytes() == b"model"
        assert query_of(server, 0) == {"bucket": "training-checkpoints", "key": key}
        assert server.seen[1].headers["x-download-token"] == "one-time"
        # the store sees neither key nor token
        assert not {"x-api-key", "x-download-token", "authorization"} & set(store.seen[0].headers)

    def test_a_token_whose_answer_got_lost_is_replaced(
        self, server: ScriptedServer, store: ScriptedServer, client: BatonClient, tmp_path: Path
    ) -> None:
        store.objects = {"/s3": b"model"}
        server.routes["GET", "/download/token"] = reply(200, {"token": "one-time", "expires_at": 1})
        server.script(
            "GET",
            "/download/b/k",
            reset,
            refusal("token_invalid", 401),
            reply(200, {"url": store.url + "/s3", "expires_at": 1}),
        )
        client.download("b", "k", tmp_path / "m")
        assert (tmp_path / "m").read_bytes() == b"model"
        assert client.stats.requests == {"download_token": 2, "download": 3}

    def test_download_failures(
        self, server: ScriptedServer, store: ScriptedServer, client: BatonClient, tmp_path: Path
    ) -> None:
        server.script("GET", "/download/token", refusal("object_not_found", 404))
        with pytest.raises(NotFound):
            client.download("b", "k", tmp_path / "m")
        server.routes["GET", "/download/token"] = reply(200, {"token": "one-time", "expires_at": 1})
        server.script("GET", "/download/b/k", refusal("token_wrong_key", 403))
        with pytest.raises(TokenRefused):
            client.download("b", "k", tmp_path / "m")
        server.routes["GET", "/download/b/k"] = reply(200, {"url": store.url + "/s3", "expires_at": 1})
        store.objects = {"/s3": b"other"}
        with pytest.raises(ChecksumMismatch):
            client.download("b", "k", tmp_path / "m", digest=digest_bytes(b"model"))
        store.routes["GET", "/s3"] = EXPIRED
        with pytest.raises(UrlExpired):
            client.download("b", "k", tmp_path / "m")
        assert list(tmp_path.iterdir()) == []

    def test_list_objects(self, server: ScriptedServer, client: BatonClient) -> None:
        server.script("GET", "/data", reply(200, {"objects": [], "next_cursor": "n"}))
        assert client.list_objects(prefix="digits/").next_cursor == "n"
        assert query_of(server) == {"bucket": "training-data", "prefix": "digits/", "limit": "1000"}


def _artifact() -> Any:
    from baton.contract.worker.calls import DeclaredArtifact

    return DeclaredArtifact(path="m", size_bytes=0, crc64nvme="AAAAAAAAAAA=", blake3="0" * 64)
