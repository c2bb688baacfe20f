"""The scenarios of a rented machine that need the worker's calls: real API, controller and driver at Vast.ai's fake.

`tests/unit/fleet/README.md` numbers the scenarios. Each one ends with `Rental.finish`, which asserts state, events,
money, and that nothing is left.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from baton.contract.errors import ErrorCode
from baton.contract.fleets.providers import reveal
from baton.contract.names import DATA_BUCKET
from baton.contract.objects.dataset_manifest import DATASET_MANIFEST, DatasetFile, DatasetManifest
from baton.contract.worker.calls import InputPage, WorkItem
from fakes.vast.instances import FakeInstance
from fakes.vast.provider import FakeVast
from functions.domain.jobs.transaction import Put
from functions.domain.worlds.world_record import WorldNode, WorldRecord
from functions.fleet.drivers.vast import driver
from functions.handlers import fleet
from gpu_client.agent.io.inputs import InputsDiffer, fetch_inputs
from gpu_client.agent.process.failures import classify_error
from gpu_client.transport.errors import ChecksumMismatch
from gpu_client.transport.transfer.manager import Download
from tests.conformance.drivers.driven_vast import vast_account
from tests.functional.api.test_sweeper import Invocation
from tests.kits.api.fleets import deploy_controller
from tests.kits.api.harness import Api, Held, described

AS_OFFERED = {"gpu_model": "NVIDIA GeForce RTX 4090", "gpus": 1, "vram_gib": 23.99, "disk_gib": 39.5}
DOCUMENT = {
    "name": "nights",
    "providers": ["vast"],
    "image": "me/trainer:1",
    "max_usd_per_hour": 0.6,
    "idle_timeout_s": 120,
    "budget": {"total_usd": 20},
}
STARTED = "planned requested booting registered ready busy"
WORKED = f"{STARTED} ready draining terminating gone"
LOST = f"{STARTED} lost terminating gone"


class Worker:
    """Worker in the container of an instance."""

    def __init__(self, api: Api, instance: FakeInstance) -> None:
        self.api, self.instance = api, instance
        self.token = instance.environment["BATON_ENROLMENT_TOKEN"]
        self.name = str(instance.body["label"])
        self.key = api.post("/machines/enroll", AS_OFFERED, key=self.token).ok()["api_key"]

    def claim(self, **more: Any) -> Held:
        query = {"machine_id": self.name, **more}
        (work,) = self.api.get("/work", key=self.key, query=query, headers={"x-lease-aware": "1"}).ok()
        self.beat(work["id"])
        return Held(self.api, work)

    def beat(self, job_id: str | None = None) -> dict[str, Any]:
        orders: dict[str, Any] = self.api.post(
            "/machines/heartbeat", {"job_id": job_id} if job_id else {}, key=self.key
        ).ok()
        return orders


class Rental:
    """API and controller with an account at Vast.ai, one fleet, and one job."""

    def __init__(self, api: Api, fake: FakeVast, patch: pytest.MonkeyPatch) -> None:
        self.api, self.fake = api, fake
        deploy_controller(api, patch)
        patch.setattr(driver, "LIST_INTERVAL_S", 0.0)
        api.call("PUT", "/providers/vast", reveal(vast_account(fake))).ok()
        api.call("PUT", "/fleets/nights", DOCUMENT).ok()

    def tick(self, minutes: int = 1) -> None:
        for _ in range(minutes):
            self.api.clock.advance(60)
            fleet.handler({}, Invocation(55))

    def worker(self) -> Worker:
        """Rent a machine for the waiting job; return its worker, which has enrolled."""
        known = len(self.fake.instances)
        for _ in range(60):
            self.tick()
            self.api.sweep()
            if len(self.fake.instances) > known:
                return Worker(self.api, self.fake.instances[-1])
        raise AssertionError("no machine was rented")

    def replace(self, worker: Worker) -> Worker:
        """Let the host vanish with its disk; return the worker on the next machine, once the job waits again."""
        worker.instance.destroyed = True
        self.fake.meter.end(worker.instance.handle)
        return self.worker()

    def finish(self, held: Held, *paths: str) -> None:
        """Let the machines end; assert state, events, money, and that nothing is left."""
        assert self.api.job(held.id)["state"] == "complete"
        self.tick(10)
        ended = self.api.get("/fleets/nights/machines").ok()["machines"][::-1]
        events = self.api.get("/fleets/nights/events", query={"limit": 1000}).ok()["events"][::-1]
        assert self.api.get("/fleets/nights").ok()["machines"] == []
        found = [
            " ".join(one["type"].removeprefix("machine.") for one in events if one["machine"] == machine["id"])
            for machine in ended
        ]
        assert sorted(found) == sorted(paths)
        receipts = [one["receipt"] for one in ended]
        assert all(len(one["absent_at"]) == 2 for one in receipts)
        bill = self.fake.meter.usd()
        assert sum(one["charged_usd"] for one in receipts) == pytest.approx(bill)
        observed = sum(one["observed_usd"] for one in receipts)
        assert bill - 1e-5 <= observed <= bill + len(ended) * 0.6 * 5 / 60
        (bound,) = self.api.get("/fleets/nights").ok()["bounds"]
        assert (bound["spent_usd"], bound["reserved_usd"]) == (pytest.approx(observed, abs=1e-4), 0)
        assert (self.fake.labels(), self.fake.meter.billing()) == ([], [])
        assert self.api.context.fleet is not None and self.api.context.fleet.orphans() == {}


@pytest.fixture
def fake(api: Api) -> Iterator[FakeVast]:
    with FakeVast(api.clock.now) as fake:
        fake.boot_s = fake.visible_after_s = 0
        fake.intervals_s.clear()
        yield fake


@pytest.fixture
def rental(api: Api, fake: FakeVast, monkeypatch: pytest.MonkeyPatch) -> Rental:
    return Rental(api, fake, monkeypatch)


def test_9_a_token_that_is_replayed_enrols_nobody_and_costs_nothing(rental: Rental, api: Api) -> None:
    api.submit()
    worker = rental.worker()
    with api.unchanged():
        for nonce in ({}, {"nonce": "0" * 64}):
            api.post("/machines/enroll", {**AS_OFFERED, **nonce}, key=worker.token).refused(
                ErrorCode.ENROLMENT_USED, "x-api-key"
            )
    held = worker.claim()
    held.complete().ok()
    worker.beat()
    rental.tick(3)
    assert worker.beat()["drain"]
    api.post("/machines/enroll", AS_OFFERED, key=worker.token).refused(ErrorCode.ENROLMENT_USED, "x-api-key")
    rental.finish(held, WORKED)
    api.post("/machines/enroll", AS_OFFERED, key=worker.token).refused(ErrorCode.KEY_REVOKED, "x-api-key")


def test_26_a_training_rents_its_first_nodes_together_and_has_one_bill(
    rental: Rental, api: Api, fake: FakeVast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one host sells, nothing is rented; the machine of a lost node is replaced alone; the end gives all back."""
    monkeypatch.setattr(driver.VastDriver, "min_interval_s", {})
    hosts, fake.asks[1:] = fake.asks[1:], []
    job = api.submit(
        nodes={"min": 2, "max": 3},
        rent={"budget_usd": 5, "providers": ["vast"], "max_usd_per_hour": 0.6},
        requirements={"image": "me/trainer:1"},
    )
    name = job["queue"]
    rental.tick(3)
    assert fake.instances == []
    waits = api.get(f"/job/{job['id']}/machines").ok()["fleets"][0]["fleet"]["waits"]
    assert waits == "1 of 2 nodes can be rented: only one offer fits"
    fake.asks += hosts
    rental.tick()
    assert len(fake.instances) == 2
    rental.tick()
    assert [one.environment["-p 47100:47100"] for one in fake.instances] == ["1"] * 3
    workers = [Worker(api, one) for one in fake.instances]
    held = [one.claim(queue=name, runs_nodes="true", image="me/trainer:1") for one in workers]
    fake.meter.end(workers[0].instance.handle)
    workers[0].instance.destroyed = True
    nodes = [WorldNode(node=f"{one.item['world']['seat']}.1.9f86d081") for one in held]
    world = WorldRecord(version=1, epoch=1, members=nodes)
    api.context.jobs.put(Put(owner=job["id"], record=world))
    for _ in range(9):
        rental.tick()
        api.sweep()
        for worker, seat in zip(workers[1:], held[1:], strict=True):
            worker.beat(seat.id)
            seat.heartbeat().ok()
    assert len(fake.instances) == 4
    held[1].complete().ok()
    assert api.job(job["id"])["state"] == "complete"
    for worker in workers[1:]:
        worker.beat()
    rental.tick(10)
    receipts = [one["receipt"] for one in api.get(f"/fleets/{name}/machines").ok()["machines"]]
    assert len(receipts) == 4 and fake.meter.billing() == []
    bill = fake.meter.usd()
    assert sum(one["charged_usd"] for one in receipts) == pytest.approx(bill)
    found = api.get(f"/job/{job['id']}/machines").ok()
    assert bill - 1e-5 <= found["fleets"][0]["fleet"]["spent_usd"] <= bill + 4 * 0.6 * 5 / 60


