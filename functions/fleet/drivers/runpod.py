"""Rent pods of RunPod by its REST API v2 (docs.runpod.io/api-reference-v2).

Names of pods are not unique, therefore the list of pods resolves a create whose answer was lost. The interface sells no
interruptible pods, names no host, and lists all pods in one page.
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote as quoted

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.providers import RunpodAccount
from baton.contract.fleets.registries import RegistryLogin, registry_of
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
from functions.fleet.records import Inventory, Offer, Price, Sighting

DISK_USD_PER_GB_HOUR = 0.10 / 730
"""Price of the container disk of a running pod (docs.runpod.io/pods/pricing, 2026-08); the catalog does not name it."""
STOPPED_USD_PER_GB_HOUR = 0.20 / 730
"""Price of the volume of a stopped pod; its container disk is free."""
ENDED = frozenset({"EXITED", "ERROR"})
DELETED = "TERMINATED"
STATUSES = frozenset({"PROVISIONING", "STARTING", "RUNNING", *ENDED, DELETED})
"""Every status of a pod in the description of the interface."""
CONTINENTS = frozenset({"AF", "AP", "EU", "EUR", "ME", "OC", "SA", "SEA"})
"""First words of the ids of data centers that name the country second: `EU-RO-1`, but `US-KS-2`."""
BILLED_DAYS = 400
BOOT_S = 300
"""Time until the agent runs, which is above all the download of an image of some GB."""
LOG_LINES = 500
NO_POD = "batonprobe0000"
"""Id of no pod: a key without write access is refused before that is noticed."""
REFUSALS: dict[int, tuple[RefusalKind | None, str]] = {
    400: (None, "no capacity, or a rule of the provider"),
    401: (RefusalKind.KEY, "store a valid key with `baton fleet login`"),
    402: (RefusalKind.CREDIT, "add credit at RunPod: a pod needs the price of an hour"),
    403: (RefusalKind.PERMISSION, "store a key with read/write access to the REST API with `baton fleet login runpod`"),
    404: (None, "the provider knows no such GPU any more"),
    409: (None, "a conflict with another pod"),
    422: (RefusalKind.INVALID, "the provider no longer accepts this form of request: update Baton"),
    429: (RefusalKind.QUOTA, "the provider throttles its calls"),
}
"""Certain refusals of a create by status, after the table of `POST /v2/pods`, each with cause or remedy."""


class RunpodAnswer(BaseModel):
    """Base of the provider's values, of which the driver reads a part."""

    model_config = ConfigDict(extra="ignore", frozen=True, coerce_numbers_to_str=True)


class GpuPrice(RunpodAnswer):
    """Price in USD per hour of one GPU, by cloud."""

    secure: Price
    community: Price


class DataCenterStock(RunpodAnswer):
    """Data center that has a GPU. An empty id: the provider does not say where the GPU is."""

    id: str
    availability: str


class GpuType(RunpodAnswer):
    """Entry of the catalog. `id`: name of the GPU, as `nvidia-smi` names the GPU on the machine."""

    id: str
    manufacturer: str
    memory: float
    price: GpuPrice
    availability: str = "NONE"
    data_centers: list[DataCenterStock] | None = Field(None, alias="dataCenters")

    def offers(self, cloud: str, disk_gib: float) -> list[Offer]:
        """Return one offer for each data center with stock; none of a GPU that trainings cannot use."""
        price = self.price.secure if cloud == "SECURE" else self.price.community
        if not price or self.manufacturer != "NVIDIA":
            return []
        stock = self.data_centers
        if stock is None:
            stock = [DataCenterStock(id="", availability=self.availability)]
        return [
            Offer(
                provider=RunpodDriver.name,
                ref=f"{self.id}@{one.id}",
                gpu_model=self.id,
                vram_gib=self.memory,
                disk_gib=disk_gib,
                repeatable=True,
                regions=_regions(one.id),
                usd_per_hour=price + _disk_gb(disk_gib) * DISK_USD_PER_GB_HOUR,
                boot_s=BOOT_S,
            )
            for one in stock
            if one.availability != "NONE"
        ]


class PersistentVolume(RunpodAnswer):
    """Disk of a pod that outlives a stop."""

    size: int


