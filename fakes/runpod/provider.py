"""Serve RunPod's REST API v2: catalog, pods with their states by the clock, logs, and the bill.

Statuses, fields and errors follow RunPod's OpenAPI document of version 2.0.0; `tests/vendors` compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any
from urllib.parse import unquote

from fakes.runpod.fields import BadFields, check_pod, check_query, check_registry
from fakes.server import FakeAnswer, FakeCall, FakeProvider

DISK_USD_PER_GB_HOUR = 0.10 / 730
STOPPED_USD_PER_GB_HOUR = 0.20 / 730
STARTS_AFTER_S = 20
RUNS_AFTER_S = 45
DAY_S = 86_400
LEVELS = ("NONE", "LOW", "MEDIUM", "HIGH")
ACTIONS = {
    "PROVISIONING": ["stop", "terminate"],
    "STARTING": ["stop", "terminate"],
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
    "ERROR": ["start", "terminate"],
}
TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    402: "Payment Required",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    422: "Unprocessable Entity",
    429: "Too Many Requests",
}


@dataclass
class FakeGpu:
    """GPU of the catalog. `stock`: availability by data center."""

    id: str
    name: str
    memory: int
    secure: float
    community: float
    stock: dict[str, str]
    manufacturer: str = "NVIDIA"


@dataclass
class FakePod:
    """Pod of the account, also after its end, for its bill."""

    id: str
    request: dict[str, Any]
    usd_per_hour: float
    place: str
    created_at: float
    ended: str = ""
    """EXITED or ERROR; empty while the pod runs."""
    deleted_at: float | None = None
    log: list[str] = field(default_factory=lambda: ["agent started"])

    @property
    def key(self) -> str:
        """Key of the pod's container, which reaches this pod alone."""
        return f"rpa_of_{self.id}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the container."""
        return {**self.request.get("env", {}), "RUNPOD_POD_ID": self.id, "RUNPOD_API_KEY": self.key}

    @property
    def persistent_gb(self) -> int:
        """Size of the volume that a stopped pod is billed for."""
        size: int = self.request.get("mounts", {}).get("persistent", {}).get("size", 0)
        return size


def gpus() -> list[FakeGpu]:
    """Return a market of three GPUs of NVIDIA and one of AMD."""
    return [
        FakeGpu("NVIDIA GeForce RTX 4090", "RTX 4090", 24, 0.69, 0.34, {"US-KS-2": "HIGH", "EU-RO-1": "MEDIUM"}),
        FakeGpu("NVIDIA A40", "A40", 48, 0.40, 0.0, {"CA-MTL-1": "HIGH"}),
        FakeGpu("NVIDIA H100 80GB HBM3", "H100 SXM", 80, 2.99, 2.69, {"US-KS-2": "NONE"}),
        FakeGpu("AMD Instinct MI300X OAM", "MI300X", 192, 2.49, 0.0, {"EU-RO-1": "HIGH"}, "AMD"),
    ]