def test_10_a_host_that_vanished_and_comes_back_completes_nothing(rental: Rental, api: Api) -> None:
    api.submit()
    zombie = rental.worker()
    first = zombie.claim()
    first.commit(5).ok()
    worker = rental.replace(zombie)
    second = worker.claim()
    assert (second.id, second.epoch) == (first.id, first.epoch + 1)
    with api.unchanged():
        for path, body in (
            (f"/job/{first.id}/checkpoints", first.manifest(9, {"model.bin": b"zombie"})),
            (f"/job/{first.id}/artifacts", {"artifacts": [described("a.txt", b"zombie")]}),
            ("/complete", {"job_id": first.id, "artifacts": []}),
            ("/machines/heartbeat", {"job_id": first.id}),
        ):
            mine: dict[str, Any] = {"headers": first.headers, "key": zombie.key}
            api.post(path, body, **mine).refused(ErrorCode.KEY_REVOKED, "x-api-key")
        first.complete().refused(ErrorCode.LEASE_LOST, "x-lease-token")
    second.complete().ok()
    worker.beat()
    assert set(api.checkpoints(second.id)) == {5}
    rental.finish(second, LOST, WORKED)


def test_22_an_upload_that_one_machine_began_is_finished_by_another(rental: Rental, api: Api) -> None:
    api.submit()
    dying = rental.worker()
    first = dying.claim()
    files = {"a.bin": b"a" * 1000, "b.bin": b"b" * 1000}
    blobs = {blake3(data).hexdigest(): data for data in files.values()}
    asked = first.post(f"/job/{first.id}/checkpoints", first.manifest(5, files)).ok()
    sent, unsent = asked["missing"]
    assert api.send("PUT", sent["url"], sent["headers"], blobs[sent["blake3"]]).status == 200
    worker = rental.replace(dying)
    second = worker.claim()
    manifest = second.manifest(5, files)
    answer = second.post(f"/job/{second.id}/checkpoints", manifest)
    assert [one["blake3"] for one in answer.ok()["missing"]] == [unsent["blake3"]]
    second.upload_missing(answer, blobs)
    assert second.post(f"/job/{second.id}/checkpoints", manifest).ok()["committed"]
    second.complete().ok()
    worker.beat()
    rental.finish(second, LOST, WORKED)


