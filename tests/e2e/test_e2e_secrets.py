"""Secrets appear nowhere but where they belong: a full run with values that can be found again, and a search for them.

The run is one on another object store, with its credentials in Secrets Manager, so that these are among the values.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests

from baton.contract.jobs.job import AttemptEnd, JobState
from tests.kits.clouds.emulator import CREDENTIALS
from tests.kits.clouds.second_store import ACCESS_KEY_ID, SECRET_ACCESS_KEY, SecondStore
from tests.kits.stack.stack import Stack, chain
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

STACK = str(Path(__file__).with_name("second_store_stack.py"))
SAMPLE_S = 0.05
STEPS = 60


class ProcessList:
    """The command line of every process that lived while it looked, as `ps` shows them to everybody."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(SAMPLE_S):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
                except OSError:
                    continue

    def __enter__(self) -> ProcessList:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join()


class Run:
    """Outputs and stored data of a run in which a job lost its machine, another job failed, and calls were refused."""

    def __init__(self, folder: Path) -> None:
        self.secrets: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self._folder = folder
        self._token = f"hf_{secrets.token_hex(16)}"
        store = SecondStore(folder / "store")
        buckets = store.cloud().buckets
        settings = {
            "BATON_S3_ENDPOINT": store.endpoint_url,
            "BATON_S3_REGION": "auto",
            "BATON_S3_SECRET": "baton/store",
            "BATON_DATA_BUCKET": buckets["training-data"],
            "BATON_CHECKPOINTS_BUCKET": buckets["training-checkpoints"],
        }
        started = {
            "E2E_STORE_SETTINGS": json.dumps(settings),
            "E2E_STORE_SECRET": json.dumps({"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}),
            "BATON_LOG_LEVEL": "DEBUG",
        }
        log_path = folder / "control-plane.log"
        with (
            store,
            log_path.open("wb") as log,
            ProcessList() as processes,
            Stack(program=STACK, settings=started, log=log) as stack,
        ):
            stack.s3.upstream = ("127.0.0.1", int(store.endpoint_url.rpartition(":")[2]))
            stack.objects, stack._buckets = store.client, buckets
            self._hook(stack)
            self._work(stack)
            self._keep(stack, store)
            store.close()
            self._outage(stack)
        self.places["control plane's log"] = log_path.read_text()
        self.places["ps"] = "\n".join(processes.seen)
        self.secrets["S3 secret access key"] = SECRET_ACCESS_KEY
        self.secrets["the job's environment"] = self._token

    def _hook(self, stack: Stack) -> None:
        """Create a webhook without a server, because the log describes failed deliveries."""
        self._admin = {"x-api-key": stack.keys["admin"]}
        token = secrets.token_hex(16)
        body = {"url": f"https://hooks.invalid/{token}?key={token}"}
        made = requests.post(f"{stack.url}/webhooks", json=body, headers=self._admin, timeout=30).json()
        self.secrets["webhook's secret"] = made["secret"]
        # Chat services' addresses open a channel to whoever knows them.
        self.secrets["webhook's address"] = token
        self._deliveries = f"{stack.url}/webhooks/{made['id']}/deliveries"

    def _work(self, stack: Stack) -> None:
        shop = Workshop(stack, self._folder)
        try:
            self._interrupted_job(stack, shop)
            self._failing_job(stack, shop)
        finally:
            shop.close()
        self.agents = [agent.log() for agent in shop.agents]
        self.places |= {f"log of agent {number}": text for number, text in enumerate(self.agents)}
        for name, key in stack.keys.items():
            self.secrets[f"{name} key"] = key.split("_", 2)[2]

    def _interrupted_job(self, stack: Stack, shop: Workshop) -> None:
        gate, parameters = shop.gate(STEPS - 5), {"steps": STEPS, "every": 10, "step_s": 0.1}
        job = shop.submit("chain.py", parameters, environment={"HF_TOKEN": self._token, **gate.environment})
        first = shop.agent("w1", fork=False)
        stack.wait_for_step(job, 1)
        with stack.s3.failing(r"PUT /.*/packs/", 503) as trouble:
            trouble.wait()
        self.secrets["first lease token"] = self._lease_token()
        with stack.s3.failing(r"PUT /.*/packs/", 403) as trouble:
            trouble.wait_for(1)
        stack.wait_for_commit(job)
        shop.lose(first, job)
        shop.agent("w2", fork=False, max_jobs=1)
        stack.wait_for_step(job, STEPS // 2)
        self.secrets["second lease token"] = self._lease_token()
        gate.open()
        assert stack.wait_for(job, JobState.COMPLETE, JobState.FAILED).state is JobState.COMPLETE
        assert stack.artifact(job) == chain(STEPS)
        assert [attempt.end for attempt in stack.attempts(job)] == [AttemptEnd.INTERRUPTED, AttemptEnd.COMPLETE]
        self._history("interrupted job", stack, job)
        lines = stack.log_lines(job)
        assert lines and all(re.fullmatch(r"step \d+|resumed at \d+|found \d+ [0-9a-f]{64}", line) for line in lines), (
            "the user's own lines"
        )

    def _failing_job(self, stack: Stack, shop: Workshop) -> None:
        job = shop.submit(
            "misbehave.py", arguments=("a-traceback",), environment={"HF_TOKEN": self._token}, max_failures=1
        )
        shop.agent("w3", fork=False, max_jobs=1)
        assert stack.wait_for(job, JobState.FAILED).reason is not None
        self._history("failing job", stack, job)
        self.places["failing job: state"] = stack.job(job).reason.model_dump_json()  # type: ignore[union-attr]

    def _history(self, name: str, stack: Stack, job: str) -> None:
        self.places[f"{name}: events"] = "\n".join(event.model_dump_json() for event in stack.events(job))
        self.places[f"{name}: attempts"] = "\n".join(attempt.model_dump_json() for attempt in stack.attempts(job))
        self.places[f"{name}: log lines"] = "\n".join(stack.log_lines(job))

    def _lease_token(self) -> str:
        """Return the lease token that the agent keeps for its successor, in a file that only its user can read."""

        def found() -> str:
            for path in (self._folder / "workspace").glob("*/agent-state.json"):
                assert path.stat().st_mode & 0o077 == 0
                return str(json.loads(path.read_text())["lease_token"])
            return ""

        token: str = until(found, what="the note of an attempt")
        return token

    def _keep(self, stack: Stack, store: SecondStore) -> None:
        """Names of objects, rows of tables, and refusals of all kinds."""
        self.places["deliveries"] = requests.get(self._deliveries, headers=self._admin, timeout=30).text
        names: list[str] = []
        for bucket in stack._buckets.values():
            names += [entry["Key"] for entry in store.client.list_objects_v2(Bucket=bucket).get("Contents", [])]
        assert len(names) > 5
        self.places["names of objects"] = "\n".join(names)
        dynamodb = boto3.client("dynamodb", endpoint_url=stack.cloud_url, **CREDENTIALS)
        rows = {table: dynamodb.scan(TableName=table)["Items"] for table in dynamodb.list_tables()["TableNames"]}
        assert all(rows[f"baton-{table}"] for table in ("jobs", "tokens")), rows.keys()
        self.rows = json.dumps(rows)
        self._refusals(stack, next(name for name in names if "/artifacts/" in name).partition("/")[2])

    def _refusals(self, stack: Stack, key: str) -> None:
        admin, worker = stack.keys["admin"], stack.keys["worker"]
        made_up = {name: secrets.token_hex(24) for name in ("key", "lease token", "upload token", "download token")}
        self.secrets |= {f"made-up {name}": value for name, value in made_up.items()}
        job = stack.client.jobs(limit=1).jobs[0].id
        place = f"{stack.url}/download/training-checkpoints/{key}"

        def call(method: str, url: str, status: int, key: str = admin, **more: Any) -> requests.Response:
            headers = {"x-api-key": key, **more.pop("headers", {})}
            answer = requests.request(method, url, headers=headers, timeout=30, allow_redirects=False, **more)
            assert answer.status_code == status, answer.text
            if status >= 400:
                self.places[f"refusal {len(self.places)}"] = answer.text
            return answer

        query = {"bucket": "training-checkpoints", "key": key}
        token = call("GET", f"{stack.url}/download/token", 200, params=query).json()["token"]
        self.secrets["download token"] = token
        signed = call("GET", f"{place}?as=url", 200, headers={"x-download-token": token}).json()["url"]
        self.secrets["signature"] = re.findall(r"X-Amz-Signature=([0-9a-f]{64})", signed)[0]
        token = call("GET", f"{stack.url}/upload/token", 200, params={"bucket": "training-data", "key": "k"}).json()
        self.secrets["upload token"] = token["token"]
        key_id = worker.split("_")[1]
        call("GET", f"{stack.url}/jobs", 403, key=f"baton_{key_id}_{made_up['key']}")
        call("GET", f"{stack.url}/jobs", 403, key=worker)
        call("GET", place, 401, headers={"x-download-token": made_up["download token"]})
        call("PUT", f"{stack.url}/upload/training-data/k", 401, headers={"x-upload-token": made_up["upload token"]})
        call("POST", f"{stack.url}/heartbeat/{job}", 409, json={}, headers={"x-lease-token": made_up["lease token"]})
        bad = {"command": ["train"], "environment": {"not a name": self._token}}
        call("POST", f"{stack.url}/job", 422, json=bad)
        call("POST", f"{stack.url}/job", 422, json={**bad, "environment": {"HF_TOKEN": {"x": self._token}}})
        call("POST", f"{stack.url}/job", 400, data=json.dumps(bad)[:-2])

    def _outage(self, stack: Stack) -> None:
        """The object store is gone: what is logged then has a traceback."""
        url = f"{stack.url}/download/token?bucket=training-data&key=k"
        answer = requests.get(url, headers={"x-api-key": stack.keys["admin"]}, timeout=60)
        assert answer.status_code == 503
        self.places["outage"] = answer.text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield Run(tmp_path_factory.mktemp("secrets"))


def test_no_secret_is_anywhere_in_what_was_said_or_shown(run: Run) -> None:
    assert len(run.secrets) >= 14 and all(len(value) >= 24 for value in run.secrets.values())
    found = [
        (name, place) for place, text in run.places.items() for name, value in run.secrets.items() if value in text
    ]
    assert found == []


def test_no_presigned_url_is_either(run: Run) -> None:
    assert [place for place, text in run.places.items() if re.search("X-Amz-(Signature|Credential)", text)] == []


def test_the_tables_hold_digests_only(run: Run) -> None:
    """But a job's environment, for the machine that will run it, and where deliveries go and what signs them."""
    needed = ("the job's environment", "webhook's secret", "webhook's address")
    kept = {name: value for name, value in run.secrets.items() if name not in needed}
    assert [name for name, value in kept.items() if value in run.rows] == []
    assert all(run.secrets[name] in run.rows for name in needed), "the search finds what is there"


def test_the_search_was_worth_something(run: Run) -> None:
    """The searched texts contain the failures of the run, so that the search for secrets has content."""
    log = run.places["control plane's log"]
    assert '"POST /complete"' in log and "storage is unavailable" in log and "Traceback" in log
    assert "503" in run.agents[0] and "trouble" in run.agents[0]
    assert "gpu_client.agent" in run.places["ps"] and "chain.py" in run.places["ps"] and "rclone" in run.places["ps"]
    assert "lease" in run.places["interrupted job: events"] or "interrupted" in run.places["interrupted job: events"]
    assert "job.submitted" in run.places["deliveries"] and "cannot be resolved" in run.places["deliveries"]
    assert "ValueError: a-traceback" in run.places["failing job: log lines"]
    assert sum(place.startswith("refusal") for place in run.places) == 8
