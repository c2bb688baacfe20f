"""Serve SaladCloud's public API and the public keys of its workloads, in the shapes of its OpenAPI document.

    with FakeSalad(now=clock) as salad:
        SaladAccount(api_key=salad.api_key, organization="acme", project="training", address=salad.address, ...)

Strict: an unknown field, a missing header or another content type is refused. Texts of quota and credit are not
documented by Salad; a client must not depend on more of them than the words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from fakes.salad import fields
from fakes.salad.cloud import Cloud, FakeGpuClass, FakeGroup, FakeSaladInstance, moment
from fakes.server import FakeAnswer, FakeCall, FakeProvider

PUBLIC = "/api/public"
JWKS = "/.well-known/workload-jwks.json"
MERGE_PATCH = "application/merge-patch+json"
MOST_GROUPS = 100
MOST_EVENTS = 50
RTX_4090 = "ed563892-aacd-40f5-80b7-90c9be6c759b"
RTX_3090 = "a5db5c50-cbcb-4596-ae80-6a0c8090d80f"
GTX_1060 = "951131f6-5acf-489c-b303-0906be8b26ef"
CLASSES = [
    FakeGpuClass("RTX 4090 (24 GB)", {"high": "0.250", "medium": "0.200", "low": "0.180", "batch": "0.160"}, RTX_4090),
    FakeGpuClass("RTX 3090 (24 GB)", {"high": "0.150", "medium": "0.120", "low": "0.100", "batch": "0.090"}, RTX_3090),
    FakeGpuClass("GTX 1060 (6 GB)", {"high": "0.060", "medium": "0.050", "low": "0.030", "batch": "0.020"}, GTX_1060),
]
_TITLES = {400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 415: "Unsupported Media Type"}
_CLAUSE = re.compile(r'\s*(resource\.labels\.[a-z_]+|resource\.type)\s*=\s*"([^"]*)"\s*')


class Refused(Exception):  # noqa: N818 - an answer
    """Call that the API refuses. `code`: content of the field `type`."""

    def __init__(self, status: int, detail: str, code: str | None = None) -> None:
        super().__init__(detail)
        body = {"type": code, "title": _TITLES.get(status, "Error"), "status": status, "detail": detail}
        self.answer = FakeAnswer(status, {key: value for key, value in body.items() if value is not None})


class FakeSalad(FakeProvider):
    """Organization `acme` with the project `training`. `cloud`: its groups; `meter`: its bill."""

    api_key = "salad_cloud_user_fakekey"
    organization = "acme"
    project = "training"

    def __init__(self, now: Callable[[], float], classes: Iterable[FakeGpuClass] = CLASSES) -> None:
        super().__init__(now)
        self.cloud = Cloud(now, [replace(one, prices=dict(one.prices)) for one in classes])
        self.meter = self.cloud.meter
        self.keys: list[dict[str, str]] = []
        """Public keys of the workloads (JWK)."""
        self.has_credit = True
        self.withdrawn_classes = 0
        """Creates whose GPU class is no longer sold."""
        self.unreadable_groups: list[Any] = []
        """Entries that are not groups, one for each of the next lists."""
        self.throttled_instances = 0
        """Reads of instances that are answered with 429."""

    @property
    def address(self) -> str:
        """Address of the API."""
        return self.url + PUBLIC

    def throttled(self) -> FakeAnswer:
        return Refused(429, "Too many requests.").answer

    def refused(self) -> FakeAnswer:
        return Refused(401, "The API key is not valid.").answer

    def usd(self) -> float:
        """Return the bill up to now in USD."""
        with self.lock:
            self.cloud.settle()
            return self.meter.usd()

    def billing(self) -> list[str]:
        """Return the groups that cost money now."""
        with self.lock:
            self.cloud.settle()
            return self.meter.billing()

    def group(self, name: str) -> FakeGroup:
        """Return a group that exists."""
        with self.lock:
            self.cloud.settle()
            return self.cloud.groups[name]

    def write_log(self, name: str, line: str) -> None:
        """Let the container of a group print a line."""
        group = self.group(name)
        group.logs.append((self.now(), group.instances[0].machine_id, line))

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a group's container, as the container sees it."""
        group = self.group(name)
        return {
            **group.container.get("environment_variables", {}),
            "SALAD_ORGANIZATION_NAME": self.organization,
            "SALAD_PROJECT_NAME": self.project,
            "SALAD_CONTAINER_GROUP_NAME": group.name,
            "SALAD_CONTAINER_GROUP_ID": group.id,
            "SALAD_INSTANCE_ID": group.instances[0].id,
            "SALAD_MACHINE_ID": group.instances[0].machine_id,
        }

    def answer(self, call: FakeCall) -> FakeAnswer:
        """Carry out one call."""
        self.cloud.settle()
        if call.path == JWKS:
            return FakeAnswer(200, {"keys": self.keys})
        try:
            if call.headers.get("salad-api-key") != self.api_key:
                return self.refused()
            for method, pattern, handle in self._routes():
                found = re.fullmatch(f"{PUBLIC}/organizations/{self.organization}{pattern}", call.path)
                if found and method == call.method:
                    return handle(call, *found.groups())
            raise Refused(404, f"{call.path} could not be found.")
        except Refused as refused:
            return refused.answer

    def _routes(self) -> list[tuple[str, str, Callable[..., FakeAnswer]]]:
        groups = f"/projects/{self.project}/containers"
        one, instances = f"{groups}/([^/]+)", f"{groups}/([^/]+)/instances"
        return [
            ("GET", "/gpu-classes", self._gpu_classes),
            ("GET", "/quotas", self._quotas),
            ("POST", "/availability/sce-gpu-availability", self._availability),
            ("POST", "/log-entries", self._log_entries),
            ("GET", groups, self._list),
            ("POST", groups, self._create),
            ("GET", one, self._get),
            ("PATCH", one, self._patch),
            ("DELETE", one, self._delete),
            ("POST", f"{one}/(start|stop)", self._start_or_stop),
            ("GET", f"{one}/system-logs", self._system_logs),
            ("GET", instances, self._instances),
            ("GET", f"{instances}/([^/]+)", self._instance),
            ("PATCH", f"{instances}/([^/]+)", self._patch_instance),
            ("POST", f"{instances}/([^/]+)/(reallocate|recreate|restart)", self._move),
        ]

    def _gpu_classes(self, call: FakeCall) -> FakeAnswer:
        return FakeAnswer(200, {"items": [one.read() for one in self.cloud.classes.values()]})

    def _quotas(self, call: FakeCall) -> FakeAnswer:
        a_minute = self.cloud.reallocations_per_minute
        return FakeAnswer(
            200,
            {
                "container_groups_quotas": {
                    "container_replicas_quota": self.cloud.replicas_quota,
                    "container_replicas_used": self.cloud.replicas_used(),
                    "max_container_group_reallocations_per_minute": a_minute,
                    "max_container_group_recreates_per_minute": a_minute,
                    "max_container_group_restarts_per_minute": a_minute,
                },
                "create_time": moment(0),
                "update_time": moment(0),
            },
        )

    def _availability(self, call: FakeCall) -> FakeAnswer:
        body = _body(call, fields.AVAILABILITY)
        free = sum(self.cloud.free_nodes(one) for one in self._known_classes(body["gpu_classes"]))
        return FakeAnswer(200, {"on_call_gpu": 0, **{f"available_gpu_{name}": free for name in fields.PRIORITIES}})

    def _log_entries(self, call: FakeCall) -> FakeAnswer:
        body = _body(call, fields.LOG_QUERY)
        labels = _parse_query(body["query"])
        start, end = (datetime.fromisoformat(body[name]).timestamp() for name in ("start_time", "end_time"))
        found = []
        for group in self.cloud.groups.values():
            named = {"container_group_name": group.name, "project_name": self.project}
            for at, machine, line in group.logs:
                entry = {**named, "machine_id": machine}
                if start <= at <= end and all(
                    ("container" if name == "resource.type" else entry.get(name.removeprefix("resource.labels.")))
                    == value
                    for name, value in labels.items()
                ):
                    found.append((at, line, entry))
        found.sort(key=lambda one: one[0], reverse=body.get("sort_order", "desc") == "desc")
        items = [
            {
                "time": moment(at),
                "receive_time": moment(at),
                "severity": "default",
                "resource": {"type": "container", "labels": entry},
                "text_log": line,
            }
            for at, line, entry in found[: body.get("page_size", 100)]
        ]
        page = {"page_min_time": body["start_time"], "page_max_time": body["end_time"]}
        return FakeAnswer(200, {"items": items, "organization_name": self.organization, **page})

    def _system_logs(self, call: FakeCall, name: str) -> FakeAnswer:
        return FakeAnswer(200, {"items": self._group(name).events[::-1][:MOST_EVENTS]})

    def _list(self, call: FakeCall) -> FakeAnswer:
        items: list[Any] = [self._read(one) for one in self.cloud.groups.values()][:MOST_GROUPS]
        unreadable = [self.unreadable_groups.pop(0)] if self.unreadable_groups else []
        return FakeAnswer(200, {"items": [*items, *unreadable]})

    def _create(self, call: FakeCall) -> FakeAnswer:
        body = _body(call, fields.CREATE)
        classes = self._known_classes(body["container"]["resources"].get("gpu_classes", []))
        if self.withdrawn_classes:
            self.withdrawn_classes -= 1
            raise Refused(400, f"The GPU class {classes[0]} is not available.", "invalid_gpu_class")
        if body["name"] in self.cloud.groups:
            raise Refused(400, f"A container group named {body['name']} exists.", "name_conflict")
        if not self.has_credit:
            raise Refused(403, "The organization has no credit left.", "insufficient_credit")
        if self.cloud.replicas_used() + body["replicas"] > self.cloud.replicas_quota:
            raise Refused(403, "The replica quota of the organization is exceeded.", "quota_exceeded")
        group = self.cloud.create(body)
        return FakeAnswer(201, self._read(group), {"Location": f"{call.path}/{group.name}"})

    def _get(self, call: FakeCall, name: str) -> FakeAnswer:
        return FakeAnswer(200, self._read(self._group(name)))

    def _patch(self, call: FakeCall, name: str) -> FakeAnswer:
        group, body = self._group(name), _body(call, fields.PATCH, MERGE_PATCH)
        if self.now() < group.prepared_at:
            raise Refused(400, "A change of the container group is pending.", "pending_change")
        resources = (body.get("container") or {}).get("resources") or {}
        self._known_classes(resources.get("gpu_classes") or [])
        self.cloud.patch(group, body)
        return FakeAnswer(200, self._read(group), {"Content-Type": MERGE_PATCH})

    def _delete(self, call: FakeCall, name: str) -> FakeAnswer:
        self.cloud.delete(self._group(name))
        return FakeAnswer(202)

    def _start_or_stop(self, call: FakeCall, name: str, verb: str) -> FakeAnswer:
        group = self._group(name)
        if group.started == (verb == "start"):
            raise Refused(400, f"The container group cannot {verb} in its state {group.status}.", "invalid_state")
        if verb == "stop":
            self.cloud.stop(group)
        else:
            group.started, group.failed = True, ""
        return FakeAnswer(202)

    def _instances(self, call: FakeCall, name: str) -> FakeAnswer:
        if self.throttled_instances:
            self.throttled_instances -= 1
            return self.throttled()
        return FakeAnswer(200, {"instances": [one.read(self.now()) for one in self._group(name).instances]})

    def _instance(self, call: FakeCall, name: str, instance_id: str) -> FakeAnswer:
        return FakeAnswer(202, self._one(name, instance_id).read(self.now()))

    def _patch_instance(self, call: FakeCall, name: str, instance_id: str) -> FakeAnswer:
        body = _body(call, fields.PATCH_INSTANCE, MERGE_PATCH)
        instance = self._one(name, instance_id)
        instance.deletion_cost = body.get("deletion_cost") or 0
        return FakeAnswer(200, instance.read(self.now()), {"Content-Type": MERGE_PATCH})

    def _move(self, call: FakeCall, name: str, instance_id: str, verb: str) -> FakeAnswer:
        if call.raw:
            raise Refused(400, f"A {verb} has no body.", "validation_error")
        self.move(self._group(name), self._one(name, instance_id), verb)
        return FakeAnswer(202)

    def move(self, group: FakeGroup, instance: FakeSaladInstance, verb: str) -> None:
        """Reallocate, recreate or restart an instance, within the quota of a minute."""
        recent = [at for at in self.cloud.reallocated_at if at > self.now() - 60]
        if len(recent) >= self.cloud.reallocations_per_minute:
            raise Refused(429, f"The quota of {self.cloud.reallocations_per_minute} a minute is reached.")
        self.cloud.reallocated_at = [*recent, self.now()]
        if verb == "reallocate":
            self.cloud.lose_node(group, instance, "Instance Reallocated (by User)")
        else:
            self.cloud.restart(group, instance)

    def _group(self, name: str) -> FakeGroup:
        group = self.cloud.groups.get(name)
        if group is None:
            raise Refused(404, "The container group could not be found.")
        return group

    def _one(self, name: str, instance_id: str) -> FakeSaladInstance:
        for instance in self._group(name).instances:
            if instance.id == instance_id:
                return instance
        raise Refused(404, "The container group instance could not be found.")

    def _known_classes(self, ids: list[str]) -> list[str]:
        for one in ids:
            if one not in self.cloud.classes:
                raise Refused(400, f"The GPU class {one} is unknown.", "invalid_gpu_class")
        return ids

    def _read(self, group: FakeGroup) -> dict[str, Any]:
        counts = {f"{state}_count": 0 for state in ("allocating", "creating", "running", "stopping")}
        for instance in group.instances:
            if f"{instance.state}_count" in counts:
                counts[f"{instance.state}_count"] += 1
        # The login at the registry is write-only.
        hidden = ("priority", "registry_authentication")
        container = {key: value for key, value in group.container.items() if key not in hidden}
        resources = {"gpu_classes": [], "shm_size": 64, "storage_amount": 2**30, **container["resources"]}
        return {
            "id": group.id,
            "name": group.name,
            "display_name": group.body.get("display_name", group.name),
            "organization_name": self.organization,
            "project_name": self.project,
            "container": {
                "command": [],
                "environment_variables": {},
                "hash": f"sha256:{'0' * 64}",
                "size": 4 * 2**30,
                **container,
                "resources": resources,
            },
            "autostart_policy": group.body["autostart_policy"],
            "restart_policy": group.body["restart_policy"],
            "replicas": group.body["replicas"],
            "priority": group.priority,
            "country_codes": group.body.get("country_codes", []),
            "pending_change": self.now() < group.prepared_at,
            "version": group.version,
            "create_time": moment(group.created_at),
            "update_time": moment(group.updated_at),
            "scheduled-scaling-enabled": False,
            "scaling-actions": [],
            "current_state": {
                "status": group.status,
                "description": group.failed or None,
                "start_time": moment(group.created_at),
                "finish_time": moment(0),
                "instance_status_counts": counts,
            },
        }


def _body(call: FakeCall, check: fields.Check, content_type: str = "application/json") -> Any:
    """Return the body of a call. Raises Refused for another content type, and for a body that the check refuses."""
    if call.headers.get("content-type", "").partition(";")[0] != content_type:
        raise Refused(415, f"The content type must be {content_type}.")
    try:
        body = call.json()
    except ValueError:
        raise Refused(400, "The body is not JSON.") from None
    problems = list(check(body, ""))
    if problems:
        raise Refused(400, "; ".join(problems), "validation_error")
    return body


def _parse_query(query: str) -> dict[str, str]:
    """Return the clauses of a log query. Raises Refused for a query beyond `field = "value" AND ...`."""
    found = {}
    for clause in query.split(" AND "):
        matched = _CLAUSE.fullmatch(clause)
        if matched is None:
            raise Refused(400, f"The query {clause!r} cannot be parsed.")
        found[matched[1]] = matched[2]
    return found
