"""Rent nodes of SaladCloud: one container group with one replica for each machine, named by the machine's token.

Salad sells groups, whose instances come and go by themselves. With one replica a group is a machine: its name is the
idempotency key of the create, its environment holds the token of this machine alone, and no scale-down can hit a busy
node (docs/decisions/0021-a-salad-machine-is-a-group-of-one.md). Only a running instance is billed, therefore a machine
that waits for a node or downloads its image has the price 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import quote as quoted

from pydantic import BaseModel, ValidationError

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.providers import SaladAccount
from baton.contract.fleets.registries import DOCKER_HUB, registry_of
from functions.domain.jobs.job_selection import names_model
from functions.fleet.drivers.protocol import (
    AccountReport,
    Ambiguous,
    Created,
    CreateIntent,
    CreateResult,
    Leftover,
    NotCreated,
    ProviderRefused,
    ProviderUnavailable,
    RefusalKind,
    SshTarget,
    quote_unknown,
)
from functions.fleet.drivers.provider_http import TIMEOUT_S, AnswerLost, CallNotSent, ProviderAnswer, ProviderHttp
from functions.fleet.drivers.salad.wire import (
    INSTANCE_STATES,
    MIB_PER_GIB,
    STATES,
    GpuClass,
    Group,
    Quotas,
    SaladInstance,
    SaladLogLine,
    SystemEvent,
    is_name_conflict,
    problem_of,
    refusal,
)
from functions.fleet.records import Inventory, Offer, Sighting

CPUS = 4
MEMORY_MIB = 16 * MIB_PER_GIB
"""Processors and memory of a machine, within the limits of its class; the price of a GPU contains both."""
SHM_SHARE = 0.5
"""Share of the memory that may hold /dev/shm, where trainings stage checkpoints and loaders pass batches."""
DISK_GIB = 250
"""Largest disk of a node whose class names none."""
BOOT_S = 1200
"""Time to find a node and to pull an image of 10 to 20 GB on a home line; not billed."""
INTERRUPTIONS_PER_HOUR = {"high": 0.05, "medium": 0.1, "low": 0.3, "batch": 0.5}
"""Estimates. Salad says that most nodes stay for more than 10 hours, and that work of higher priority takes nodes away
from `medium`, `low` and `batch`."""
LONGEST_VALUE = 1000
MOST_LISTED = 100
"""Groups in one list; Salad has no further pages. A list of so many may lack a group and is no proof of an absence."""
FULL = (
    f"the project has {MOST_LISTED - 1} or more container groups, and with one more Salad's list could lack a machine, "
    "which is billed and cannot be proved gone: delete groups that Baton did not make, or lower `max` of the fleets"
)
CLASSES_LAST_S = 300
"""Time for which the list of GPU classes and prices is kept."""
HOST_LASTS_S = 300
"""Time for which the node of a running machine is kept."""
INSTANCES_WITHIN_S = 10.0
"""Time for the nodes of all machines in one list; a slow answer for each machine would leave the list unread."""
ASKED_CLASSES = 8
"""Classes whose free nodes one quote asks for, the cheapest first."""
LOG_WINDOW_S = 24 * 3600
LOG_LINES = 100

Model = TypeVar("Model", bound=BaseModel)


class SaladDriver:
    """Driver of SaladCloud. now: time in seconds."""

    name = "salad"
    # Salad documents 429 for every call and no limits.
    min_interval_s: Mapping[str, float] = {}

    def __init__(self, account: SaladAccount, *, now: Callable[[], float], timeout_s: float = TIMEOUT_S) -> None:
        self.account = account
        self._now = now
        self._http = ProviderHttp(
            account.address, {"Salad-Api-Key": account.api_key.get_secret_value()}, timeout_s=timeout_s
        )
        self._organization = f"/organizations/{quoted(account.organization, safe='')}"
        self._groups = f"{self._organization}/projects/{quoted(account.project, safe='')}/containers"
        self._classes: dict[str, GpuClass] = {}
        self._classes_until = float("-inf")
        self._hosts: dict[str, tuple[SaladInstance, float]] = {}
        """Running instances by group, and the time until which they count."""
        self._listed = MOST_LISTED
        """Groups of the last list and creates since; before the first list the project counts as full."""

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        """Return one offer for each GPU class, without those that suit the document and have no free node."""
        countries = [one.upper() for one in spec.regions if len(one) == 2]
        offers = [
            (self._suits(kind, price, spec), self._offer(kind, price, countries))
            for kind in self._gpu_classes().values()
            if (price := kind.usd_per_hour(self.account.priority))
        ]
        offers.sort(key=lambda one: (not one[0], one[1].usd_per_hour, one[1].ref))
        return [
            offer
            for at, (suits, offer) in enumerate(offers)
            if not suits or (at < ASKED_CLASSES and self._free_nodes(offer, spec))
        ]

    def create(self, intent: CreateIntent) -> CreateResult:
        """Send one request for a group of one replica; a group of this name is adopted only if it is the same."""
        too_long = [name for name, value in intent.environment.items() if not _is_variable(value)]
        if too_long or intent.image is None:
            problem = f"the variables {', '.join(too_long)} must be single lines of 1 to {LONGEST_VALUE} characters"
            return NotCreated(
                reason=problem if too_long else "the fleet's document names no image", kind=RefusalKind.INVALID
            )
        try:
            body = self._body(intent)
            if self._listed >= MOST_LISTED - 1:
                self._list(intent.token)
            if self._listed >= MOST_LISTED - 1:
                return NotCreated(reason=FULL, kind=RefusalKind.QUOTA)
            self._listed += 1
            password = intent.login.password.get_secret_value() if intent.login else ""
            answer = self._http.send("POST", self._groups, body=body, secret=password)
        except AnswerLost as error:
            return Ambiguous(reason=str(error))
        except ProviderRefused as error:
            return NotCreated(reason=str(error), kind=error.kind)
        except (CallNotSent, ProviderUnavailable) as error:
            return NotCreated(reason=str(error))
        if answer.ok and isinstance(answer.body, dict) and answer.body.get("name") == intent.token:
            return Created(handle=intent.token)
        if is_name_conflict(answer):
            return self._adopt(intent.token, body)
        if answer.status < 400 or answer.status == 408:
            return Ambiguous(reason=f"{problem_of(answer)} to a create")
        return refusal(answer)

    def inventory(self, prefix: str, now: int) -> Inventory:
        """List the groups whose names begin with `prefix`, each with its node and its price of the moment."""
        classes = self._gpu_classes()
        groups, complete = self._list(prefix)
        ours = [one for one in groups if one.name.startswith(prefix)]
        found = self._instances(ours)
        return Inventory(
            provider=self.name,
            at=now,
            complete=complete,
            sightings=[self._sighting(one, found.get(one.name), classes) for one in ours],
        )

    def destroy(self, handle: str) -> bool:
        """Delete a group; Salad ends its instance afterwards."""
        answer = self._change("DELETE", self._group(handle))
        return answer.ok or answer.status == 404

    def reallocate(self, handle: str, machine_ref: str) -> None:
        """Ask for another node in place of the one with this id."""
        instances = f"{self._group(handle)}/instances"
        listed = self._http.read("GET", instances)
        # A group can have ended.
        items = [] if listed.status == 404 else _items(listed, "instances")
        for one in (_parse(SaladInstance, item) for item in items):
            if one is not None and one.machine_id == machine_ref:
                answer = self._change("POST", f"{instances}/{quoted(one.id, safe='')}/reallocate")
                if not answer.ok and answer.status != 404:
                    raise ProviderUnavailable(problem_of(answer))

    def accept_price(self, handle: str, usd_per_hour: float) -> None:
        """Do nothing, because a changed price of a class holds at once."""

    def logs(self, handle: str) -> str | None:
        """Return the last lines of a group's container among the events of its instances, in their order."""
        now = self._now()
        labels = {"container_group_name": handle, "project_name": self.account.project}
        answer = self._http.read(
            "POST",
            f"{self._organization}/log-entries",
            body={
                "start_time": _moment(now - LOG_WINDOW_S),
                "end_time": _moment(now + 60),
                "query": " AND ".join(f'resource.labels.{name} = "{value}"' for name, value in labels.items()),
                "page_size": LOG_LINES,
                "sort_order": "desc",
            },
        )
        lines = [_parse(SaladLogLine, one) for one in reversed(_items(answer, "items"))]
        told = [(one.time, one.text_log or str(one.json_log or "")) for one in lines if one is not None]
        texts = [text for _, text in sorted([*self._events(handle), *told], key=lambda one: one[0])]
        return "\n".join(texts) if texts else None

    def _events(self, handle: str) -> list[tuple[datetime, str]]:
        """Return the time and the text of each event of a group's instances, oldest first; none of a deleted group."""
        answer = self._http.read("GET", f"{self._group(handle)}/system-logs")
        items = [] if answer.status == 404 else reversed(_items(answer, "items"))
        found = [_parse(SystemEvent, one) for one in items]
        return [(one.event_time, f"[salad] {one.event_name}, node {one.machine_id}") for one in found if one]

    def ssh_target(self, handle: str) -> SshTarget | None:
        """Return None, because Salad takes SSH keys on its portal only."""
        return None

    def examine(self, prefix: str) -> AccountReport:
        """Report the quota, and groups of others in the project. Salad's keys have no permissions of their own."""
        answer = self._http.read("GET", f"{self._organization}/quotas")
        body = _require(answer)
        quotas = _parse(Quotas, body.get("container_groups_quotas"))
        groups, complete = self._list(prefix)
        problems = []
        if quotas and quotas.container_replicas_used >= quotas.container_replicas_quota:
            problems.append(
                f"{RefusalKind.QUOTA}: all {quotas.container_replicas_quota} replicas of the organization are in use, "
                "also by stopped groups: delete groups, or ask Salad for more on the portal's page of quotas"
            )
        if not complete:
            problems.append(
                f"{RefusalKind.INVALID}: the project's list of {len(groups)} groups is incomplete, and a machine that "
                "is not listed cannot be proved gone: give Baton a project of its own"
            )
        classes = self._gpu_classes()
        return AccountReport(
            account=f"{self.account.organization}/{self.account.project}",
            problems=problems,
            foreign=[self._sighting(one, None, classes) for one in groups if not one.name.startswith(prefix)],
        )

    def remove_leftover(self, leftover: Leftover) -> None:
        """Do nothing, because a deleted group leaves nothing that is billed."""

    def charged_usd(self, handle: str) -> float | None:
        """Return None, because Salad's API has no charges."""
        return None

    def _gpu_classes(self) -> Mapping[str, GpuClass]:
        """Return the GPU classes with their prices. A class that cannot be read is not sold to us."""
        if self._now() >= self._classes_until:
            items = _items(self._http.read("GET", f"{self._organization}/gpu-classes"), "items")
            found = [_parse(GpuClass, one) for one in items]
            self._classes = {one.id: one for one in found if one is not None}
            self._classes_until = self._now() + CLASSES_LAST_S
        return self._classes

    def _suits(self, kind: GpuClass, usd_per_hour: float, spec: FleetSpec) -> bool:
        """Return True if the document may take the class, so that its free nodes matter."""
        named = not spec.gpu_models or any(names_model(one, kind.gpu_model) for one in spec.gpu_models)
        return named and usd_per_hour <= spec.max_usd_per_hour and kind.vram_gib >= spec.min_vram_gib

    def _offer(self, kind: GpuClass, usd_per_hour: float, countries: list[str]) -> Offer:
        return Offer(
            provider=self.name,
            ref=kind.id,
            repeatable=True,
            gpu_model=kind.gpu_model,
            gpus=kind.gpu_count,
            vram_gib=kind.vram_gib,
            disk_gib=kind.max_storage / 2**30 if kind.max_storage else DISK_GIB,
            spot=self.account.priority != "high",
            regions=countries,
            usd_per_hour=usd_per_hour,
            interruptions_per_hour=INTERRUPTIONS_PER_HOUR[self.account.priority],
            boot_s=BOOT_S,
        )

    def _free_nodes(self, offer: Offer, spec: FleetSpec) -> int:
        """Return an upper bound of the nodes that can run a machine of the offer now."""
        wanted = self._resources(self._gpu_classes()[offer.ref], spec.disk_gib)
        answer = self._http.read(
            "POST",
            f"{self._organization}/availability/sce-gpu-availability",
            body={
                **{name: wanted[name] for name in ("gpu_classes", "cpu", "memory", "storage_amount")},
                **_countries(offer),
            },
        )
        free = _require(answer).get(f"available_gpu_{self.account.priority}", 0)
        return free if isinstance(free, int) else 0

    def _resources(self, kind: GpuClass, disk_gib: float) -> dict[str, Any]:
        memory = _within(MEMORY_MIB, kind.min_ram, kind.max_ram)
        return {
            "cpu": _within(CPUS, kind.min_vcpu, kind.max_vcpu),
            "memory": memory,
            "gpu_classes": [kind.id],
            "shm_size": int(memory * SHM_SHARE),
            "storage_amount": int(max(disk_gib, 1) * 2**30),
        }

    def _body(self, intent: CreateIntent) -> dict[str, Any]:
        """Return the create call. Raises ProviderUnavailable, ProviderRefused if the GPU classes cannot be read."""
        kind = self._gpu_classes().get(intent.offer.ref)
        if kind is None:
            raise ProviderUnavailable(f"Salad no longer sells the GPU class {intent.offer.ref}")
        return {
            "name": intent.token,
            "display_name": intent.token,
            "replicas": 1,
            "restart_policy": "always",
            "autostart_policy": True,
            **_countries(intent.offer),
            "container": {
                "image": intent.image,
                "priority": self.account.priority,
                "resources": self._resources(kind, intent.disk_gib),
                "environment_variables": dict(intent.environment),
                **_registry_authentication(intent),
            },
        }

    def _adopt(self, token: str, body: Mapping[str, Any]) -> CreateResult:
        """Return the group that has the token as its name if it is the one of `body`; refuse another one."""
        try:
            answer = self._http.read("GET", self._group(token))
        except (ProviderUnavailable, ProviderRefused) as error:
            return Ambiguous(reason=f"a group of this name exists, and cannot be read: {error}")
        if not answer.ok or not isinstance(answer.body, dict):
            return Ambiguous(reason=f"a group of this name existed. {problem_of(answer)} when it was read")
        wanted = {**body, "priority": body["container"]["priority"]}
        # Salad shows no login, and the priority elsewhere.
        hidden = ("priority", "registry_authentication")
        wanted["container"] = {key: value for key, value in body["container"].items() if key not in hidden}
        other = _difference(wanted, answer.body)
        if other:
            return NotCreated(
                reason=f"another container group has the name {token} and differs in {other}: nobody but this "
                "deployment may make groups whose names begin with its id; delete the group on Salad's portal"
            )
        return Created(handle=token)

    def _list(self, prefix: str) -> tuple[list[Group], bool]:
        """Return all groups of the project, and True if none with the prefix can be missing."""
        items = _items(self._http.read("GET", self._groups), "items")
        self._listed = len(items)
        groups = [_parse(Group, item) for item in items]
        unread = [item for item, group in zip(items, groups, strict=True) if group is None]
        complete = len(items) < MOST_LISTED and all(_is_foreign(item, prefix) for item in unread)
        return [one for one in groups if one is not None], complete

    def _instances(self, groups: Sequence[Group]) -> dict[str, list[SaladInstance]]:
        """Return the instances by group, up to the first group whose instances cannot be read in time.

        The list of groups says whether a machine exists and is billed; instances add the node and the progress. The
        node of a running instance is kept for a while, because a fleet of many machines would be throttled otherwise.
        """
        found: dict[str, list[SaladInstance]] = {}
        until_s = time.monotonic() + INSTANCES_WITHIN_S
        self._hosts = {one.name: self._hosts[one.name] for one in groups if one.name in self._hosts}
        for group in groups:
            kept, until = self._hosts.get(group.name, (None, 0.0))
            if kept and group.current_state.instance_status_counts.running_count and self._now() < until:
                found[group.name] = [kept]
                continue
            if time.monotonic() > until_s:
                break
            try:
                answer = self._http.read("GET", f"{self._group(group.name)}/instances")
                # A group can end between the two calls.
                items = [] if answer.status == 404 else _items(answer, "instances")
            except (ProviderUnavailable, ProviderRefused):
                break
            found[group.name] = [one for one in (_parse(SaladInstance, item) for item in items) if one is not None]
            # A machine between two nodes runs on neither.
            self._hosts.pop(group.name, None)
            for one in found[group.name]:
                if one.state == "running":
                    self._hosts[group.name] = one, self._now() + HOST_LASTS_S
        return found

    def _sighting(
        self, group: Group, instances: list[SaladInstance] | None, classes: Mapping[str, GpuClass]
    ) -> Sighting:
        state = group.current_state
        alive = sorted(instances or [], key=lambda one: (one.state == "stopping", one.state != "running"))
        runs = state.instance_status_counts.running_count > 0 or any(one.state == "running" for one in alive)
        odd = [quote_unknown(state.status, STATES), *(quote_unknown(one.state, INSTANCE_STATES) for one in alive)]
        unknown = next(filter(None, odd), "")
        ended = f"the container group is {state.status}" + (f": {state.description}" if state.description else "")
        return Sighting(
            token=group.name,
            handle=group.name,
            running=not group.ended,
            # A state that Salad does not document may be billed.
            usd_per_hour=self._price(group, classes) if runs or unknown else 0.0,
            machine_ref=alive[0].machine_id if alive else None,
            message=ended if group.ended else alive[0].message if alive else state.status,
            unknown_status=unknown,
            created_at=int(group.create_time.timestamp()),
        )

    def _price(self, group: Group, classes: Mapping[str, GpuClass]) -> float | None:
        """Return the highest price of the group's classes; None if a class is not listed any more."""
        priority = group.priority or self.account.priority
        kinds = [classes.get(one) for one in group.container.resources.gpu_classes or []]
        prices = [one.usd_per_hour(priority) if one else None for one in kinds]
        known = [one for one in prices if one is not None]
        return max(known) if known and len(known) == len(prices) else None

    def _change(self, method: str, path: str) -> ProviderAnswer:
        """Send a mutating call once. Raises ProviderUnavailable, ProviderRefused."""
        try:
            answer = self._http.send(method, path)
        except (AnswerLost, CallNotSent) as error:
            raise ProviderUnavailable(str(error)) from error
        if answer.status in (401, 403):
            refused = refusal(answer)
            raise ProviderRefused(refused.kind or RefusalKind.PERMISSION, refused.reason)
        if answer.status == 429:
            raise ProviderUnavailable(problem_of(answer))
        return answer

    def _group(self, name: str) -> str:
        return f"{self._groups}/{quoted(name, safe='')}"


