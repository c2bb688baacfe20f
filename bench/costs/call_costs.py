"""Record the billed units of each API call in a run on the emulated cloud.

.venv/bin/python -m bench.costs.call_costs > bench/costs/call_costs.json
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import requests

from baton.contract.admin.sessions import SESSION_COOKIE
from baton.contract.checkpoints.manifest import Chunk, ChunkedFile, Manifest, Pack
from baton.contract.jobs.job import JobState
from baton.contract.names import KEY_PREFIX, KeyKind, Scope
from baton.contract.worker.calls import HeartbeatRequest, ReleaseRequest, WorkItem
from baton.contract.worker.output import MAX_POINTS, LogChunk, ReportedPoint
from bench.api.request_counts import FILES
from bench.costs.console_calls import ViewRecording
from bench.costs.cost_model import LISTED_JOBS
from bench.costs.elastic_calls import ElasticRecording
from bench.costs.fleet_calls import FleetRecording
from bench.costs.units import Billed, Meter
from bench.harness.plane import TENANT, Plane
from functions.api.admin.keys import generate_key
from functions.api.checkpoints.retention_runner import run_due_retentions
from functions.api.http.authorizer import authorize
from functions.api.http.dispatch import dispatch
from functions.api.jobs.job_calls import COUNTED_UP_TO
from functions.api.operations.sweeper import sweep
from functions.api.rules.rule_evaluation_runs import evaluate_due_jobs
from functions.domain.access.sessions import derive_key
from functions.domain.table_keys import DUE_BUCKET_S
from functions.storage.clients import dynamodb_client
from functions.webhooks.delivery import deliver
from functions.webhooks.event_queue import QueuedEvent
from functions.webhooks.http_delivery import PostOutcome
from gpu_client.checkpoints.save.checkpoint_commit import commit_checkpoint
from gpu_client.transport.transfer.manager import Transfer
from tests.kits.api.webhooks import make_event, make_webhook
from tests.kits.clouds.emulator import CREDENTIALS
from tests.kits.files.declared_files import pack_of

RECORDED = Path(__file__).with_suffix(".json")
WAITING = 20
"""Jobs in the queue while one is claimed: more than a claim looks at."""
EARLIER_COMMITS = 4
"""From then on each commit lets an old checkpoint go: the usual case."""
FURTHER_PACKS = 4
WATCHED = "rules: [{name: dear, when: cost > 40, do: stop}, {name: silent, when: heartbeat.age > 1h, do: {alert: x}}]"
LOG_LINE = "{'loss': 0.0421, 'grad_norm': 0.913, 'learning_rate': 9.2e-05, 'epoch': 3.1}"
LOG_LINES = 200
PAGE_CHUNKS = 24
"""Chunks of a job whose page is open: half of the chunks between two summaries are read one by one."""
LOG_POINT = ReportedPoint(step=1200, at=1_790_000_000.25, metrics={"loss": 0.0421, "grad_norm": "nan"})


def record(plane: Plane) -> dict[str, Billed]:
    """Record `api` and `lambda` calls, read and write units and S3 requests of each call."""
    return _Recording(plane).run()


class _Recording:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._meter = Meter(plane.dynamodb, plane.s3, dynamodb_client(plane.endpoint_url, **CREDENTIALS), plane.prefix)

    def run(self) -> dict[str, Billed]:
        plane = self._plane
        asked_in_vain = self._billed(lambda: plane.claim(queue="empty"))
        idle_sweep = self._billed(self._sweep, api=0)
        plane.fill(WAITING, queue="busy")
        claimed = self._billed(lambda: plane.claim(queue="busy"))
        item, ending = plane.claimed(), plane.claimed()
        watched_heartbeat, watched_evaluation = self._watched()
        elastic = ElasticRecording(plane, call=self._billed, run=lambda call: self._billed(call, api=0))
        return {
            "authorizer": self._billed(self._authorizer(), api=0),
            "claim": claimed,
            "asked in vain": asked_in_vain,
            "heartbeat": self._billed(lambda: self._heartbeat(item)),
            "heartbeat in a new bucket": self._billed(lambda: self._heartbeat(item, later_s=DUE_BUCKET_S)),
            "watched heartbeat": watched_heartbeat,
            "watched look": watched_evaluation,
            "log chunk": self._billed(lambda: self._log(item)),
            "checkpoint": self._checkpoint(item),
            "pack": self._further_pack(),
            "end": self._billed(lambda: self._release(ending)),
            "idle sweep": idle_sweep,
            **self._fleet(),
            # The authorizer looks up a key that is not known, and the function of heartbeats answers so.
            "probe": self._billed(self._authorizer(known=False), functions=2),
            "delivery": self._billed(self._delivery(), api=0),
            **elastic.run(),
            **self._console(),
            **self._job_page(),
            **ViewRecording(plane, call=self._billed, world=elastic.job_id).run(),
        }

    def _billed(self, call: Callable[[], object], *, api: int = 1, functions: int = 1) -> Billed:
        with self._meter.billed() as billed:
            call()
        return _sorted(billed, api=api, functions=functions)

    def _authorizer(self, *, known: bool = True) -> Callable[[], object]:
        context = self._plane.context
        key, whole = generate_key(
            context.random, tenant=TENANT, name="bench", scopes=[Scope.WORKER], now=context.clock.now(), expires_at=None
        )
        if known:
            context.tokens.put_key(key)
        return lambda: authorize({"headers": {"x-api-key": whole}}, context.tokens, context.clock.now(), context.leases)

    def _delivery(self) -> Callable[[], object]:
        """Bill a delivery to a webhook that accepts the event."""
        webhooks, webhook = self._plane.context.webhooks, make_webhook(tenant=TENANT)
        webhooks.put(webhook)
        body = QueuedEvent(TENANT, webhook.id, make_event(1)).as_json()
        now = self._plane.context.clock.now()
        record = {"body": body, "attributes": {"ApproximateReceiveCount": "1", "SentTimestamp": str(now * 1000)}}
        return lambda: deliver(record, webhooks, lambda *_: PostOutcome(200), now)

    def _console(self) -> dict[str, Billed]:
        """Bill a poll of the list of jobs, of which all in the answer run, its counts, and the token that it needs.

        In one state there are as many jobs as are counted.
        """
        plane, tokens = self._plane, self._plane.context.tokens
        for _ in range(LISTED_JOBS):
            plane.claimed()
        now = plane.context.clock.now()
        key, _ = generate_key(
            plane.context.random, tenant=TENANT, name="user", scopes=[Scope.SUBMIT], now=now, expires_at=None
        )
        session = derive_key(key, KeyKind.SESSION, key_id="session0", secret="s" * 32, now=now)
        for one in (key, session):
            tokens.put_key(one)
        cookie = f"{SESSION_COOKIE}={KEY_PREFIX}_{session.id}_{'s' * 32}"
        event = {"routeKey": "POST /sessions/token", "headers": {}, "cookies": [cookie]}
        token = json.loads(dispatch(event, plane.context, "admin")["body"])["token"]
        caller = authorize({"headers": {"x-api-key": token}}, tokens, now, plane.context.leases)["context"]
        poll = {
            "routeKey": "GET /jobs",
            "queryStringParameters": {"limit": str(LISTED_JOBS), "order": "desc", "status": "running"},
            "requestContext": {"authorizer": {"lambda": caller}},
        }
        plane.fill(COUNTED_UP_TO, queue="counted")
        return {
            "list of jobs": self._billed(lambda: dispatch(poll, plane.context, "submitter")),
            "counts of jobs": self._billed(
                lambda: [plane.context.jobs.count_jobs(TENANT, state, up_to=COUNTED_UP_TO) for state in JobState],
                api=0,
                functions=0,
            ),
            "session token": self._billed(lambda: dispatch(event, plane.context, "admin")),
            "authorizer of a token": self._billed(
                lambda: authorize({"headers": {"x-api-key": token}}, tokens, now, plane.context.leases), api=0
            ),
        }

    def _job_page(self) -> dict[str, Billed]:
        """Bill the polls of a job's page: the job, and its curves with a new chunk behind a summary."""
        plane, item = self._plane, self._plane.claimed()
        for number in range(PAGE_CHUNKS):
            self._log(item, number)

        def read(path: str) -> Callable[[], object]:
            caller = {"tenant": TENANT, "scopes": Scope.SUBMIT.value}
            call = {
                "routeKey": f"GET /job/{{id}}{path}",
                "pathParameters": {"id": item.id},
                "requestContext": {"authorizer": {"lambda": caller}},
            }
            return lambda: dispatch(call, plane.context, "submitter")

        read("/curves")()  # stores the summary
        return {"job": self._billed(read("")), "curves": self._billed(read("/curves"))}

    def _heartbeat(self, item: WorkItem, *, later_s: int = 0) -> None:
        metrics = {"loss": 0.0421, "grad_norm": 0.913, "learning_rate": 9.2e-05, "samples_per_s": 41.5}
        self._plane.worker_call(
            "POST /heartbeat/{id}",
            path={"id": item.id},
            body=HeartbeatRequest(step=1200, total_steps=5000, metrics=metrics, phase="training"),
            headers={"x-lease-token": item.lease_token},
            context=dataclasses.replace(self._plane.context, clock=_Ahead(later_s)),
        )

    def _watched(self) -> tuple[Billed, Billed]:
        """Bill a heartbeat and a turn of the sweeper for a job with rules of the control plane."""
        plane = self._plane
        plane.submit_watched(WATCHED, queue="watched")
        item = WorkItem.model_validate(plane.claim(queue="watched")[0])
        heartbeat = self._billed(lambda: self._heartbeat(item))
        jobs, leases, later = plane.context.jobs, plane.context.leases, plane.context.clock.now() + 120
        before = self._billed(lambda: jobs.due_rules(0, limit=1), api=0)
        evaluation = self._billed(lambda: evaluate_due_jobs(jobs, leases, later), api=0)
        beside = {unit: evaluation[unit] - before.get(unit, 0) for unit in evaluation if unit != "lambda"}
        self._release(item)
        return heartbeat, {unit: beside[unit] for unit in sorted(beside) if beside[unit]}

    def _log(self, item: WorkItem, number: int = 0) -> None:
        self._plane.worker_call(
            "POST /job/{id}/logs",
            path={"id": item.id},
            body=LogChunk(
                first_line=number * LOG_LINES,
                lines=[LOG_LINE] * LOG_LINES,
                points=[LOG_POINT.model_copy(update={"step": number * MAX_POINTS + at}) for at in range(MAX_POINTS)],
            ),
            headers={"x-lease-token": item.lease_token},
        )

    def _release(self, item: WorkItem) -> None:
        self._plane.worker_call(
            "POST /release", body=ReleaseRequest(job_id=item.id), headers={"x-lease-token": item.lease_token}
        )

    def _checkpoint(self, item: WorkItem) -> Billed:
        """Bill a commit by the agent's own code, with the PUTs of its packs."""
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, closing(Transfer()) as transfer:
            for step in range(1, EARLIER_COMMITS + 2):
                directory = Path(folder, f"checkpoint-{step}")
                directory.mkdir()
                for name in FILES:
                    (directory / name).write_bytes(f"{name} of step {step}".encode())
                with self._meter.billed() as billed:
                    done = commit_checkpoint(self._plane, transfer, item, directory, step)
        billed["s3_put"] += done.uploaded_packs
        return _sorted(billed, api=done.api_calls, functions=done.api_calls)

    def _further_pack(self) -> Billed:
        """Bill each further pack of a checkpoint, from its PUT to its deletion."""
        few, many = self._commit_of_packs(1), self._commit_of_packs(1 + FURTHER_PACKS)
        return {unit: (many[unit] - few[unit]) / FURTHER_PACKS for unit in sorted(many) if many[unit] != few[unit]}

    def _commit_of_packs(self, packs: int) -> Counter[str]:
        """Bill a commit that releases as many packs as it adds. The packs are small, because size costs nothing."""
        item = self._plane.claimed()
        for step in range(1, EARLIER_COMMITS + 2):
            contents = [f"pack {number} of step {step} of {item.id}".encode() for number in range(packs)]
            manifest = _manifest(item, step, contents)
            with self._meter.billed() as billed:
                missing = self._plane.commit(item.lease_token, manifest).missing
                stored = {pack.blake3: content for pack, content in zip(manifest.packs, contents, strict=True)}
                for blob in missing:
                    requests.put(blob.url, stored[blob.blake3], headers=blob.headers, timeout=10).raise_for_status()
                if not self._plane.commit(item.lease_token, manifest).committed:
                    raise RuntimeError("the checkpoint was not committed")
        billed["s3_put"] += len(missing)
        return billed

    def _fleet(self) -> dict[str, Billed]:
        """Bill the ticks of the fleets' controller and the calls of rented machines."""

        def bill_tick(call: Callable[[], object]) -> Billed:
            return self._billed(call, api=0)

        return FleetRecording(self._plane, tick=bill_tick, call=self._billed).run()

    def _sweep(self) -> None:
        context = self._plane.context
        sweep(context.jobs, context.leases, context.clock)
        run_due_retentions(context, context.clock.now())


def _manifest(item: WorkItem, step: int, contents: list[bytes]) -> Manifest:
    """Declare each content as one pack, one chunk and one file."""
    packs = [Pack.model_validate(pack_of(content)) for content in contents]
    chunks = [Chunk(blake3=pack.blake3, size_bytes=pack.size_bytes, pack=at) for at, pack in enumerate(packs)]
    files = [ChunkedFile(path=f"shard-{at}", size_bytes=pack.size_bytes, chunks=[at]) for at, pack in enumerate(packs)]
    return Manifest(version=2, job_id=item.id, step=step, epoch=item.epoch, packs=packs, chunks=chunks, files=files)


class _Ahead:
    def __init__(self, by_s: int) -> None:
        self._by_s = by_s

    def now(self) -> int:
        return int(time.time()) + self._by_s


def _sorted(billed: Counter[str], *, api: int, functions: int) -> Billed:
    counted: dict[str, float] = {"api": api, "lambda": functions, **billed}
    return {name: counted[name] for name in sorted(counted) if counted[name]}