class Transfer:
    """Transfer of the agent that arrives with the bytes that the object store sends."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def read(self, url: str, *, name: str, max_bytes: int, cancel: object) -> bytes:
        return self.api.send("GET", url).text.encode("latin-1")

    def download(self, items: Sequence[Download], *, cancel: object) -> None:
        for item in items:
            data = self.read(item.url, name=item.name, max_bytes=0, cancel=cancel)
            if item.blake3 is not None and blake3(data).hexdigest() != item.blake3:
                raise ChecksumMismatch(f"{item.name}: BLAKE3 is another")
            (item.root / item.path).write_bytes(data)


def test_23_a_damaged_file_of_a_dataset_ends_the_attempt_before_the_training(
    rental: Rental, api: Api, tmp_path: Path
) -> None:
    """The job avoids the machine, which goes back; the next one finds the folder that was pushed again."""
    pushed = {"1.png": b"first", "2.png": b"second"}
    files = [
        DatasetFile(path=name, size_bytes=len(data), blake3=blake3(data).hexdigest()) for name, data in pushed.items()
    ]
    for name, data in {**pushed, "2.png": b"SECOND"}.items():
        api.put_object(DATA_BUCKET, f"digits/{name}", data)
    api.put_object(DATA_BUCKET, f"digits/{DATASET_MANIFEST}", DatasetManifest(files=files).model_dump_json().encode())
    api.submit(inputs=[{"prefix": "digits/"}])
    worker = rental.worker()
    held = worker.claim()

    class Calls:
        def __init__(self, worker: Worker) -> None:
            self.worker = worker

        def inputs_page(self, job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
            headers = {"x-lease-token": lease_token}
            return InputPage.model_validate(api.get(f"/job/{job_id}/inputs", key=self.worker.key, headers=headers).ok())

    def fetch(held: Held, worker: Worker) -> int:
        item = WorkItem.model_validate(held.item)
        return fetch_inputs(
            Calls(worker),
            Transfer(api),  # type: ignore[arg-type]
            item,
            tmp_path,
            require_free=lambda _: None,
            cancel=threading.Event(),
        )

    with pytest.raises(InputsDiffer, match="push the folder again") as caught:
        fetch(held, worker)
    failure = classify_error(caught.value)
    assert failure.failure_class == "bad_input"
    held.fail(failure_class=failure.failure_class, message=failure.reason).ok()
    worker.beat()
    api.put_object(DATA_BUCKET, "digits/2.png", pushed["2.png"])
    other = rental.worker()
    again = other.claim()
    assert fetch(again, other) == 2 and (tmp_path / "2.png").read_bytes() == pushed["2.png"]
    again.complete().ok()
    other.beat()
    rental.finish(again, WORKED, WORKED)


@pytest.mark.parametrize(("limits", "minutes"), [({"max": 2}, 1), ({"min": 1}, 5)])
def test_a_job_that_stalls_leaves_its_machine_and_another_one_is_rented_at_once(
    rental: Rental, api: Api, limits: dict[str, int], minutes: int
) -> None:
    """The worker has restarted the training once; the machine that it leaves is free, but not for this job."""
    api.call("PUT", "/fleets/nights", {**DOCUMENT, **limits, "idle_timeout_s": 3600}).ok()
    api.submit(policy={"backoff_s": 0})
    worker = rental.worker()
    held = worker.claim()
    assert held.item["restart_on_stall"]
    held.fail(failure_class="no_progress", message="stopped: no progress for 1230 s").ok()
    worker.beat()
    rental.tick()
    worker.beat()
    rental.tick(minutes)
    assert len(rental.fake.instances) == 2
    other = Worker(api, rental.fake.instances[-1])
    again = other.claim()
    again.complete().ok()
    other.beat()
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    rental.finish(again, WORKED, WORKED)


def test_a_slow_host_is_given_back_and_the_next_host_does_the_job(rental: Rental, api: Api) -> None:
    api.submit()
    rental.tick(2)
    (slow,) = rental.fake.instances
    token = slow.environment["BATON_ENROLMENT_TOKEN"]
    hardware = {**AS_OFFERED, "measured": {"disk_write_mb_s": 500, "download_mbit_s": 1}}
    api.post("/machines/enroll", hardware, key=token).refused(ErrorCode.PREFLIGHT_FAILED)
    worker = rental.worker()
    assert worker.instance.ask.machine_id != slow.ask.machine_id
    held = worker.claim()
    held.complete().ok()
    worker.beat()
    rental.finish(held, "planned requested booting registered terminating gone", WORKED)
    assert api.context.fleet is not None
    assert list(api.context.fleet.quarantined(0)) == [f"vast:{slow.ask.machine_id}"]