def _is_foreign(item: Any, prefix: str) -> bool:
    """Return True for an entry of a list that is certainly no group of ours, although the rest cannot be read."""
    name = item.get("name") if isinstance(item, dict) else None
    return isinstance(name, str) and not name.startswith(prefix)


def _require(answer: ProviderAnswer) -> dict[str, Any]:
    """Return the object of an answer. Raises ProviderRefused for an unknown place, else ProviderUnavailable."""
    if answer.status == 404:
        raise ProviderRefused(RefusalKind.INVALID, refusal(answer).reason)
    if not answer.ok or not isinstance(answer.body, dict):
        raise ProviderUnavailable(problem_of(answer))
    return answer.body


def _items(answer: ProviderAnswer, name: str) -> list[Any]:
    items = _require(answer).get(name)
    if not isinstance(items, list):
        raise ProviderUnavailable(f"the answer has no list {name}")
    return items


def _parse(model: type[Model], value: Any) -> Model | None:
    """Return the value, or None for one that does not have the documented form."""
    try:
        return model.model_validate(value)
    except ValidationError:
        return None


def _difference(wanted: Mapping[str, Any], found: Mapping[str, Any], place: str = "") -> str:
    """Return the first place at which `found` lacks what is wanted; empty if nothing differs.

    An object of variables must be equal, because a further variable changes what the container does.
    """
    for key, value in wanted.items():
        at, there = f"{place}{key}", found.get(key)
        if isinstance(value, Mapping) and isinstance(there, Mapping) and key != "environment_variables":
            if inner := _difference(value, there, f"{at}."):
                return inner
        elif value != there:
            return at
    return ""


def _registry_authentication(intent: CreateIntent) -> dict[str, Any]:
    """Return the field of the login at the image's registry; no field without a login."""
    if intent.login is None:
        return {}
    user, password = intent.login.username, intent.login.password.get_secret_value()
    if registry_of(intent.image or "") == DOCKER_HUB:
        return {"registry_authentication": {"docker_hub": {"username": user, "personal_access_token": password}}}
    return {"registry_authentication": {"basic": {"username": user, "password": password}}}


def _countries(offer: Offer) -> dict[str, list[str]]:
    """Return the field of the countries in which a node may stand; no field for any country."""
    return {"country_codes": [one.lower() for one in offer.regions]} if offer.regions else {}


def _is_variable(value: str) -> bool:
    return 1 <= len(value) <= LONGEST_VALUE and value.splitlines() == [value]


def _within(wanted: int, least: int | None, most: int | None) -> int:
    return max(min(wanted, most or wanted), least or 0)


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
