"""Control plane in this process: the real dispatcher and stores on the emulated cloud; requests are counted."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from baton.contract.checkpoints.calls import CommitAnswer
from baton.contract.checkpoints.manifest import Manifest
from baton.contract.jobs.policy import Policy
from baton.contract.names import BUCKETS
from baton.contract.worker.calls import WorkItem
from functions.api.http.context import Context
from functions.api.http.dispatch import dispatch
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.transaction import Put, Transaction
from functions.domain.records import RulesRecord, Spec
from functions.handlers.startup import ServerClock
from functions.handlers.wiring import SystemRandomness
from functions.settings import ControlPlaneSettings
from functions.storage.clients import dynamodb_client, s3_client
from functions.storage.dynamodb.items import job_items
from functions.storage.dynamodb.jobs import DynamoJobStore
from functions.storage.dynamodb.leases import DynamoLeaseStore
from functions.storage.dynamodb.packs import DynamoPackStore
from functions.storage.dynamodb.recipes import DynamoRecipeStore
from functions.storage.dynamodb.sharing import DynamoSharedStore
from functions.storage.dynamodb.tokens import DynamoTokenStore
from functions.storage.dynamodb.webhooks import DynamoWebhookStore
from functions.storage.s3.objects import S3ObjectStore
from functions.storage.tables import JOBS, create_tables
from functions.webhooks.event_queue import SqsDeliveryQueue
from tests.kits.clouds.emulator import CREDENTIALS

TENANT = "bench"
ITEMS_PER_BATCH_WRITE = 25
FILL_THREADS = 4


class RequestLog:
    """Requests of AWS clients, repeats included, and error answers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def listen(self, client: Any) -> None:
        """Record the requests of `client` from now on."""
        client.meta.events.register("before-send", self._note_sent)
        client.meta.events.register("after-call", self._note_answer)

    @property
    def sent(self) -> dict[str, int]:
        """Count requests by `service.Operation`."""
        with self._lock:
            return dict(self._sent)

    @property
    def errors(self) -> dict[str, int]:
        """Count error answers by code."""
        with self._lock:
            return dict(self._errors)

    def _note_sent(self, event_name: str, **_: Any) -> None:
        with self._lock:
            self._sent[event_name.removeprefix("before-send.")] += 1

    def _note_answer(self, parsed: Mapping[str, Any], **_: Any) -> None:
        code = parsed.get("Error", {}).get("Code")
        if code is not None:
            with self._lock:
                self._errors[str(code)] += 1


