"""Read SaladCloud's answers: the part of its values that the driver uses, and the meaning of its refusals.

The models follow `salad-cloud.yaml` 0.9.0-alpha.17. Salad documents neither the texts of refusals nor codes for quota
and credit; therefore words of the text decide, and a text without a known word is a refusal of the request.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from functions.fleet.drivers.protocol import NotCreated, RefusalKind
from functions.fleet.drivers.provider_http import ProviderAnswer
from functions.fleet.records import Price

MIB_PER_GIB = 1024
ENDED = frozenset({"stopped", "failed", "succeeded"})
"""States of a group that starts no instance by itself any more."""
STATES = frozenset({"pending", "deploying", "running", *ENDED})
INSTANCE_STATES = frozenset({"allocating", "downloading", "creating", "running", "stopping"})
"""Every documented state, of groups and of instances."""
_MEMORY = re.compile(r"\s*\((\d+) ?GB\)")


class SaladAnswer(BaseModel):
    """Base of Salad's values."""

    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)


class ClassPrice(SaladAnswer):
    """Price in USD per hour, which Salad writes as a text."""

    priority: str
    price: Price


class GpuClass(SaladAnswer):
    """Kind of node. The name ends with the memory: `RTX 4090 (24 GB)`. Prices contain processors and memory."""

    id: str
    name: str
    prices: list[ClassPrice]
    gpu_count: Annotated[int, Field(ge=1)] = 1
    min_ram: int | None = None
    max_ram: int | None = None
    min_vcpu: int | None = None
    max_vcpu: int | None = None
    max_storage: int | None = None

    @property
    def gpu_model(self) -> str:
        """Return the name without the memory."""
        return _MEMORY.sub("", self.name)

    @property
    def vram_gib(self) -> float:
        """Return the memory of one GPU; 0 if the name does not state the memory."""
        found = _MEMORY.search(self.name)
        return float(found[1]) if found else 0.0

    def usd_per_hour(self, priority: str) -> float | None:
        """Return the price at a priority; None if the class is not sold at the priority."""
        return next((one.price for one in self.prices if one.priority == priority), None)


class GroupResources(SaladAnswer):
    """Resources of each instance of a group."""

    gpu_classes: list[str] | None = None


class GroupContainer(SaladAnswer):
    """Container of a group."""

    resources: GroupResources


class InstanceCounts(SaladAnswer):
    """Numbers of instances by state; instances that download have no number."""

    running_count: int = 0


class GroupState(SaladAnswer):
    """State of a group."""

    status: str
    description: str | None = None
    instance_status_counts: InstanceCounts = InstanceCounts()


class Group(SaladAnswer):
    """Container group."""

    name: str
    create_time: AwareDatetime
    priority: str | None = None
    container: GroupContainer
    current_state: GroupState

    @property
    def ended(self) -> bool:
        """True if the group runs no instance until somebody starts it."""
        return self.current_state.status in ENDED


class SaladInstance(SaladAnswer):
    """Instance of a group on one node."""

    id: str
    machine_id: str
    state: str
    pulling_progress: float | None = None

    @property
    def message(self) -> str:
        """Describe the state: `downloading the image, 43 %`."""
        if self.state == "downloading":
            return f"downloading the image, {self.pulling_progress or 0:.0f} %"
        return self.state


class SaladLogLine(SaladAnswer):
    """Line of a container's output."""

    time: AwareDatetime
    text_log: str | None = None
    json_log: dict[str, Any] | None = None


class SystemEvent(SaladAnswer):
    """Event of an instance: its node, its image, its end."""

    event_name: str
    event_time: AwareDatetime
    machine_id: str | None = None


class Quotas(SaladAnswer):
    """Replicas that the organization may have, and has, whether their groups run or not."""

    container_replicas_quota: int
    container_replicas_used: int


def problem_of(answer: ProviderAnswer) -> str:
    """Return status, code and text of a refusal in one line."""
    body = answer.body if isinstance(answer.body, dict) else {}
    said = [str(body[name]) for name in ("type", "detail") if body.get(name)] or [answer.text[:200]]
    return " ".join(f"Salad answered {answer.status}: {': '.join(said)}".split()).rstrip(".")


def is_name_conflict(answer: ProviderAnswer) -> bool:
    """Return True if a group with the name exists. Salad says so with 400, not with 409."""
    code = answer.body.get("type") if isinstance(answer.body, dict) else None
    return answer.status == 409 or (answer.status == 400 and code == "name_conflict")


def refusal(answer: ProviderAnswer) -> NotCreated:
    """Return a create's certain refusal, with its kind if Salad would refuse all other offers, too."""
    said = problem_of(answer)
    for kind, remedy, holds in _MEANINGS:
        if holds(answer.status, said.lower()):
            return NotCreated(reason=f"{said}. {remedy}", kind=kind)
    return NotCreated(reason=said, kind=RefusalKind.INVALID)


_MEANINGS = (
    (RefusalKind.KEY, "Store a valid key with `baton fleet login salad`.", lambda status, said: status == 401),
    (RefusalKind.QUOTA, "The next tick tries again.", lambda status, said: status == 429),
    (
        RefusalKind.INVALID,
        "The organization or the project does not exist: name existing ones with `baton fleet login salad`.",
        lambda status, said: status == 404,
    ),
    (
        RefusalKind.QUOTA,
        "Delete container groups, or ask Salad for more replicas on the portal's page of quotas.",
        lambda status, said: "quota" in said,
    ),
    (
        RefusalKind.CREDIT,
        "Buy credit on the portal's page of billing.",
        lambda status, said: any(word in said for word in ("credit", "balance", "payment", "billing")),
    ),
    (
        RefusalKind.PERMISSION,
        "Store the key of a member of the organization with `baton fleet login salad`.",
        lambda status, said: status == 403,
    ),
    # Another class may still be sold.
    (None, "The next offer is tried.", lambda status, said: "gpu class" in said or "gpu_class" in said),
    (
        RefusalKind.IMAGE,
        "Name an image that Salad can pull: public, linux/amd64, at most 35 GB compressed.",
        lambda status, said: "image" in said or "registry" in said,
    ),
)
