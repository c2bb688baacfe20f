"""Test that the permissions of the functions equal the requests that the functions send, in both directions."""

from __future__ import annotations

import fnmatch
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from blake3 import blake3

import tests.kits.api.harness as harness
from baton.contract.errors import ErrorCode
from baton.contract.fleets.money import Budget
from baton.contract.fleets.providers import ACCOUNTS
from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET, ring_token
from cdk.resources.access import ACCESS
from functions.api.http.route import all_routes
from functions.api.machines.enrolment_keys import EnrolmentKeys
from functions.api.worlds.seat_settlement import with_newest_progress
from functions.domain.jobs.attempt_end import LATE_AFTER_S
from functions.domain.rules import steering
from functions.domain.worlds.world_record import WorldRecord
from functions.fleet.clock import FleetClock
from functions.fleet.ticks.controller import FleetController
from functions.fleet.ticks.demand import completed_jobs, waiting_jobs
from functions.local.emulator import Emulator
from functions.publishing.bus import DeadLetterQueue, EventBridgeBus
from functions.publishing.outbox import publish
from functions.storage.dynamodb.webhooks import DynamoWebhookStore
from functions.storage.provider_accounts import SecretsManagerAccounts
from functions.webhooks.delivery import deliver
from functions.webhooks.event_queue import SqsDeliveryQueue, Subscribers
from functions.webhooks.http_delivery import PostOutcome
from tests.functional.api.calls import PROGRAM
from tests.functional.api.test_transfers import download, multipart, token, upload
from tests.kits.api.accounts import KEY, log_in, market
from tests.kits.api.fleets import DOCUMENT
from tests.kits.api.harness import NOW, TENANT, Api, quoted
from tests.kits.api.stream_records import no_wait, stream_record
from tests.kits.api.webhooks import make_event, make_webhook
from tests.kits.clouds.emulator import unique
from tests.kits.clouds.store_sets import MinistackClients
from tests.kits.files.declared_files import declared, large, pieces
from tests.twins.provider import VirtualMachine, VirtualProvider

pytestmark = pytest.mark.emulator

TRANSACTED = {"Put": "PutItem", "Update": "UpdateItem", "Delete": "DeleteItem", "ConditionCheck": "ConditionCheckItem"}
S3_RIGHTS = {
    "HeadObject": ("GetObject", "ListBucket"),
    "GetObject": ("GetObject", "ListBucket"),
    "ListObjectsV2": ("ListBucket",),
    "DeleteObject": ("DeleteObject",),
    "DeleteObjects": ("DeleteObject",),
    "PutObject": ("PutObject",),
    "CreateMultipartUpload": ("PutObject",),
    "UploadPart": ("PutObject",),
    "CompleteMultipartUpload": ("PutObject",),
    "AbortMultipartUpload": ("AbortMultipartUpload",),
    "ListParts": ("ListMultipartUploadParts",),
    "ListMultipartUploads": ("ListBucketMultipartUploads",),
}
"""Permissions of each call, by AWS's reference of S3 actions. Reads of possibly absent objects need `ListBucket`."""


KEPT_COMMANDS = 5
"""Commands of a job before the removal of the oldest; the product keeps 100, whose writes send the same requests."""
LAMBDAS_OWN = {"ChangeMessageVisibility", "DeleteMessage", "GetQueueAttributes", "ReceiveMessage"}
"""Actions of Lambda on a queue with the function's permissions; the function itself uses the first to postpone."""