class FakeRunpod(FakeProvider):
    """RunPod for one account. `credit_usd`: prepaid credit, from which the bill is subtracted."""

    def __init__(self, now: Callable[[], float], *, key: str = "rpa_fake", credit_usd: float = 100.0) -> None:
        super().__init__(now)
        self.key = key
        self.credit_usd = credit_usd
        self.scopes = {"pods", "billing"}
        self.gpus = gpus()
        self.pods: list[FakePod] = []
        self.registries: dict[str, dict[str, str]] = {}
        """Logins at registries by their ids."""
        self.unplaceable = 0
        """Creates whose GPU another customer takes first."""
        self.unreadable_entries = 0
        """Lists in which an entry lacks its name."""
        self.hides_places = False
        """True: the catalog names no data center, as for machines of the community."""
        self.closed_gpus: set[str] = set()
        """GPUs of pools that the account may not use."""
        self.fails_to_start = False
        """True: the container of a new pod ends at its start."""
        self.ignored_deletes = 0
        """Deletes that are accepted and not carried out."""
        self.log_open_s = 0.05
        self._ids = count(1)

    def answer(self, call: FakeCall) -> FakeAnswer:
        """Carry out one call of the API."""
        key = call.headers.get("authorization", "").removeprefix("Bearer ")
        owner = next((one for one in self.exists() if one.key == key), None)
        if key != self.key and owner is None:
            return self.refused()
        self._end_without_credit()
        for one in self.exists() if self.fails_to_start else ():
            if not one.ended and self.status(one) == "RUNNING":
                self.end(one, "ERROR")
        parts = [unquote(one) for one in call.path.strip("/").split("/")]
        if owner is not None and parts[:3] != ["v2", "pods", owner.id]:
            return problem(403, "access denied")
        try:
            return self._route(call, parts)
        except BadFields as error:
            return problem(error.status, str(error), error.errors)

    def throttled(self) -> FakeAnswer:
        """Return the answer to a caller above the quota of a minute."""
        return FakeAnswer(429, document(429, "rate limit exceeded for the minute window"), {"Retry-After": "12"})

    def refused(self) -> FakeAnswer:
        """Return the answer to an invalid key."""
        return problem(401, "missing bearer token")

    def exists(self) -> list[FakePod]:
        """Return the pods that are not deleted."""
        return [one for one in self.pods if one.deleted_at is None]

    def end(self, pod: FakePod, status: str = "EXITED") -> None:
        """End the container of a pod: from now on the provider bills its volume alone."""
        pod.ended = status
        self.meter.rate(pod.id, "gpu", 0)
        self.meter.rate(pod.id, "disk", pod.persistent_gb * STOPPED_USD_PER_GB_HOUR)

    def status(self, pod: FakePod) -> str:
        """Return the status of an existing pod by the clock."""
        age_s = self.now() - pod.created_at
        started = "STARTING" if age_s >= STARTS_AFTER_S else "PROVISIONING"
        return pod.ended or ("RUNNING" if age_s >= RUNS_AFTER_S else started)

    def _route(self, call: FakeCall, parts: list[str]) -> FakeAnswer:
        if [call.method, *parts[:2]] == ["DELETE", "v2", "pods"] and "pods" not in self.scopes:
            return problem(403, "access denied")
        match [call.method, *parts]:
            case ["GET", "v2", "catalog", "gpus"]:
                return self._catalog(call)
            case ["GET", "v2", "pods"]:
                check_query(call, {"includeClusterPods"})
                return FakeAnswer(200, {"pods": self._listed()})
            case ["POST", "v2", "pods"]:
                return self._create(call)
            case [_, "v2", "registries", *rest]:
                return self._registry(call, rest)
            case ["GET", "v2", "billing", "pods"]:
                return self._bill(call)
            case [_, "v2", "pods", handle, *rest]:
                pod = next((one for one in self.exists() if one.id == handle), None)
                if pod is None:
                    return problem(404, "pod not found")
                return self._pod(call, pod, rest)
        return problem(404, "resource not found")

    def _pod(self, call: FakeCall, pod: FakePod, rest: list[str]) -> FakeAnswer:
        match [call.method, *rest]:
            case ["GET"]:
                return FakeAnswer(200, self._view(pod))
            case ["DELETE"]:
                return self._delete(pod)
            case ["GET", "logs"]:
                return self._logs(call, pod)
            case ["POST", "action"]:
                return self._act(call, pod)
        return problem(405, "method not allowed")

    def _registry(self, call: FakeCall, rest: list[str]) -> FakeAnswer:
        if "pods" not in self.scopes:
            return problem(403, "access denied")
        match [call.method, *rest]:
            case ["GET"]:
                shown = [{"id": key, "name": one["name"]} for key, one in self.registries.items()]
                return FakeAnswer(200, {"registries": shown})
            case ["POST"]:
                key = f"reg{next(self._ids):07d}"
                self.registries[key] = check_registry(call)
                return FakeAnswer(201, {"id": key, "name": self.registries[key]["name"]})
            case ["DELETE", key] if key in self.registries:
                if any(one.request.get("registry") == key for one in self.exists()):
                    return problem(400, "registry is in use by a pod")
                del self.registries[key]
                return FakeAnswer(204)
        return problem(404, "registry not found")

    def _catalog(self, call: FakeCall) -> FakeAnswer:
        check_query(call, {"include", "product", "count", "cloud", "countryCodes", "cudaVersions", "minCudaVersion"})
        wanted = call.query.get("include")
        if (wanted is None) != ("product" not in call.query) or wanted not in (None, "AVAILABILITY"):
            return problem(400, "include=AVAILABILITY and product are valid only together")
        found = []
        for one in self.gpus:
            entry: dict[str, Any] = {
                "id": one.id,
                "name": one.name,
                "pool": None,
                "manufacturer": one.manufacturer,
                "memory": one.memory,
                "secure": one.secure > 0,
                "community": one.community > 0,
                "price": {"secure": one.secure, "community": one.community},
                "maxCount": {"secure": 8 if one.secure else 0, "community": 4 if one.community else 0},
            }
            if wanted:
                entry["availability"] = max(one.stock.values(), key=LEVELS.index, default="NONE")
                if entry["availability"] != "NONE" and not self.hides_places:
                    entry["dataCenters"] = [
                        {"id": place, "name": place, "availability": level} for place, level in one.stock.items()
                    ]
            found.append(entry)
        return FakeAnswer(200, {"gpus": found})

    def _create(self, call: FakeCall) -> FakeAnswer:
        if "pods" not in self.scopes:
            return problem(403, "access denied")
        body = check_pod(call)
        if body["gpu"]["id"] in self.closed_gpus:
            return problem(403, "this GPU pool is not available to your account")
        gpu = next((one for one in self.gpus if one.id == body["gpu"]["id"]), None)
        if gpu is None:
            return problem(404, "gpu type not found")
        if body.get("registry") is not None and body["registry"] not in self.registries:
            return problem(404, "registry not found")
        price = gpu.secure if body.get("cloud", "SECURE") == "SECURE" else gpu.community
        places = [one for one in body.get("dataCenterIds") or gpu.stock if gpu.stock.get(one, "NONE") != "NONE"]
        taken, self.unplaceable = self.unplaceable > 0, max(0, self.unplaceable - 1)
        if not places or not price or taken:
            return problem(400, "There are no longer any instances available with the requested specifications.")
        price *= body["gpu"].get("count", 1)
        if self.credit_usd - self.meter.usd() < price:
            return problem(402, "Your balance is too low to rent this pod for an hour.")
        pod = FakePod(f"pod{next(self._ids):07d}", body, price, places[0], self.now())
        self.pods.append(pod)
        self.meter.rate(pod.id, "gpu", price)
        gb = body.get("disk", 50) + pod.persistent_gb
        self.meter.rate(pod.id, "disk", gb * DISK_USD_PER_GB_HOUR)
        return FakeAnswer(201, self._view(pod))

    def _delete(self, pod: FakePod) -> FakeAnswer:
        if self.ignored_deletes:
            self.ignored_deletes -= 1
            return FakeAnswer(204)
        pod.deleted_at = self.now()
        self.meter.end(pod.id)
        return FakeAnswer(204)

    def _act(self, call: FakeCall, pod: FakePod) -> FakeAnswer:
        action = call.json().get("action")
        if action not in ACTIONS[self.status(pod)]:
            return problem(409, f"action {action} is not valid for status {self.status(pod)}")
        if action == "terminate":
            return self._delete(pod)
        if action == "stop":
            self.end(pod)
        elif action == "start":
            pod.ended, pod.created_at = "", self.now()
            self.meter.rate(pod.id, "gpu", pod.usd_per_hour)
        return FakeAnswer(200, self._view(pod))

    def _logs(self, call: FakeCall, pod: FakePod) -> FakeAnswer:
        check_query(call, {"source", "tail", "since"})
        if not 0 <= int(call.query.get("tail", "100")) <= 5000:
            return problem(422, "tail: must be between 0 and 5000")
        lines = pod.log[-int(call.query.get("tail", "100")) :]
        events = [
            f"id: {stamp(self.now())}/{at:012d}\n"
            f"data: {json.dumps({'ts': stamp(self.now()), 'source': 'container', 'line': line})}\n\n"
            for at, line in enumerate(lines)
        ]
        # The provider keeps the stream open for lines to come.
        return FakeAnswer(200, "".join(events), {"Content-Type": "text/event-stream"}, open_s=self.log_open_s)

    def _bill(self, call: FakeCall) -> FakeAnswer:
        check_query(call, {"startTime", "endTime", "bucketSize", "lastN", "podId"})
        if "billing" not in self.scopes:
            return problem(403, "access denied")
        if call.query.get("bucketSize", "day") != "day" or "startTime" in call.query:
            return problem(422, "the fake keeps buckets of a day, by lastN")
        now, last = self.now(), int(call.query.get("lastN", "30"))
        begin = now - now % DAY_S - (last - 1) * DAY_S
        records: list[dict[str, Any]] = []
        for pod in self.pods:
            if call.query.get("podId") in (None, pod.id) and self.meter.usd(pod.id):
                # RunPod bills by day; a single record of today with the whole bill suffices for the tests.
                day = {"startTime": stamp(now - now % DAY_S), "endTime": stamp(now - now % DAY_S + DAY_S)}
                records.append({**day, "podId": pod.id, **self._amounts(pod.id)})
        totals = {name: sum(float(one[name]) for one in records) for name in self._amounts("")}
        query = {"startTime": stamp(begin), "endTime": stamp(now), "bucketSize": "day"}
        metadata = {
            "query": query,
            "recordCount": len(records),
            "uniquePodCount": len(records),
            "totals": totals,
        }
        return FakeAnswer(200, {"records": records, "metadata": metadata})

    def _amounts(self, handle: str) -> dict[str, float]:
        gpu, disk = self.meter.usd(handle, "gpu"), self.meter.usd(handle, "disk")
        return {"totalAmount": gpu + disk, "gpuAmount": gpu, "cpuAmount": 0.0, "diskAmount": disk}

    def _listed(self) -> list[dict[str, Any]]:
        views = [self._view(one) for one in self.exists()]
        if self.unreadable_entries and views:
            self.unreadable_entries -= 1
            del views[0]["name"]
        return views

    def _view(self, pod: FakePod) -> dict[str, Any]:
        status, body = self.status(pod), pod.request
        running = status == "RUNNING"
        return {
            "id": pod.id,
            "name": body["name"],
            "image": body["image"],
            "args": body.get("args", ""),
            "disk": body.get("disk", 50),
            "ports": body.get("ports", []),
            "env": body.get("env", {}),
            "registry": body.get("registry"),
            "status": status,
            "actions": ACTIONS.get(status, []),
            "mounts": body.get("mounts", {}),
            "gpu": {"id": body["gpu"]["id"], "count": body["gpu"].get("count", 1)},
            "cloud": body.get("cloud", "SECURE"),
            "dataCenterId": pod.place,
            "cudaVersion": "13.0",
            "ssh": {"proxy": None, "direct": None},
            "template": None,
            "cost": 0.0 if pod.ended else pod.usd_per_hour,
            "locked": False,
            "globalNetworking": {"enabled": False},
            "runtime": {"uptime": int(self.now() - pod.created_at) - RUNS_AFTER_S} if running else None,
            "createdAt": stamp(pod.created_at),
            "startedAt": stamp(pod.created_at + RUNS_AFTER_S) if running else None,
        }

    def _end_without_credit(self) -> None:
        """Delete the pods of an account without credit; the provider keeps only pods with a network volume."""
        if self.meter.usd() >= self.credit_usd:
            for pod in self.exists():
                pod.deleted_at = self.now()
                self.meter.end(pod.id)


def document(status: int, detail: str, errors: list[str] | None = None) -> dict[str, Any]:
    """Return a problem document of RFC 9457."""
    found: dict[str, Any] = {"title": TITLES[status], "status": status, "detail": detail}
    return {**found, "errors": errors} if errors else found


def problem(status: int, detail: str, errors: list[str] | None = None) -> FakeAnswer:
    """Return an error of the API."""
    return FakeAnswer(status, document(status, detail, errors), {"Content-Type": "application/problem+json"})


def stamp(at: float) -> str:
    """Return a time as RFC 3339 names it."""
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