class PodMounts(RunpodAnswer):
    """Disks of a pod beside its container disk."""

    persistent: PersistentVolume | None = None


class Pod(RunpodAnswer):
    """Pod, as the list shows it."""

    id: str
    name: str
    status: str
    cost: Price
    disk: int
    created_at: AwareDatetime = Field(alias="createdAt")
    mounts: PodMounts = PodMounts()

    @property
    def ended(self) -> bool:
        """True for a pod that does not run and still exists."""
        return self.status in ENDED

    @property
    def usd_per_hour(self) -> float | None:
        """Price of machine and disk; None while the provider names no price."""
        if self.ended:
            return self.mounts.persistent.size * STOPPED_USD_PER_GB_HOUR if self.mounts.persistent else 0.0
        return self.cost + self.disk * DISK_USD_PER_GB_HOUR if self.cost else None

    def sighting(self) -> Sighting:
        """Return the pod as an entry of an inventory."""
        return Sighting(
            token=self.name,
            handle=self.id,
            running=not self.ended,
            usd_per_hour=self.usd_per_hour,
            message=f"the pod is {self.status}" if self.ended else "",
            unknown_status=quote_unknown(self.status, STATUSES),
            created_at=int(self.created_at.timestamp()),
        )


class StoredRegistry(RunpodAnswer):
    """Login at a container registry that the account keeps."""

    id: str
    name: str


class PodCharge(RunpodAnswer):
    """Record of the provider's bill for one pod and one day."""

    pod: str = Field(alias="podId")
    usd: Price = Field(alias="totalAmount")