class Recorder:
    """Record the permissions that each function needs from the requests of its clients, presigned requests included."""

    def __init__(self) -> None:
        self.function = ""
        self.calls: set[str] = set()
        self.tables: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.buckets: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.keys: dict[str, set[str]] = defaultdict(set)
        """Object keys in the requests of each function."""
        self.written: dict[str, set[str]] = defaultdict(set)
        """Object keys that each function puts."""
        self.others: dict[str, set[str]] = defaultdict(set)
        """Actions of other services as `<service>:<action>`."""

    def note(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        """Handle botocore's event `provide-client-params`."""
        if not self.function:
            return
        if model.service_model.service_name == "s3":
            name = params["Bucket"].partition("-")[2]
            self.buckets[self.function][name].update(S3_RIGHTS[model.name])
            keys = {one["Key"] for one in params.get("Delete", {}).get("Objects", [params]) if "Key" in one}
            self.keys[self.function] |= keys
            if "PutObject" in S3_RIGHTS[model.name]:
                self.written[self.function] |= keys
            return
        if model.service_model.service_name != "dynamodb":
            self.others[self.function].add(f"{model.service_model.service_name}:{model.name}")
            return
        tables = self.tables[self.function]
        for action in params.get("TransactItems", ()):
            ((kind, part),) = action.items()
            tables[part["TableName"].partition("-")[2]].add(TRANSACTED[kind])
        for table in params.get("RequestItems", ()):
            tables[table.partition("-")[2]].add(model.name)
        if "TableName" in params:
            place = params["TableName"].partition("-")[2]
            tables[f"{place}/{params['IndexName']}" if "IndexName" in params else place].add(model.name)

    def within(self, function_of: Callable[..., str], call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call, and record its requests under its function."""

        def recorded(*args: Any, **more: Any) -> Any:
            outer, self.function = self.function, function_of(*args, **more)
            try:
                return call(*args, **more)
            finally:
                self.function = outer

        return recorded


def rights(by_place: Mapping[str, Iterable[str]]) -> set[tuple[str, str]]:
    """Return pairs of resource and action."""
    return {(place, action) for place, actions in by_place.items() for action in actions}


@contextmanager
def listening(recorder: Recorder, emulator: Emulator, patch: pytest.MonkeyPatch) -> Iterator[Api]:
    """Build the API on the emulated cloud with a recorder."""

    def function_of(event: dict[str, Any], _context: object, function: str) -> str:
        recorder.calls.add(event["routeKey"])
        return function

    api = harness.emulated_api(emulator)
    patch.setattr(harness, "dispatch", recorder.within(function_of, harness.dispatch))
    patch.setattr(harness, "authorize", recorder.within(lambda *_, **__: "authorizer", harness.authorize))
    for part in ("sweep", "run_due_retentions"):
        patch.setattr(harness, part, recorder.within(lambda *_, **__: "sweeper", getattr(harness, part)))
    clients = [api.context.jobs._client, api.context.objects._client]  # type: ignore[attr-defined]
    for client in clients:
        client.meta.events.register("provide-client-params.*", recorder.note)
    yield api


def steer(api: Api) -> None:
    """Call the submitter for waiting, running and ended jobs."""
    job = api.submit(queue="steer")["id"]
    api.post("/jobs/batch", {"jobs": [{"command": ["train"], "queue": "batch"}]}).ok()
    for command in ("pause", "resume", "stop", "retry"):
        api.post(f"/job/{job}/{command}").ok()
    held = api.claim(queue="steer")
    api.post(f"/job/{job}/pause").ok()
    held.commit(100).ok()
    for number in range(16):
        points = [{"step": number, "at": 1, "metrics": {"loss": 1}}]
        held.post(
            f"/job/{job}/logs", {"first_line": number, "lines": ["line"], "first_point": number, "points": points}
        )
    api.get(f"/job/{job}").ok()
    api.get("/jobs").ok()
    held.release().ok()
    for what in ("", "/events", "/attempts", "/checkpoints", "/logs", "/metrics", "/curves"):
        api.get(f"/job/{job}{what}").ok()
    api.post(f"/job/{job}/rules/backtest", {"text": "rules: [{name: late, when: loss > 9, do: stop}]"}).ok()
    api.post(f"/job/{job}/stop").ok()
    api.post(f"/job/{job}/retry", {"from_step": 100}).ok()
    api.get("/jobs").ok()
    api.get("/jobs", query={"status": "pending", "queue": "steer"}).ok()


def steer_training(api: Api) -> None:
    """Use rules and commands of a running job, up to the removal of the oldest command; then roll back."""
    rules = "rules: [{name: nan, when: not isfinite(loss), do: rollback}]"
    api.post("/rules/check", {"text": rules}).ok()
    rent = {"budget_usd": 5, "providers": ["loopback"]}
    api.post("/jobs/check", {"recipe": "digits@1", "rules": rules, "rent": rent}).ok()
    job = api.submit(queue="trained", rules=rules)["id"]
    held = api.claim(queue="trained")
    api.call("PUT", f"/job/{job}/rules", {"text": ""}).ok()
    for _ in range(KEPT_COMMANDS):
        api.post(f"/job/{job}/commands", {"kind": "save"}).ok()
    decision = {"number": 1, "type": "rule.fired", "rule": "nan", "step": 1, "at": NOW}
    held.report(1, results=[{"seq": 1, "status": "applied"}], decisions=[decision]).ok()
    held.report(2, seq=KEPT_COMMANDS, statuses=[]).ok()
    api.post(f"/job/{job}/commands", {"kind": "save"}).ok()
    for what in ("rules", "rules/history", "commands"):
        api.get(f"/job/{job}/{what}").ok()
    by_rule = {"kind": "rollback", "ended_by": {"rule": "nan", "step": 1}, "rollback": {"before_step": 1}}
    held.release(by_rule=by_rule).ok()
    assert len(api.claim(queue="trained").item["control"]["commands"]) == KEPT_COMMANDS


def watch(api: Api) -> None:
    """Let each function evaluate the rules of a group, with commands up to the removal of the oldest."""
    rule = "{name: here, when: 'wall > 1m and group_count(loss) > 0', on: %s, do: [save, {save: best}, pause]}"
    jobs = []
    for number, occasion in enumerate(("heartbeat", "timer")):
        rules = f"rules: [{rule % occasion}, {{name: broken, when: interruptions > 0, do: {{stop: failed}}}}]"
        api.submit(queue="watched", rules=rules, tags={"group": "g"}, policy={"heartbeat_interval_s": 60})
        held = api.claim(queue="watched", price_usd_per_hour=1.5, machine_id=f"w-{number}")
        held.heartbeat(step=1, metrics={"loss": 1.0}).ok()
        for _ in range(KEPT_COMMANDS):
            api.post(f"/job/{held.id}/commands", {"kind": "save"}).ok()
        held.report(1, results=[{"seq": seq, "status": "applied"} for seq in (1, 2)]).ok()
        jobs.append(held)
    api.clock.advance(70)
    api.sweep()
    for held in jobs:
        assert held.report(1).ok()["directive"] == "pause"
        api.get(f"/job/{held.id}/rules").ok()
        held.fail().ok()
    api.post(f"/job/{jobs[0].id}/resume").ok()
    silent = api.claim(queue="watched", machine_id="w-9")
    api.clock.advance(10_000)
    for _ in range(10):
        api.clock.advance(60)
        api.sweep()
    assert api.job(silent.id)["ended_by"]["rule"] == "broken"
    api.post(f"/job/{silent.id}/retry").ok()


def scale(api: Api) -> None:
    """Scale a group up and down, with evaluations by each function."""
    api.submit(queue="scaled", tags={"group": "scaled"}, policy={"heartbeat_interval_s": 60})
    for name, delta, occasion in (("up", 2, "heartbeat"), ("down", -2, "timer")):
        do = f"{{scale: {{group: scaled, delta: {delta}}}}}"
        rules = f"rules: [{{name: {name}, when: wall > 1m, on: {occasion}, do: {do}}}]"
        api.submit(queue=f"scale-{name}", rules=rules, policy={"heartbeat_interval_s": 600})
    api.claim(queue="scaled", machine_id="s-0")
    up, down = (api.claim(queue=f"scale-{name}", machine_id=f"s-{name}") for name in ("up", "down"))
    api.clock.advance(70)
    up.heartbeat().ok()
    assert len([job for job in api.get("/jobs").ok() if job["tags"].get("group") == "scaled"]) == 3
    api.sweep()
    left = [job for job in api.get("/jobs").ok() if job["tags"].get("group") == "scaled"]
    assert sorted(job["state"] for job in left) == ["canceled", "canceled", "running"]
    down.heartbeat().ok()


def train_together(api: Api) -> None:
    """Let two nodes of an elastic job join, lose one node, stop the job and retry it."""
    job = api.submit(queue="together", nodes={"min": 1, "max": 2})["id"]
    nodes = [api.claim(queue="together", machine_id=f"e-{number}") for number in range(2)]
    names = [f"{node.item['world']['seat']}.1.00000000" for node in nodes]
    for node, name in zip(nodes, names, strict=True):
        node.post(f"/job/{node.id}/world/join", {"node": name, "program": PROGRAM}).ok()
    first = nodes[0]
    first.post(f"/job/{first.id}/world/epoch", {"node": names[0], "epoch": 0, "members": names}).ok()
    first.post(f"/job/{first.id}/world/report", {"node": names[0], "epoch": 1}).ok()
    data = {"node": names[0], "plan_sha256": "9f" * 32, "epoch": 1, "want": 1}
    first.post(f"/job/{first.id}/world/data", data).ok()
    upload = {"to": names[1], "channel": "9f86d081", "number": 0, "size_bytes": 5}
    signed = first.post(f"/job/{first.id}/world/relay", {"node": names[0], "upload": upload}).ok()["upload"]
    assert api.send("PUT", signed["url"], signed["headers"], b"hello").status == 200
    download = {"source": names[0], "channel": "9f86d081", "number": 1}
    body = {"node": names[1], "calls": True, "download": download}
    nodes[1].post(f"/job/{nodes[1].id}/world/relay", body).ok()
    api.get(f"/job/{job}/world").ok()
    api.post(f"/job/{job}/world/exclude", {"seats": [int(names[1].split(".")[0])]}).ok()
    api.get(f"/job/{job}").ok()
    first.heartbeat().ok()
    api.clock.advance(1000)
    api.sweep()
    api.post(f"/job/{job}/stop").ok()
    api.post(f"/job/{job}/retry").ok()
    api.claim(queue="together", machine_id="e-2").complete().ok()


def describe(api: Api) -> None:
    """Register recipes, read them, submit a job with one."""
    document = "{name: hello, version: 1, description: Says hello., steps: [{name: hello, run: [echo, hello]}]}"
    for _ in range(2):
        api.post("/recipes", {"document": document}).ok()
    api.get("/recipes").ok()
    api.get("/recipes/hello@1").ok()
    api.post("/job", {"recipe": "hello@1", "queue": "described"}).ok()


def work(api: Api) -> None:
    """Call the worker for jobs that are lost, resumed, damaged, cleaned up and completed."""
    api.put_object(DATA_BUCKET, "in/1.png")
    api.submit(queue="work", inputs=[{"prefix": "in/"}], outputs=["model"], policy={"retention": {"keep_last": 1}})
    api.get("/work/peek", query={"queue": "work"}).ok()
    held = api.claim(queue="work")
    held.heartbeat(step=1).ok()
    api.get(f"/job/{held.id}/inputs", headers=held.headers).ok()
    for step in (100, 200):
        held.commit(step, {"model.bin": b"%d" % step}).ok()
    held.post(f"/job/{held.id}/checkpoints/200/urls").ok()
    held.post(f"/job/{held.id}/checkpoints/200/damaged", {"epoch": held.epoch}).ok()
    api.clock.advance(1000)
    api.sweep()
    again = api.claim(queue="work", machine_id="m-2")
    output = large(2)
    artifacts = {"artifacts": [declared(output, path="model", blake3=blake3(output).hexdigest())]}
    for _ in range(2):
        for part in again.post(f"/job/{again.id}/artifacts", artifacts).ok()["missing"]:
            api.send("PUT", part["url"], part["headers"], pieces(output)[part["part"] - 1])
    again.complete({"model": output}).ok()
    share(api)
    for end in ("fail", "release"):
        api.submit(queue=end)
        ended = api.claim(queue=end)
        ended.post(f"/{end}", {"job_id": ended.id}).ok()
    api.clock.advance(1000)
    api.claim(queue="fail", machine_id="m-3")
    for _ in range(10):
        api.clock.advance(60)
        api.sweep()


def share(api: Api) -> None:
    """Run two jobs with shared outputs; the second receives the output of the first."""
    job = {
        "recipe": "dreambooth-lora-sd@2",
        "parameters": {"instance_prompt": "my dog", "class_prompt": "dog", "with_prior_preservation": True},
        "inputs": [{"prefix": "in/", "into": "instance"}],
    }
    found = []
    for images in (b"one", b"one and another"):
        api.submit(queue="shared", **job)
        held = api.claim(queue="shared", runs_plans="true", vram_gib=24, disk_gib=100)
        inputs = api.get(f"/job/{held.id}/inputs", headers=held.headers).ok()["inputs"]
        found.append([item["path"] for item in inputs if item["shared"]])
        held.complete({"pytorch_lora_weights.safetensors": b"weights", "class_images.zip": images}).ok()
    assert found == [[], [".baton/shared/class_images.zip"]]


def stopped(api: Api) -> None:
    """Stop a job while a reader uses an unkept object, which the sweeper deletes later."""
    api.submit(queue="stopped", policy={"retention": {"keep_last": 1}})
    held = api.claim(queue="stopped")
    held.commit(100).ok()
    held.post(f"/job/{held.id}/checkpoints/100/urls").ok()
    held.commit(200).ok()
    api.post(f"/job/{held.id}/stop").ok()
    api.clock.advance(LATE_AFTER_S)
    assert set(api.checkpoints(held.id)) == {100, 200}
    api.sweep()
    assert set(api.checkpoints(held.id)) == {200}


def original(api: Api) -> None:
    """Act as a client of the original: upload a zip of a checkpoint and one of the model."""
    api.submit(instance_prompt="dog", instance_data_prefix="dogs/", max_train_steps=2)
    (job,) = api.get("/work", query={"machine_id": "m-1"}).ok()
    api.post(f"/heartbeat/{job['id']}").ok()
    key = f"{job['checkpoint_prefix']}checkpoint-50.zip"
    multipart(api, key, token(api, "upload", key, CHECKPOINTS_BUCKET, key="worker"), b"zip", bucket=CHECKPOINTS_BUCKET)
    body = {"job_id": job["id"], "bucket_name": CHECKPOINTS_BUCKET, "key": key, "machine_id": "m-1"}
    api.post("/progress", body).ok()
    download(api, key, token(api, "download", key, CHECKPOINTS_BUCKET), CHECKPOINTS_BUCKET)


def transfer(api: Api) -> None:
    """Use tokens, single uploads, multipart uploads and both kinds of abort, in both buckets."""
    api.post(
        "/uploads",
        {"bucket": DATA_BUCKET, "files": [{"key": "a", "size_bytes": 1, "crc64nvme": "UvieJR3alJI="}]},
    ).ok()
    for bucket in (DATA_BUCKET, CHECKPOINTS_BUCKET):
        file = large(2)
        for _ in range(2):
            answer = api.post("/uploads", {"bucket": bucket, "files": [declared(file, key="large")]}).ok()
            for part in answer["uploads"]:
                api.send("PUT", part["url"], part["headers"], pieces(file)[part["part"] - 1])
    api.get("/data").ok()
    api.put_object(DATA_BUCKET, "c")
    assert download(api, "c", token(api, "download", "c")).status == 200
    job = api.submit(queue="mine")["id"]
    held = api.claim(queue="mine")
    held.store_artifacts({"step-1.png": b"picture"})
    (picture,) = api.get(f"/job/{job}/artifacts").ok()["artifacts"]
    assert api.send("GET", picture["url"]).status == 200
    for bucket, key in ((DATA_BUCKET, "b"), (CHECKPOINTS_BUCKET, f"jobs/{job}/own.zip")):
        said = token(api, "upload", key, bucket, key="worker")
        more: dict[str, Any] = {"bucket": bucket, "key": "worker"}
        made = upload(api, "POST", key, said, "?action=mpu-create", **more).ok()["uploadId"]
        upload(api, "PUT", key, said, f"?action=mpu-uploadpart&uploadId={made}&partNumber=1", b"x", **more).ok()
        upload(api, "POST", key, said, f"?action=mpu-complete&uploadId={made}", **more)
        upload(api, "DELETE", key, said, f"?action=mpu-abort&uploadId={made}", **more)
        upload(api, "DELETE", key, said, "?action=delete", **more)
    assert held.heartbeat().status == 200


def ring(api: Api) -> None:
    """Create, write, read, list and delete a ring, with a key and with the token of a job."""
    make = {"write": {"key": "ring.json", "data": "e30=", "version": "0123456789abcdef"}}
    api.post("/rings/shapes/records", make).ok()
    api.submit(rings=["shapes"], queue="ring")
    held = api.claim(queue="ring")
    key = ring_token(held.id, held.token)
    write = {"key": "inbox/w.1", "data": "", "version": "1123456789abcdef"}
    assert api.post("/rings/shapes/records", {"write": write, "read": ["inbox/w.1"]}, key=key).ok()["records"]
    assert api.get("/rings/shapes/records", query={"keys": "ring.json"}).ok()["records"]
    urls = api.post("/rings/shapes/urls", {"put": ["samples/w/1"], "get": ["samples/w/1"]}, key=key).ok()
    assert api.send("PUT", urls["put"][0]["url"], urls["put"][0]["headers"], b"x").status == 200
    assert api.send("GET", urls["get"][0]["url"]).status == 200
    for prefix in ("inbox/", "samples/"):
        assert len(api.get("/rings/shapes/keys", query={"prefix": prefix}, key=key).ok()["keys"]) == 1
    api.post("/rings/shapes/delete", {"keys": ["inbox/w.1", "samples/w/1"]}, key=key).ok(204)
    assert len(api.get("/rings").ok()["rings"]) == 1
    assert api.call("DELETE", "/rings/shapes").ok()["done"]


def administer(api: Api) -> None:
    """Create, list, replace and revoke keys; open, use and end a session."""
    first = api.post("/keys", {"name": "a", "scopes": ["submit"]}).ok()["id"]
    second = api.post("/keys", {"name": "b", "scopes": ["submit"], "replaces": first}).ok()["id"]
    api.get("/keys").ok()
    assert api.call("DELETE", f"/keys/{quoted(second)}").status < 300
    api.get("/health").ok()
    # No request to a store, whether the console is built or not.
    pages = [(method, path) for method in ("GET", "HEAD") for path in ("/", "/console")]
    assert {api.request(*page).status for page in [*pages, ("GET", "/console/a.js")]} <= {200, 307, 404}
    cookie = {"cookie": api.post("/sessions", {"key": api.keys["submit"]}).headers["set-cookie"].partition(";")[0]}
    code = api.post("/sessions/links").ok(201)["url"].partition("#code=")[2]
    api.post("/sessions/preview", {"code": code}).ok()
    api.post("/sessions", {"code": code}).ok(201)
    api.get("/jobs", key=api.post("/sessions/token", headers=cookie).ok(201)["token"]).ok()
    api.call("DELETE", "/sessions/current", headers=cookie).ok(204)
    job = api.submit()["id"]
    shared = api.post(f"/job/{job}/share").ok(201)
    assert api.get(f"/job/{job}", key=shared["key"]).ok()["id"] == job
    api.call("DELETE", f"/keys/{shared['id']}", key="submit").ok(204)


def hook(api: Api) -> None:
    """Create, name, list, replay and delete webhooks."""
    made = api.post("/webhooks", {"url": "https://hooks.example.com/", "every_job": False}).ok()["id"]
    job = api.submit(webhook=made, queue="hooked")["id"]
    api.get("/webhooks").ok()
    api.get(f"/webhooks/{made}/deliveries").ok()
    assert api.post(f"/webhooks/{made}/replay", {"job_id": job}).ok()["queued"] == 1
    api.call("PUT", "/fleets/hooked", {**DOCUMENT, "name": "hooked"}).ok()
    api.post("/fleets/hooked/stop").ok()
    assert api.post(f"/webhooks/{made}/replay", {"fleet": "hooked"}).ok()["queued"] == 0
    assert api.call("DELETE", f"/webhooks/{made}").status == 204


RENT = {"budget_usd": 1, "providers": ["loopback"]}


def rent(recorder: Recorder, api: Api) -> None:
    """Rent two machines: one works until the fleet stops, the other differs from its offer."""
    document = {"name": "nights", "providers": ["loopback"], "max_usd_per_hour": 1, "budget": {"total_usd": 9}}
    api.call("PUT", "/fleets/nights", {**document, "queues": ["rented"], "max": 2}).ok()
    for _ in range(2):
        api.submit(queue="rented", recipe="hello@1", command=None)
    provider = VirtualProvider(min_interval_s={"quote": 1})
    api.context = replace(api.context, drivers={"loopback": provider})
    assert api.context.fleet is not None
    api.post("/fleets/nights/plan", {"fleet": document, "job": {"recipe": "hello@1"}}).ok()
    api.post("/offers", {}).ok()
    tokens, random, clock = api.context.tokens, api.context.random, api.clock
    controller = FleetController(
        api.context.fleet,
        {"loopback": provider},
        waiting=partial(waiting_jobs, api.context.jobs, shards=1),
        completed=partial(completed_jobs, api.context.jobs),
        keys=EnrolmentKeys(tokens, random, clock, FleetClock(), "https://a"),
        now=clock.now,
        random_token=random.token,
        time_left_s=lambda: 55.0,
        read_jobs=api.context.jobs.get_many,
        budget=Budget(per_day_usd=50),
        read_world=partial(api.context.jobs.read, WorldRecord),
        read_progress=partial(with_newest_progress, api.context),
    )
    # The first node waits for a second machine, which no provider sells at this price.
    training = api.submit(nodes={"max": 2, "min": 2}, rent={**RENT, "max_usd_per_hour": 0.1})
    api.claim(queue=training["queue"])
    elastic = api.context.jobs.get(training["id"])
    assert elastic is not None
    recorder.within(lambda: "fleet", partial(with_newest_progress, api.context, elastic))()
    own = api.submit(rent=RENT)
    api.post(f"/job/{own['id']}/stop").ok()
    api.post(f"/job/{own['id']}/retry").ok()
    api.post(f"/job/{own['id']}/stop").ok()

    def tick(minutes: int) -> None:
        for _ in range(minutes):
            clock.advance(60)
            provider.now = clock.now()
            assert recorder.within(lambda: "fleet", controller.tick)().finished

    tick(1)
    good, bad = (one.environment["BATON_ENROLMENT_TOKEN"] for one in provider.creates)
    found = {"gpu_model": "RTX 4090", "gpus": 1, "vram_gib": 24, "disk_gib": 200, "nonce": "0" * 64}
    api.post("/machines/preflight", key=good).ok()
    key = api.post("/machines/enroll", found, key=good).ok()["api_key"]
    api.post("/machines/enroll", {**found, "vram_gib": 8}, key=bad).refused(ErrorCode.PREFLIGHT_FAILED)
    api.post("/machines/heartbeat", {"job_id": "146683a1-cb76-4702-9fef-fcccd32594f1"}, key=key).ok()
    provider.vanish(provider.alive()[0])
    provider.machines.append(VirtualMachine("stray", f"{api.context.fleet.deployment()}-x", 1.0, clock.now(), "h"))
    tick(5)
    api.post("/fleets/nights/stop").ok()
    tick(5)
    for path in ("/fleets", "/fleets/nights", "/fleets/nights/events", "/fleets/nights/history"):
        api.get(path).ok()
    assert len(api.get("/fleets/nights/machines").ok()["machines"]) >= 2
    assert api.get(f"/fleets/{own['queue']}").ok()["stopped"]
    assert api.get(f"/job/{own['id']}/machines").ok()["fleets"][0]["fleet"]["job_id"] == own["id"]
    for what in ("logs", "shell"):
        api.get(f"/fleets/nights/machines/unknown/{what}").refused(ErrorCode.MACHINE_NOT_FOUND, "machine")


def account(recorder: Recorder, emulator: Emulator, api: Api, patch: pytest.MonkeyPatch) -> None:
    """Store, replace, list and remove accounts in a new secret, examine and fix; the controller reads the accounts."""
    client = emulator.client("secretsmanager")
    client.meta.events.register("provide-client-params.*", recorder.note)
    store = SecretsManagerAccounts(lambda: client, unique("providers"))
    with market(api, patch, store) as vast:
        for provider in ACCOUNTS:
            api.call("PUT", f"/providers/{provider}", {"api_key": KEY})
        assert api.call("DELETE", "/providers/vast").status == 204
        log_in(api)
        vast.accounts[KEY].min_interval_s = {"destroy": 1}
        api.get("/providers").ok()
        api.get("/fleet-doctor").ok()
        assert api.context.fleet is not None
        stray = VirtualMachine("stray", f"{api.context.fleet.deployment()}-x", 1.0, NOW, "h")
        vast.accounts[KEY].machines.append(stray)
        api.post("/fleet-doctor/fix", {"findings": ["stray_machine/vast/stray"]}).ok()
        assert stray.ended_at is not None
        api.call("PUT", "/registries/ghcr.io", {"username": "acme", "password": KEY}).ok()
        assert len(api.get("/registries").ok()["registries"]) == 1
        assert api.call("DELETE", "/registries/ghcr.io").status == 204
    recorder.within(lambda: "fleet", store.read)()


def published(recorder: Recorder, emulator: Emulator, api: Api) -> None:
    """Publish an event with a delivery to a webhook, and an unpublishable event."""
    events, sqs = emulator.client("events"), emulator.client("sqs")
    dynamodb = MinistackClients.of(emulator).dynamodb
    store = DynamoWebhookStore(dynamodb, api.context.settings.table_prefix)
    store.put(make_webhook(tenant=TENANT))
    name = unique("bus")
    events.create_event_bus(Name=name)
    letters = sqs.create_queue(QueueName=name)["QueueUrl"]
    waiting = sqs.create_queue(QueueName=f"{name}.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    for client in (events, sqs, dynamodb):
        client.meta.events.register("provide-client-params.*", recorder.note)
    line = SqsDeliveryQueue(waiting, sqs)
    answer = recorder.within(lambda *_: "publisher", publish)(
        [stream_record(1), stream_record(2, document="{}")],
        EventBridgeBus(events, name),
        DeadLetterQueue(letters, sqs),
        no_wait,
        Subscribers(store, line, lambda: 0.0).enqueue,
    )
    assert answer == {"batchItemFailures": []}
    (letter,) = sqs.receive_message(QueueUrl=letters)["Messages"]
    assert json.loads(letter["Body"])["keys"]["sk"] == "EVENT#0000000002"
    (message,) = sqs.receive_message(QueueUrl=waiting, AttributeNames=["All"])["Messages"]
    record = {"body": message["Body"], "attributes": message["Attributes"]}
    again = recorder.within(lambda *_: "deliverer", deliver)(record, store, lambda *_: PostOutcome(503, "no"), NOW)
    assert again == 5
    recorder.within(lambda *_, **__: "admin", line.put)(make_webhook(), make_event(2))


def test_each_function_asks_for_what_its_role_allows(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(steering, "MAX_COMMANDS", KEPT_COMMANDS)
    with listening(recorder, emulator, monkeypatch) as api:
        for part in (
            steer,
            steer_training,
            describe,
            work,
            stopped,
            original,
            transfer,
            watch,
            scale,
            train_together,
            administer,
            hook,
            ring,
        ):
            part(api)
        rent(recorder, api)
        account(recorder, emulator, api, monkeypatch)
        published(recorder, emulator, api)
    assert recorder.calls == {route.route_key for route in all_routes()}
    for name, access in ACCESS.items():
        needed = rights(recorder.tables[name]) | rights(recorder.buckets[name])
        assert needed == rights(access.tables) | rights(access.buckets), name
        assert fnmatch.filter(recorder.keys[name], access.objects) == list(recorder.keys[name]), name
        written = recorder.written[name]
        assert fnmatch.filter(written, access.written or access.objects) == list(written), name
        assert bool(recorder.keys[name]) == bool(access.buckets), name
        queues = {*access.dead_letters, *access.delivery_queue} - LAMBDAS_OWN
        allowed = {f"events:{action}" for action in access.bus} | {f"sqs:{action}" for action in queues}
        allowed |= {f"secretsmanager:{action}" for action in access.provider_secret}
        assert recorder.others[name] == allowed, name
    feeds = {name for name, access in ACCESS.items() if LAMBDAS_OWN & set(access.delivery_queue)}
    assert feeds == {"deliverer"} and set(ACCESS["deliverer"].delivery_queue) == LAMBDAS_OWN
    # Lambda's own, with the function's rights: what its documentation of DynamoDB streams asks for.
    streams = {name: dict(access.streams) for name, access in ACCESS.items() if access.streams}
    reading = ("DescribeStream", "GetRecords", "GetShardIterator", "ListStreams")
    assert streams == {name: {"jobs": reading, "fleet": reading} for name in ("publisher", "fleet")}