class Plane:
    """Deployment: tables and buckets named by `prefix`, in the emulator at `endpoint_url`."""

    def __init__(self, endpoint_url: str, prefix: str, *, create: bool = True) -> None:
        """Open a deployment; `create=False` for a further process on an existing one."""
        self.endpoint_url = endpoint_url
        self.prefix = prefix
        self.log = RequestLog()
        self.dynamodb = dynamodb_client(endpoint_url, **CREDENTIALS)
        self.s3 = s3_client(endpoint_url, **CREDENTIALS)
        buckets = {name: f"{prefix}{name}" for name in BUCKETS}
        if create:
            create_tables(self.dynamodb, prefix)
            for bucket in buckets.values():
                self.s3.create_bucket(Bucket=bucket)
        self.log.listen(self.dynamodb)
        self.log.listen(self.s3)
        self._objects = S3ObjectStore(self.s3, self.s3, buckets)
        self.context = self.environment()

    def environment(self) -> Context:
        """Make one Lambda execution environment: the shared clients, a claim window of its own."""
        return Context(
            jobs=DynamoJobStore(self.dynamodb, self.prefix),
            leases=DynamoLeaseStore(self.dynamodb, self.prefix),
            packs=DynamoPackStore(self.dynamodb, self.prefix),
            shared=DynamoSharedStore(self.dynamodb, self.prefix),
            tokens=DynamoTokenStore(self.dynamodb, self.prefix),
            objects=self._objects,
            webhooks=DynamoWebhookStore(self.dynamodb, self.prefix),
            recipes=DynamoRecipeStore(self.dynamodb, self.prefix),
            delivery_queue=SqsDeliveryQueue(None),
            clock=ServerClock(),
            random=SystemRandomness(),
            settings=ControlPlaneSettings(table_prefix=self.prefix, s3_endpoint=self.endpoint_url),
        )

    @contextmanager
    def requests(self) -> Iterator[Counter[str]]:
        """Record the requests of the block; the fields are filled at the end."""
        before = Counter(self.log.sent)
        during: Counter[str] = Counter()
        yield during
        during.update(Counter(self.log.sent) - before)

    def worker_call(
        self,
        route_key: str,
        *,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        body: BaseModel | None = None,
        headers: Mapping[str, str] | None = None,
        context: Context | None = None,
    ) -> Any:
        """Call as a worker through the dispatcher; returns the JSON. Raises RuntimeError unless the status is 200."""
        event = {
            "routeKey": route_key,
            "headers": dict(headers or {}),
            "pathParameters": dict(path or {}),
            "queryStringParameters": dict(query or {}),
            "body": body.model_dump_json() if body is not None else "",
            "requestContext": {
                "requestId": "bench",
                "authorizer": {"lambda": {"tenant": TENANT, "key_id": "bench", "scopes": "worker"}},
            },
        }
        answer = dispatch(event, context or self.context, "worker")
        if answer["statusCode"] != 200:
            raise RuntimeError(f"{route_key} was answered with {answer['statusCode']}: {answer['body']}")
        return json.loads(answer["body"])

    def claim(
        self,
        *,
        queue: str = "default",
        machine_id: str = "m-1",
        runs_nodes: bool = False,
        context: Context | None = None,
    ) -> Any:
        """Claim by `GET /work` as a lease-aware worker; returns a list of one work item, or of none."""
        query = {"queue": queue, "machine_id": machine_id, "runs_nodes": str(runs_nodes).lower()}
        return self.worker_call("GET /work", query=query, headers={"x-lease-aware": "1"}, context=context)

    def claimed(self) -> WorkItem:
        """Submit a job and claim it."""
        self.submit()
        return WorkItem.model_validate(self.claim()[0])

    def commit(self, lease_token: str, manifest: Manifest) -> CommitAnswer:
        """Commit by `POST /job/{id}/checkpoints` as the agent does."""
        answer = self.worker_call(
            "POST /job/{id}/checkpoints",
            path={"id": manifest.job_id},
            body=manifest,
            headers={"x-lease-token": lease_token},
        )
        return CommitAnswer.model_validate(answer)

    def submit(self, *, queue: str = "default") -> None:
        """Write one job as a submission does."""
        self.context.jobs.apply(submission(queue, self.context.clock.now()))

    def submit_watched(self, text: str, *, queue: str) -> None:
        """Submit a job whose rules the control plane evaluates."""
        now = self.context.clock.now()
        record = RulesRecord(revision=1, text=text, created_at=now)
        self.context.jobs.apply(submission(queue, now, rules=record, watched=True))

    def fill(self, jobs: int, *, queue: str = "default") -> None:
        """Write the items of many submissions in batches of 25."""
        now = self.context.clock.now()
        changes = [submission(queue, now) for _ in range(jobs)]
        items = [item for change in changes for item in _items_of(change)]
        batches = [items[at : at + ITEMS_PER_BATCH_WRITE] for at in range(0, len(items), ITEMS_PER_BATCH_WRITE)]
        with ThreadPoolExecutor(FILL_THREADS) as pool:
            # The iteration raises what a batch raised.
            for _ in pool.map(self._write, batches):
                pass

    def _write(self, items: Sequence[dict[str, Any]]) -> None:
        table = JOBS.name(self.prefix)
        pending = {table: [{"PutRequest": {"Item": item}} for item in items]}
        while pending:
            pending = self.dynamodb.batch_write_item(RequestItems=pending).get("UnprocessedItems") or {}


def submission(queue: str, now: int, **more: Any) -> Transaction:
    """Make a submission as large as real ones."""
    spec = Spec(
        command=["python", "-m", "gpu_client.training.digits"],
        parameters={"steps": 600, "learning_rate": 2e-3, "prompt": "a photo of a timber dog in the forest"},
        outputs=["model.safetensors"],
        policy=Policy(),
    )
    asked = {"tenant": TENANT, "spec": spec, "queue": queue, "shard": 0, "priority": 50, "now": now, **more}
    return rules.submit(job_id=str(uuid.uuid4()), **asked)


def _items_of(change: Transaction) -> list[dict[str, Any]]:
    return [job_items.item_of(write) for write in change.writes if isinstance(write, Put)]