class RunpodDriver:
    """Driver of RunPod. now: unused, since the provider's answers carry all times."""

    name = "runpod"
    min_interval_s: Mapping[str, float] = {}

    def __init__(self, account: RunpodAccount, *, now: Callable[[], float], timeout_s: float = TIMEOUT_S) -> None:
        self._cloud = account.cloud
        self._address = account.address
        key = account.api_key.get_secret_value()
        self._key = key.encode()
        self._http = ProviderHttp(account.address, {"Authorization": f"Bearer {key}"}, timeout_s=timeout_s)

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        """Return one offer for each GPU and data center with stock, at the price of GPU and disk."""
        return self._offers(spec.disk_gib)

    def create(self, intent: CreateIntent) -> CreateResult:
        """Create a pod with the token as its name, unless its price of the moment exceeds the cap.

        RunPod takes no cap with a create. Its answer names the price, by which the controller ends a dearer pod.
        """
        gpu_id, _, place = intent.offer.ref.partition("@")
        body = {
            "name": intent.token,
            "image": intent.image,
            "gpu": {"id": gpu_id, "count": intent.offer.gpus},
            "cloud": self._cloud,
            "disk": _disk_gb(intent.disk_gib),
            "env": dict(intent.environment),
            "dataCenterIds": [place] if place else [],
            **({"ports": [f"{intent.port}/tcp"]} if intent.port else {}),
        }
        try:
            if intent.login is not None:
                body["registry"] = self._registry(intent, intent.login)
        except (ProviderRefused, ProviderUnavailable, ValidationError) as error:
            kind = error.kind if isinstance(error, ProviderRefused) else None
            return NotCreated(reason=f"RunPod cannot keep the login at the image's registry: {error}", kind=kind)
        # As late as possible, because the price can rise until the create.
        if (refused := self._refuse_price(intent)) is not None:
            return refused
        try:
            answer = self._http.send("POST", "/pods", body=body)
        except CallNotSent as error:
            return NotCreated(reason=str(error))
        except AnswerLost as error:
            return Ambiguous(reason=str(error))
        if answer.status == 403 and self._may_write():
            # The provider documents 403 also for a pool of machines that the account may not use.
            cause = "the account has no access to this GPU: name others in gpu_models, or ask RunPod"
            return NotCreated(reason=f"{RefusalKind.PERMISSION}: RunPod answers {_problem(answer)}: {cause}")
        if answer.status in REFUSALS:
            kind, cause = REFUSALS[answer.status]
            return NotCreated(reason=f"RunPod answers {_problem(answer)}: {cause}", kind=kind)
        try:
            if answer.status != 201:
                return Ambiguous(reason=f"POST /pods was answered {answer.status}")
            pod = Pod.model_validate(answer.body)
        except ValidationError as error:
            return Ambiguous(reason=f"POST /pods: unreadable answer: {error.errors()[0]['msg']}")
        return Created(handle=pod.id, usd_per_hour=pod.usd_per_hour)

    def inventory(self, prefix: str, now: int) -> Inventory:
        """List the pods of this deployment. A pod without the fields of a pod makes the inventory incomplete."""
        pods, complete = self._pods()
        ours = [one.sighting() for one in pods if one.name.startswith(prefix)]
        return Inventory(provider=self.name, at=now, complete=complete, sightings=ours)

    def destroy(self, handle: str) -> bool:
        """Delete a pod with its disks."""
        self._change("DELETE", f"/pods/{quoted(handle, safe='')}")
        return True

    def accept_price(self, handle: str, usd_per_hour: float) -> None:
        """Do nothing, because RunPod announces no prices."""

    def logs(self, handle: str) -> str | None:
        """Return the last lines of the container; the provider streams them as server-sent events."""
        query = {"source": "container", "tail": LOG_LINES}
        answer = self._http.read_stream(f"/pods/{quoted(handle, safe='')}/logs", query=query)
        if answer.status == 404:
            return None
        if not answer.ok:
            raise ProviderUnavailable(f"GET /pods/{{id}}/logs: {_problem(answer)}")
        events = [line.partition(":")[2] for line in answer.text.splitlines() if line.startswith("data:")]
        return "\n".join(_line(event) for event in events) or None

    def ssh_target(self, handle: str) -> SshTarget | None:
        """Return None, because the agent's image starts no SSH server."""
        return None

    def examine(self, prefix: str) -> AccountReport:
        """Report pods of others, stopped pods of this deployment, and what the key may not do."""
        pods, complete = self._pods()
        problems = [] if complete else ["the list of pods has an unreadable entry: update Baton"]
        if not self._may_write():
            problems.append(f"no pod can be rented or given back: {REFUSALS[403][1]}")
        try:
            self._charges({"lastN": 1})
        except ProviderRefused as error:
            problems.append(f"receipts will lack the provider's charge: {error}")
        return AccountReport(
            account=f"{self._address} ({self._cloud})",
            problems=problems,
            foreign=[one.sighting() for one in pods if not one.name.startswith(prefix)],
            leftovers=[
                Leftover(kind="stopped pod", handle=one.id, token=one.name, usd_per_hour=one.usd_per_hour)
                for one in pods
                if one.name.startswith(prefix) and one.ended
            ],
        )

    def remove_leftover(self, leftover: Leftover) -> None:
        """Delete a stopped pod."""
        self.destroy(leftover.handle)

    def charged_usd(self, handle: str) -> float | None:
        """Return the sum of the daily records of a pod; None before the first record."""
        charges = self._charges({"lastN": BILLED_DAYS, "bucketSize": "day", "podId": handle})
        ours = [one.usd for one in charges if one.pod == handle]
        return sum(ours) if ours else None

    def _registry(self, intent: CreateIntent, login: RegistryLogin) -> str:
        """Return the id of the login at RunPod, stored there in place of an earlier one of this registry.

        RunPod shows neither user nor password again; therefore a keyed digest in the name tells a changed login. Raises
        ProviderUnavailable, ProviderRefused.
        """
        password = login.password.get_secret_value()
        ours = f"{intent.token.partition('-')[0]}-{registry_of(intent.image or '')}-"
        digest = hmac.digest(self._key, f"{login.username}\n{password}".encode(), "sha256").hex()[:16]
        stored = [StoredRegistry.model_validate(one) for one in self._list("/registries", "registries", None)]
        found = next((one.id for one in stored if one.name == ours + digest), None)
        if found is not None:
            return found
        answer = self._change(
            "POST", "/registries", {"name": ours + digest, "username": login.username, "password": password}, password
        )
        made = StoredRegistry.model_validate(answer.body)
        for one in stored:
            if one.name.startswith(ours):
                # RunPod keeps a login that a pod uses; the next change of the login deletes it.
                with suppress(ProviderUnavailable):
                    self._change("DELETE", f"/registries/{quoted(one.id, safe='')}")
        return made.id

    def _change(self, method: str, path: str, body: Any = None, secret: str = "") -> ProviderAnswer:
        """Send a mutating call once. Raises ProviderUnavailable, ProviderRefused."""
        try:
            answer = self._http.send(method, path, body=body, secret=secret)
        except (AnswerLost, CallNotSent) as error:
            raise ProviderUnavailable(str(error)) from error
        kind, cause = REFUSALS.get(answer.status, (None, ""))
        if kind is RefusalKind.KEY or answer.status == 403:
            raise ProviderRefused(kind or RefusalKind.PERMISSION, f"{method} {path}: {_problem(answer)}: {cause}")
        if not answer.ok and answer.status != 404:
            raise ProviderUnavailable(f"{method} {path}: {_problem(answer)}")
        return answer

    def _charges(self, query: Mapping[str, Any]) -> list[PodCharge]:
        return [PodCharge.model_validate(one) for one in self._list("/billing/pods", "records", query)]

    def _may_write(self) -> bool:
        """Return False if the key may not create and delete pods."""
        try:
            return self._http.send("DELETE", f"/pods/{NO_POD}").status != 403
        except (AnswerLost, CallNotSent):
            return True

    def _offers(self, disk_gib: float) -> list[Offer]:
        query = {"include": "AVAILABILITY", "product": "POD", "cloud": self._cloud}
        found = [GpuType.model_validate(one) for one in self._list("/catalog/gpus", "gpus", query)]
        return [offer for gpu in found for offer in gpu.offers(self._cloud, disk_gib)]

    def _refuse_price(self, intent: CreateIntent) -> NotCreated | None:
        """Return why the present price forbids the create; None for a price within the cap."""
        try:
            offers = self._offers(intent.disk_gib)
        except ProviderRefused as error:
            return NotCreated(reason=str(error), kind=error.kind)
        except (ProviderUnavailable, ValidationError) as error:
            return NotCreated(reason=f"the price cannot be read again before the create: {error}")
        price = next((one.usd_per_hour for one in offers if one.ref == intent.offer.ref), None)
        if price is None:
            return NotCreated(reason=f"RunPod no longer has the GPU: {intent.offer.ref}")
        if price <= intent.max_usd_per_hour:
            return None
        cap = f"more than the cap of {intent.max_usd_per_hour:g} USD/h"
        return NotCreated(reason=f"{intent.offer.ref} costs {price:.4g} USD/h now, {cap}")

    def _pods(self) -> tuple[list[Pod], bool]:
        """Return the existing pods, and False if an entry of the list is not readable."""
        pods: list[Pod] = []
        complete = True
        for one in self._list("/pods", "pods", None):
            try:
                pods.append(Pod.model_validate(one))
            except ValidationError:
                complete = False
        return [one for one in pods if one.status != DELETED], complete

    def _list(self, path: str, field: str, query: Mapping[str, Any] | None) -> list[Any]:
        answer = self._http.read("GET", path, query=query)
        found = answer.body.get(field) if answer.ok and isinstance(answer.body, dict) else None
        if not isinstance(found, list):
            raise ProviderUnavailable(f"GET {path}: {_problem(answer)}: the answer has no list {field!r}")
        return found


def _regions(place: str) -> list[str]:
    """Return the id of a data center and its country: `EU-RO-1` stands in RO, `US-KS-2` in US."""
    words = place.split("-")
    if not place:
        return []
    country = words[1] if words[0] in CONTINENTS and len(words) > 1 else words[0]
    return [place, country]


def _disk_gb(disk_gib: float) -> int:
    """Return the size of a container disk in GB, as RunPod counts."""
    return math.ceil(disk_gib * 2**30 / 10**9)


def _line(event: str) -> str:
    """Return the text of one log event; the event itself if its form is unknown."""
    try:
        found = json.loads(event)
    except ValueError:
        return event.strip()
    return str(found.get("line", "")) if isinstance(found, dict) else event.strip()


def _problem(answer: ProviderAnswer) -> str:
    """Return status and detail of a problem document, in one line."""
    detail = answer.body.get("detail", "") if isinstance(answer.body, dict) else answer.text
    return f"{answer.status} {' '.join(str(detail).split())[:200]}".strip()
