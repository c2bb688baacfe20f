"""Keep SaladCloud's container groups, instances and nodes in virtual time, and bill each instance while it runs.

An instance walks allocating -> downloading -> creating -> running; only `running` is billed. An instance whose node is
lost, or whose container exits with an error, starts again on another node, with the environment of its group.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any

from fakes.meter import BillingMeter


@dataclass
class FakeGpuClass:
    """GPU class: name as Salad writes it, price in USD per hour by priority, nodes of the class."""

    name: str
    prices: dict[str, str]
    id: str = ""
    nodes: int = 100
    gpus: int = 1
    least_memory_mb: int = 1024
    most_memory_mb: int = 61_440
    most_storage_bytes: int = 268_435_456_000

    def read(self) -> dict[str, Any]:
        """Return the class as the API does."""
        return {
            "id": self.id,
            "name": self.name,
            "prices": [{"priority": priority, "price": price} for priority, price in self.prices.items()],
            "gpu_class_type": "community",
            "gpu_count": self.gpus,
            "is_high_demand": False,
            "min_vcpu": 1,
            "max_vcpu": 16,
            "min_ram": self.least_memory_mb,
            "max_ram": self.most_memory_mb,
            "min_storage": 2**30,
            "max_storage": self.most_storage_bytes,
        }


@dataclass
class FakeSaladInstance:
    """Instance of a group on one node. `next_at`: time of the next transition."""

    id: str
    machine_id: str
    state: str
    since: float
    next_at: float
    version: int
    deletion_cost: int = 0

    def read(self, now: float) -> dict[str, Any]:
        """Return the instance as the API does."""
        running = self.state == "running"
        found = {
            "id": self.id,
            "machine_id": self.machine_id,
            "state": self.state,
            "update_time": moment(self.since),
            "version": self.version,
            "ready": running,
            "started": running,
            "deletion_cost": self.deletion_cost,
        }
        if self.state == "downloading":
            share = (now - self.since) / max(self.next_at - self.since, 1e-9)
            found["pulling_progress"] = round(100 * min(share, 1.0), 1)
        return found


@dataclass
class FakeGroup:
    """Container group. `body`: the create call with its patches."""

    id: str
    body: dict[str, Any]
    created_at: float
    updated_at: float
    started: bool
    version: int = 1
    deleted: bool = False
    failed: str = ""
    prepared_at: float = 0.0
    """End of the window in which a change of the image is prepared."""
    instances: list[FakeSaladInstance] = field(default_factory=list)
    blocked: set[str] = field(default_factory=set)
    """Nodes on which a container of the group has failed."""
    logs: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, machine and line."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """System events as the API returns them, the oldest first."""

    @property
    def name(self) -> str:
        """Name, which is unique in the project."""
        return str(self.body["name"])

    @property
    def container(self) -> dict[str, Any]:
        """Container of the create call with its patches."""
        found: dict[str, Any] = self.body["container"]
        return found

    @property
    def priority(self) -> str:
        """Priority of the instances. A group without a GPU has the lowest one."""
        gpus = self.container["resources"].get("gpu_classes")
        return str(self.container.get("priority", "high")) if gpus else "batch"

    @property
    def status(self) -> str:
        """Status as the API names it."""
        if self.failed:
            return "failed"
        if not self.started:
            return "stopped"
        states = {one.state for one in self.instances}
        return "running" if "running" in states else "deploying" if states & {"downloading", "creating"} else "pending"


class Cloud:
    """All groups of one organization and project. `settle` carries out what is due; every call does so first."""

    allocate_s: float = 30.0
    download_s: float = 300.0
    create_s: float = 10.0
    stopping_s: float = 30.0
    prepare_s: float = 60.0
    replicas_quota = 100
    reallocations_per_minute = 10

    def __init__(self, now: Callable[[], float], classes: list[FakeGpuClass]) -> None:
        self._now = now
        self._at: float | None = None
        self.meter = BillingMeter(lambda: self.time)
        self.classes = {one.id: one for one in classes}
        self.groups: dict[str, FakeGroup] = {}
        self.crashing_images: set[str] = set()
        """Images whose containers exit with an error at their start."""
        self.ignored_deletes = 0
        """Deletes that are accepted and not carried out."""
        self.reallocated_at: list[float] = []
        self._ids = count(1)

    @property
    def time(self) -> float:
        """Present, or the time of the transition that is carried out."""
        return self._now() if self._at is None else self._at

    def settle(self) -> None:
        """Carry out all transitions up to now."""
        for group in list(self.groups.values()):
            self._fill(group)
            for instance in list(group.instances):
                while instance in group.instances and instance.next_at <= self._now():
                    self._at = instance.next_at
                    self._advance(group, instance)
                    self._at = None
            if group.deleted and not group.instances:
                del self.groups[group.name]

    def create(self, body: dict[str, Any]) -> FakeGroup:
        """Make a group."""
        now = self.time
        group = FakeGroup(self.new_id(), body, now, now, bool(body["autostart_policy"]))
        self.groups[group.name] = group
        self._fill(group)
        self.settle()
        return group

    def delete(self, group: FakeGroup) -> None:
        """End a group; its instances stop for a while first."""
        if self.ignored_deletes:
            self.ignored_deletes -= 1
            return
        group.deleted = True
        self.stop(group)

    def stop(self, group: FakeGroup) -> None:
        """Stop all instances."""
        group.started = False
        for instance in list(group.instances):
            self._end(group, instance)
        self.settle()

    def patch(self, group: FakeGroup, patch: dict[str, Any]) -> None:
        """Apply a merge patch; another image, command or environment restarts all instances at once."""
        changed = dict(patch.get("container") or {})
        merge(group.body, patch)
        group.updated_at = self.time
        restarting = {"image", "command", "environment_variables"} & set(changed)
        if restarting:
            group.version += 1
            if "image" in restarting:
                group.prepared_at = self.time + self.prepare_s
            for instance in group.instances:
                self.restart(group, instance)
        self._fill(group)
        self.settle()

    def lose_node(
        self, group: FakeGroup, instance: FakeSaladInstance, event: str = "Instance Interrupted (Node Offline)"
    ) -> None:
        """Take an instance's node away; the instance starts on another one. `event`: name of the system event."""
        self.meter.rate(group.name, instance.id, 0)
        self._note(group, instance, event)
        instance.id = self.new_id()
        instance.machine_id = self.new_id()
        self._enter(instance, "allocating", self.allocate_s)

    def exit(self, group: FakeGroup, instance: FakeSaladInstance, code: int) -> None:
        """End an instance's container: restart it on its node after 0, else block the node and move the instance."""
        if group.body["restart_policy"] == "never" or (group.body["restart_policy"] == "on_failure" and code == 0):
            self._end(group, instance)
            group.started, group.failed = False, f"exited with {code}" if code else ""
        elif code == 0:
            self.restart(group, instance)
        else:
            group.blocked.add(instance.machine_id)
            self.lose_node(group, instance, f"Instance Exited: {code}")

    def restart(self, group: FakeGroup, instance: FakeSaladInstance) -> None:
        """Start a clean container on the same node."""
        self.meter.rate(group.name, instance.id, 0)
        instance.version = group.version
        self._enter(instance, "creating", self.create_s)

    def price(self, group: FakeGroup) -> float:
        """Return the price of one instance in USD per hour. Prices of GPU classes contain processors and memory."""
        resources = group.container["resources"]
        classes = [self.classes[one] for one in resources.get("gpu_classes", [])]
        if not classes:
            return 0.004 * int(resources["cpu"]) + 0.001 * int(resources["memory"]) / 1024
        return max(float(one.prices[group.priority]) for one in classes)

    def free_nodes(self, class_id: str) -> int:
        """Return the nodes of a class that no instance holds."""
        held = sum(
            instance.state != "allocating"
            for group in self.groups.values()
            if class_id in group.container["resources"].get("gpu_classes", [])
            for instance in group.instances
        )
        return self.classes[class_id].nodes - held

    def replicas_used(self) -> int:
        """Return the replicas of all groups, whether they run or not."""
        return sum(int(group.body["replicas"]) for group in self.groups.values())

    def new_id(self) -> str:
        """Return a new identifier."""
        return str(uuid.UUID(int=0x5A1AD << 108 | next(self._ids)))

    def _fill(self, group: FakeGroup) -> None:
        """Make instances up to the number of replicas; end those with the lowest deletion cost above the number."""
        wanted = int(group.body["replicas"]) if group.started else 0
        alive = [one for one in group.instances if one.state != "stopping"]
        for instance in sorted(alive, key=lambda one: one.deletion_cost)[: max(0, len(alive) - wanted)]:
            self._end(group, instance)
        for _ in range(wanted - len(alive)):
            now = self.time
            group.instances.append(
                FakeSaladInstance(self.new_id(), self.new_id(), "allocating", now, now + self.allocate_s, group.version)
            )

    def _advance(self, group: FakeGroup, instance: FakeSaladInstance) -> None:
        if instance.state == "allocating":
            classes = group.container["resources"].get("gpu_classes", [])
            if classes and not any(self.free_nodes(one) > 0 for one in classes):
                instance.next_at = self._now() + 1
            else:
                self._note(group, instance, "Instance Allocated")
                self._enter(instance, "downloading", self.download_s)
                self._note(group, instance, "Instance Downloading")
        elif instance.state == "downloading":
            self._enter(instance, "creating", self.create_s)
            self._note(group, instance, "Instance Creating")
        elif instance.state == "creating":
            self._enter(instance, "running", math.inf)
            self._note(group, instance, "Instance Running")
            self.meter.rate(group.name, instance.id, self.price(group))
            if group.container["image"] in self.crashing_images:
                self.exit(group, instance, 1)
        elif instance.state == "stopping":
            group.instances.remove(instance)

    def _end(self, group: FakeGroup, instance: FakeSaladInstance) -> None:
        self.meter.rate(group.name, instance.id, 0)
        if instance.state != "stopping":
            self._enter(instance, "stopping", self.stopping_s)

    def _note(self, group: FakeGroup, instance: FakeSaladInstance, name: str) -> None:
        resources = group.container["resources"]
        classes = [self.classes[one].name for one in resources.get("gpu_classes", [])]
        group.events.append(
            {
                "event_name": name,
                "event_time": moment(self.time),
                "instance_id": instance.id,
                "machine_id": instance.machine_id,
                "resource_cpu": resources["cpu"],
                "resource_gpu_class": ", ".join(classes),
                "resource_memory": resources["memory"],
                "resource_storage_amount": resources.get("storage_amount", 2**30),
                "version": str(instance.version),
            }
        )

    def _enter(self, instance: FakeSaladInstance, state: str, for_s: float) -> None:
        instance.state, instance.since, instance.next_at = state, self.time, self.time + for_s


def moment(at: float) -> str:
    """Return a time as the API writes it."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """Apply a JSON merge patch (RFC 7396)."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        else:
            target[key] = value
