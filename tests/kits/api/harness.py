"""The API in one process: real event shapes, the real authorizer and dispatcher, stores of choice, a clock to turn.

`memory_api()` runs on the twins in memory, `emulated_api(emulator)` on DynamoDB and S3 of the emulated cloud.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

import requests
from blake3 import blake3

from baton.contract.errors import ErrorCode
from baton.contract.names import BUCKETS, CHECKPOINTS_BUCKET, DATA_BUCKET, OPERATOR_TENANT, Scope
from functions.api.admin.keys import generate_key
from functions.api.checkpoints.retention_runner import run_due_retentions
from functions.api.http.authorizer import authorize
from functions.api.http.context import Context
from functions.api.http.dispatch import dispatch
from functions.api.http.route import Route, all_routes
from functions.api.operations.sweeper import SweepResult, sweep
from functions.domain.jobs.lease_expiry import ReclaimWatermark
from functions.local.emulator import Emulator
from functions.local.gateway.lambda_events import (
    HttpRequest,
    RoutePattern,
    authorizer_event,
    common_fields,
    decode_path,
    function_event,
    http_response,
)
from functions.settings import ControlPlaneSettings
from tests.kits.api.fakes import FakeClock, FakeLine, SeededRandomness
from tests.kits.clouds.store_sets import Cloud, MinistackClients, memory_cloud
from tests.kits.files.declared_files import described, in_packs
from tests.twins.cloud import MemoryCloud

NOW = 1_790_000_000
TENANT = "acme"
RIVAL = "rival"
NO_JOB = "00000000-0000-4000-8000-000000000000"
SOURCE_IP = "203.0.113.7"
WORKER = {"machine_id": "m-1", "runs_nodes": "true"}
"""Query of a claim."""
ALL_SCOPES = (Scope.SUBMIT, Scope.WORKER, Scope.ADMIN, Scope.ENROLL)

_PATTERNS: list[tuple[Route, RoutePattern]] = sorted(
    ((route, RoutePattern.parse(route.path)) for route in all_routes()), key=lambda entry: entry[1].rank, reverse=True
)


@dataclass(frozen=True)
class Answer:
    """An answer of the API, as a client sees the answer."""

    status: int
    headers: dict[str, str]
    text: str
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json["error"]
        # Clients of the original receive text there, and the rest beside it.
        return found if isinstance(found, dict) else {**self.json, "message": found}

    def ok(self, status: int = 200) -> Any:
        """The body of an answer that must be good."""
        assert self.status == status, f"{self.status} {self.text}"
        return self.json if self.text else None

    def refused(self, code: ErrorCode, field: str | None = None, remedy: str | None = None) -> dict[str, Any]:
        """The error of an answer that must be this refusal: status, code, field, remedy (of the code), request id."""
        assert self.status == code.status, f"{self.status} {self.text}"
        error = self.error
        assert error["code"] == code.value, self.text
        assert error.get("field") == field, self.text
        assert (remedy or code.remedy) in error["message"], self.text
        assert len(error["message"]) > len(code.remedy) + 10, "the message must say what was wrong"
        assert error["request_id"], self.text
        return error


@dataclass
class Api:
    """A tenant's view of the API. Keys: `submit`, `worker`, `admin`, `rival_*` of another tenant, and `operator`."""

    context: Context
    clock: FakeClock
    memory: MemoryCloud | None = None
    keys: dict[str, str] = field(default_factory=dict)
    requests: int = 0

    def __post_init__(self) -> None:
        for scope in ALL_SCOPES:
            self.keys[scope.value] = self.issue(TENANT, scope)
            self.keys[f"rival_{scope.value}"] = self.issue(RIVAL, scope)
        self.keys["operator"] = self.issue(OPERATOR_TENANT, Scope.ADMIN)

    def issue(self, tenant: str, *scopes: Scope, expires_at: int | None = None, machine: str | None = None) -> str:
        """A fresh key, stored."""
        key, whole = generate_key(
            self.context.random,
            tenant=tenant,
            name="test",
            scopes=list(scopes),
            now=self.clock.now(),
            expires_at=expires_at,
            machine=machine,
        )
        self.context.tokens.put_key(key)
        return whole

    def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        source_ip: str = SOURCE_IP,
    ) -> Answer:
        """Handle one HTTP request as API Gateway would; `target` is percent-encoded."""
        raw_path, _, raw_query = target.partition("?")
        sent = [(name, value) for name, value in (headers or {}).items()]
        incoming = HttpRequest(method, raw_path, raw_query, [("host", "api.test"), *sent], body, source_ip)
        path = decode_path(raw_path)
        found = _route_of(method, path)
        if found is None:
            return Answer(404, {}, json.dumps({"message": "Not Found"}))
        route, parameters = found
        self.requests += 1
        fields = common_fields(
            incoming, route.route_key, path, parameters, request_id=f"r-{self.requests}", now_s=self.clock.now()
        )
        said: dict[str, Any] | None = None
        if route.scopes:
            identity = fields["headers"].get("x-api-key", "")
            if not identity:
                return Answer(401, {}, json.dumps({"message": "Unauthorized"}))
            verdict = authorize(
                authorizer_event(fields, identity), self.context.tokens, self.clock.now(), self.context.leases
            )
            assert verdict["isAuthorized"] is True
            said = verdict["context"]
        event = json.loads(json.dumps(function_event(fields, body, said)))
        response = http_response(dispatch(event, self.context, route.function))
        text = response.body.decode(errors="replace")
        return Answer(response.status, dict(response.headers), text, response.body)

    def call(
        self,
        method: str,
        target: str,
        body: Any = None,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
        source_ip: str = SOURCE_IP,
    ) -> Answer:
        """A JSON call. `key`: a name in `keys`, or a whole key; by default the one whose scope the route needs."""
        if query:
            target += "?" + urlencode(query)
        key = key or self._usual_key(method, target)
        sent = {"x-api-key": self.keys.get(key, key), **(headers or {})}
        data = b""
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent = {"content-type": "application/json", **sent}
        return self.request(method, target, data, sent, source_ip=source_ip)

    def get(self, target: str, **more: Any) -> Answer:
        return self.call("GET", target, **more)

    def post(self, target: str, body: Any = None, **more: Any) -> Answer:
        return self.call("POST", target, body, **more)

    def _usual_key(self, method: str, target: str) -> str:
        found = _route_of(method, decode_path(target.partition("?")[0]))
        if found and found[0].operator:
            return "operator"
        scopes = [scope for scope in (found[0].scopes if found else ()) if scope.value in self.keys]
        return min(scopes, default=Scope.SUBMIT).value

    # The submitter's side

    def submit(self, *, headers: Mapping[str, str] | None = None, **job: Any) -> dict[str, Any]:
        """A stored job; a command unless told otherwise."""
        if not {"recipe", "command", "instance_prompt"} & job.keys():
            job["command"] = ["train"]
        view: dict[str, Any] = self.post("/job", job, headers=headers).ok()
        return view

    def job(self, job_id: str) -> dict[str, Any]:
        view: dict[str, Any] = self.get(f"/job/{job_id}").ok()
        return view

    def events(self, job_id: str) -> list[str]:
        """The types of a job's events, in order."""
        return [event["type"] for event in self.get(f"/job/{job_id}/events").ok()]

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(f"/job/{job_id}/attempts").ok()["attempts"]
        return found

    def checkpoints(self, job_id: str) -> dict[int, dict[str, Any]]:
        """Committed checkpoints by step."""
        return {item["step"]: item for item in self.get(f"/job/{job_id}/checkpoints").ok()["checkpoints"]}

    def sweep(self) -> SweepResult:
        """Run the sweeper as if its runs since the last one, one each second, had seen no outage."""
        leases, now = self.context.leases, self.clock.now()
        seen = leases.reclaim_watermark()
        if seen is not None:
            assert leases.save_reclaim_watermark(ReclaimWatermark(seen_at=now, since=seen.since), seen=seen)
        swept = sweep(self.context.jobs, leases, self.clock, sweep_interval_s=1)
        self.retain()
        return swept

    def retain(self) -> int:
        """The last part of a sweep alone: the number of ended jobs that it looked after."""
        return run_due_retentions(self.context, self.clock.now())

    # The worker's side

    def claim(self, **query: Any) -> Held:
        """Claim as a lease-aware worker; there must be work."""
        work = self.get("/work", headers={"x-lease-aware": "1"}, query={**WORKER, **query}).ok()
        assert len(work) == 1, "no work"
        return Held(self, work[0])

    def no_work(self, **query: Any) -> None:
        assert self.get("/work", headers={"x-lease-aware": "1"}, query=query).ok() == []

    # The object store behind the URLs

    def send(self, method: str, url: str, headers: Mapping[str, str] | None = None, data: bytes = b"") -> Answer:
        """Use a presigned URL."""
        if self.memory is not None:
            status, answered, content = self.memory.objects.request(method, url, headers, data)
            return Answer(status, answered, content.decode("latin-1"))
        got = requests.request(method, url, headers=dict(headers or {}), data=data, timeout=30)
        return Answer(got.status_code, {k.lower(): v for k, v in got.headers.items()}, got.content.decode("latin-1"))

    def put_object(self, bucket: str, key: str, data: bytes = b"x", tenant: str = TENANT) -> None:
        """Store an object past the API."""
        url = self.context.objects.presign_put(tenant, bucket, key, expires_s=60)
        assert self.send("PUT", url.url, url.headers, data).status == 200

    def objects(self, bucket: str = CHECKPOINTS_BUCKET, prefix: str = "", tenant: str = TENANT) -> dict[str, bytes]:
        """Return every stored object by key."""
        keys = [entry.key for entry in self.context.objects.list(tenant, bucket, prefix, limit=1000).items]
        return {key: self.context.objects.read(tenant, bucket, key) or b"" for key in keys}

    # Assertions on unchanged records

    def snapshot(self) -> Any:
        """Return everything that the twins hold, as comparable values."""
        assert self.memory is not None
        state = self.memory.state
        return (
            state.jobs.items(),
            {group: dict(members) for group, members in state.groups.items()},
            dict(state.leases),
            dict(state.packs),
            dict(state.shared),
            dict(state.keys),
            dict(state.grants),
            dict(state.webhooks),
            dict(state.recipes),
            dict(state.rings),
            {place: dict(kept) for place, kept in state.ring_records.items() if kept},
            {hook: dict(noted) for hook, noted in state.deliveries.items()},
            deepcopy(vars(self.memory.fleet)),
            {(t, b): self.objects(b, tenant=t) for t in (TENANT, RIVAL) for b in BUCKETS},
        )

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Assert that no stored record changes within the block."""
        before = self.snapshot()
        yield
        assert self.snapshot() == before


@dataclass
class Held:
    """A job held by a lease-aware worker."""

    api: Api
    item: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.item["id"])

    @property
    def epoch(self) -> int:
        return int(self.item["epoch"])

    @property
    def token(self) -> str:
        return str(self.item["lease_token"])

    @property
    def headers(self) -> dict[str, str]:
        return {"x-lease-token": self.token}

    def post(self, target: str, body: Any = None, *, token: str | None = "", key: str = "worker") -> Answer:
        """A call as the bearer; `token` replaces the lease token, None leaves it out."""
        sent = {} if token is None else {"x-lease-token": token or self.token}
        return self.api.post(target, body, headers=sent, key=key)

    def report(self, revision: int = 0, seq: int = 0, **more: Any) -> Answer:
        """A heartbeat of a worker that knows rules and commands, and has these."""
        return self.heartbeat(control={"rules_revision": revision, "commands_seq": seq, **more})

    def heartbeat(self, **body: Any) -> Answer:
        return self.post(f"/heartbeat/{self.id}", body or None)

    def manifest(self, step: int, files: Mapping[str, bytes], **more: Any) -> dict[str, Any]:
        """Make the body of a commit. The checkpoints of a seat belong to its elastic job."""
        owner = self.item.get("world") or {"job": self.id, "epoch": self.epoch}
        return {
            "version": 2,
            "job_id": owner["job"],
            "step": step,
            "epoch": owner["epoch"],
            **in_packs(files),
            **more,
        }

    def upload_missing(self, answer: Answer, blobs: Mapping[str, bytes]) -> None:
        """PUT what a commit or a declaration still misses; `blobs` by digest or by path."""
        for item in answer.ok()["missing"]:
            data = blobs[item.get("blake3") or item["name"]]
            assert self.api.send("PUT", item["url"], item["headers"], data).status in (200, 412)

    def commit(self, step: int, files: Mapping[str, bytes] | None = None, **more: Any) -> Answer:
        """Upload and commit a checkpoint; return the last answer."""
        files = {"model.bin": b"weights at %d" % step} if files is None else files
        manifest = self.manifest(step, files, **more)
        first = self.post(f"/job/{self.id}/checkpoints", manifest)
        if first.status != 200 or first.json["committed"]:
            return first
        self.upload_missing(first, {blake3(data).hexdigest(): data for data in files.values()})
        return self.post(f"/job/{self.id}/checkpoints", manifest)

    def store_artifacts(self, files: Mapping[str, bytes]) -> list[dict[str, Any]]:
        """Upload outputs; what `complete` declares."""
        declared = [described(path, data) for path, data in files.items()]
        self.upload_missing(self.post(f"/job/{self.id}/artifacts", {"artifacts": declared}), files)
        return declared

    def complete(self, files: Mapping[str, bytes] | None = None, **more: Any) -> Answer:
        declared = self.store_artifacts(files) if files else []
        return self.post("/complete", {"job_id": self.id, "artifacts": declared, **more})

    def fail(self, **more: Any) -> Answer:
        return self.post("/fail", {"job_id": self.id, **more})

    def release(self, **more: Any) -> Answer:
        return self.post("/release", {"job_id": self.id, **more})


def _route_of(method: str, path: str) -> tuple[Route, dict[str, str]] | None:
    """The route that API Gateway would choose, and the parameters in the path."""
    for route, pattern in _PATTERNS:
        if route.method == method and (parameters := pattern.match(path)) is not None:
            return route, parameters
    return None


def quoted(key: str) -> str:
    """An object key in a path."""
    return quote(key, safe="/")


def memory_api(*, seed: int = 1, settings: ControlPlaneSettings | None = None) -> Api:
    """Make the API on the twins in memory."""
    return _api(memory_cloud(), settings or ControlPlaneSettings(), seed)


def emulated_api(emulator: Emulator, *, seed: int = 1) -> Api:
    """Make the API on the emulated cloud, with tables and buckets of its own."""
    cloud = MinistackClients.of(emulator).cloud()
    settings = ControlPlaneSettings(
        table_prefix=cloud.prefix,
        data_bucket=cloud.buckets[DATA_BUCKET],
        checkpoints_bucket=cloud.buckets[CHECKPOINTS_BUCKET],
        s3_endpoint=emulator.endpoint_url,
    )
    return _api(cloud, settings, seed)


def _api(cloud: Cloud, settings: ControlPlaneSettings, seed: int) -> Api:
    clock = FakeClock(NOW)
    context = Context(
        jobs=cloud.jobs,
        leases=cloud.leases,
        packs=cloud.packs,
        shared=cloud.shared,
        tokens=cloud.tokens,
        objects=cloud.objects,
        webhooks=cloud.webhooks,
        recipes=cloud.recipes,
        rings=cloud.rings,
        fleet=cloud.fleet,
        delivery_queue=FakeLine(),
        clock=clock,
        random=SeededRandomness(seed),
        settings=settings,
    )
    return Api(context, clock, cloud.memory)
