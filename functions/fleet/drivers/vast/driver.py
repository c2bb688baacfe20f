"""Rent instances of Vast.ai: asks of hosts, on demand or by a bid.

A create has no idempotency key. Therefore the label carries the token, a create is sent once, and the list of instances
resolves a create whose answer was lost.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote as quoted
from urllib.parse import urlsplit

from pydantic import ValidationError

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.providers import VastAccount
from baton.contract.fleets.registries import registry_of
from functions.domain.jobs.job_selection import names_model
from functions.fleet.drivers.protocol import (
    AccountReport,
    Ambiguous,
    CreateIntent,
    CreateResult,
    Leftover,
    NotCreated,
    ProviderRefused,
    ProviderThrottled,
    ProviderUnavailable,
    RefusalKind,
    SshTarget,
)
from functions.fleet.drivers.provider_http import TIMEOUT_S, AnswerLost, CallNotSent, ProviderAnswer, ProviderHttp
from functions.fleet.drivers.vast.answers import NEW_KEY, accepted, outcome, problem_of
from functions.fleet.drivers.vast.wire import (
    PROVIDER,
    Ask,
    Charge,
    Instance,
    PriceIncrease,
    User,
    disk_gb,
    gpu_model,
    search_body,
)
from functions.fleet.records import Inventory, Offer

T = TypeVar("T")

logger = logging.getLogger("baton.fleet")

PAGE = 25
LONGEST_LIST = 40
"""Pages of the longest list that is read."""
LIST_INTERVAL_S = 1.0
"""Least time between two pages, or two lists; Vast.ai answers 429 to an earlier one."""
OFFERS = 200
"""Offers of one search."""
CHARGED_DAYS = 370
CHARGES = 500
"""Newest contracts among which a charge is looked up."""
CHARGES_KEPT_S = 30
"""Time for which the charges serve all machines that end together; Vast.ai refuses a second call within 1 s."""
ANNOUNCED_AHEAD_S = 3600
"""Time before the end of a contract from which the host's next price counts. Until the end, the old price holds."""
LOG_LINES = "1000"
LOG_WAIT_S = 120
"""Time after which a log that did not come is requested anew."""
ENROLMENT_TOKEN = re.compile(r"baton_[\w-]+")
BAD_LOGIN = (
    "the login at the image's registry has a character that Vast.ai cannot carry: store a user and a token of letters, "
    "digits and @%+=:,./-_ with `baton fleet login`"
)


class VastDriver:
    """Driver of Vast.ai.

    pause: waits before a page that would come too early, by seconds. The controller cannot wait there, because a list
    is complete only if all of its pages are.
    """

    name = PROVIDER
    min_interval_s: Mapping[str, float] = {"create": 4.5, "destroy": 3.0, "quote": 12.0}

    def __init__(
        self,
        account: VastAccount,
        *,
        now: Callable[[], float],
        timeout_s: float = TIMEOUT_S,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        key = account.api_key.get_secret_value()
        self._http = ProviderHttp(account.address, {"Authorization": f"Bearer {key}"}, timeout_s=timeout_s)
        self._scheme = urlsplit(account.address).scheme
        self._timeout_s = timeout_s
        self._now = now
        self._pause = pause
        self._gpu_names: list[str] | None = None
        self._listed_at = -math.inf
        """Time of the last page of a list."""
        self._charged: tuple[float, list[Charge]] = -math.inf, []
        """Charges of the account, and the time of the call."""
        self._logs: dict[str, tuple[float, str]] = {}
        """Requested logs by handle: time of the request, address of the text."""

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        """Return verified hosts with an ask within the cap, of each market that the fleet permits."""
        names = self._names_of(spec.gpu_models)
        if spec.gpu_models and names == []:
            return []
        markets = [bid for bid, name in ((False, "on-demand"), (True, "spot")) if spec.market in (name, "either")]
        return [offer for bid in markets for offer in self._search(spec, bid, names or [])]

    def create(self, intent: CreateIntent) -> CreateResult:
        """Rent an ask with the token as the label."""
        ask, _, bid = intent.offer.ref.partition("@")
        if intent.offer.usd_per_hour > intent.max_usd_per_hour:
            return NotCreated(reason=f"the offer costs {intent.offer.usd_per_hour:g} USD/h, more than the cap")
        login = image_login(intent)
        if login is None:
            return NotCreated(reason=BAD_LOGIN, kind=RefusalKind.IMAGE)
        body = {
            "client_id": "me",
            "image": intent.image,
            "disk": disk_gb(intent.disk_gib),
            "label": intent.token,
            # An option of Docker among the variables: a port of the host's address leads to this one.
            "env": {**intent.environment, **({f"-p {intent.port}:{intent.port}": "1"} if intent.port else {})},
            "runtype": "args",
            "target_state": "running",
            "cancel_unavail": True,
            **({"price": float(bid)} if bid else {}),
            **({"image_login": login} if login else {}),
        }
        password = intent.login.password.get_secret_value() if intent.login else ""
        try:
            answer = self._http.send("PUT", f"/api/v0/asks/{quoted(ask, safe='')}/", body=body, secret=password)
        except CallNotSent as error:
            return NotCreated(reason=str(error))
        except AnswerLost as error:
            return Ambiguous(reason=str(error))
        return outcome(answer)

    def inventory(self, prefix: str, now: int) -> Inventory:
        """List the instances whose label begins with the prefix, with the prices that their hosts ask for."""
        rows, complete = self._instances()
        ours = [one for one in rows if one.token.startswith(prefix)]
        increases = self._announced() if ours else {}
        return Inventory(
            provider=self.name,
            at=now,
            complete=complete,
            sightings=[
                one.sighting(increases[one.id].usd_per_hour(one.dph_total or 0.0) if one.id in increases else None)
                for one in ours
            ],
        )

    def destroy(self, handle: str) -> bool:
        """Destroy an instance with its data. Raises ProviderUnavailable, ProviderRefused."""
        answer = self._send("DELETE", f"/api/v0/instances/{quoted(handle, safe='')}/", {})
        if answer.status == 404 and "auth_error" not in answer.text:
            return True
        return accepted(answer, "DELETE /api/v0/instances")

    def accept_price(self, handle: str, usd_per_hour: float) -> None:
        """Accept the host's price, which extends the contract; do nothing if the host meanwhile wants more.

        Raises ProviderUnavailable, ProviderRefused.
        """
        increase = self._announced().get(int(handle))
        row = self._object("GET", f"/api/v0/instances/{handle}/", {"owner": "me"}).get("instances")
        if increase is None or row is None:
            return
        wanted = increase.usd_per_hour(Instance.model_validate(row).dph_total or 0.0)
        if wanted > usd_per_hour + 1e-6:
            logger.info(
                "vast: instance %s now asks for %g USD/h, more than the accepted %g", handle, wanted, usd_per_hour
            )
            return
        path = "/api/v0/instances/accept-price-increase/"
        body = {"pending_price_increase_id": increase.pending_price_increase_id}
        answer = self._send("PUT", path, body)
        if answer.status not in (404, 409):  # The host has withdrawn the request.
            accepted(answer, f"PUT {path}")

    def logs(self, handle: str) -> str | None:
        """Return the container's last lines. Vast.ai collects them after the first call; a later call returns them."""
        asked_at, address = self._logs.get(handle, (0.0, ""))
        if not address or self._now() > asked_at + LOG_WAIT_S:
            address = self._request_log(handle)
            if not address:
                return None
            self._logs[handle] = self._now(), address
        parts = urlsplit(address)
        # Without the account's key: the address leads to an object store and is signed by itself.
        store = ProviderHttp(f"{parts.scheme}://{parts.netloc}", {}, timeout_s=self._timeout_s)
        text = store.read_stream(f"{parts.path}?{parts.query}")
        if not text.ok:
            return None
        self._logs.pop(handle, None)
        return ENROLMENT_TOKEN.sub("[token]", text.text)

    def ssh_target(self, handle: str) -> SshTarget | None:
        """Return None, because instances that keep the image's entry point have no SSH server."""
        return None

    def examine(self, prefix: str) -> AccountReport:
        """Report the account, the permissions of the key, instances of others, and stopped instances that bill disk."""
        problems: list[str] = []
        user = self._probe("user_read", "the balance is unknown", self._user, problems)
        rows, complete = self._probe("instance_read", "no machine is found", self._instances, problems) or ([], False)
        self._probe("misc", "no offer is found", lambda: self._search_page({"limit": 1}), problems)
        self._probe("billing_read", "receipts lack the provider's charge", lambda: self._charges(1), problems)
        # Instance 0 never exists: a key without the permission is refused before that is noticed.
        if self._send("PUT", "/api/v0/instances/0/", {"label": ""}).status == 403:
            problems.append(f"the key lacks instance_write: no machine can be rented or given back; {NEW_KEY}")
        hosted = self._probe(
            "machine_read", "", lambda: self._http.read("GET", "/api/v0/machines/", query={"owner": "me"}), []
        )
        if hosted is not None and hosted.ok:
            problems.append(f"the key has more permissions than a fleet needs, at least machine_read: {NEW_KEY}")
        if user is not None and user.credit is not None and user.credit <= 0:
            problems.append("the account has no credit: add credit at cloud.vast.ai/billing")
        if rows and not complete:
            problems.append("the list of instances could not be read to its end: examine the account again")
        return AccountReport(
            account="Vast.ai" if user is None else user.email or f"user {user.id}",
            balance_usd=None if user is None else user.credit,
            problems=problems,
            foreign=[one.sighting() for one in rows if not one.token.startswith(prefix)],
            leftovers=[
                Leftover(kind="stopped instance", handle=str(one.id), token=one.token, usd_per_hour=one.usd_per_hour)
                for one in rows
                if one.token.startswith(prefix) and one.end
            ],
        )

    def remove_leftover(self, leftover: Leftover) -> None:
        """Destroy a stopped instance."""
        self.destroy(leftover.handle)

    def charged_usd(self, handle: str) -> float | None:
        """Return the charges of an instance, GPU, disk and traffic together; None without a record."""
        if self._now() - self._charged[0] > CHARGES_KEPT_S:
            self._charged = self._now(), self._charges(CHARGED_DAYS)
        ours = [one.amount for one in self._charged[1] if one.source == f"instance-{handle}"]
        return sum(ours) if ours else None

    def _request_log(self, handle: str) -> str:
        """Return the address at which the instance's log will lie; empty for an instance that is gone."""
        path = f"/api/v0/instances/request_logs/{quoted(handle, safe='')}/"
        answer = self._http.read("PUT", path, body={"tail": LOG_LINES})
        if answer.status == 404:
            return ""
        address = answer.body.get("result_url") if answer.ok and isinstance(answer.body, dict) else None
        if not isinstance(address, str) or urlsplit(address).scheme != self._scheme:
            raise ProviderUnavailable(f"PUT {path}: {problem_of(answer)}: the answer has no usable result_url")
        return address

    def _names_of(self, wanted: Sequence[str]) -> list[str] | None:
        """Return Vast.ai's names of the wanted GPUs; None if Vast.ai does not name its GPUs."""
        if not wanted:
            return None
        if self._gpu_names is None:
            answer = self._http.read("GET", "/api/v0/gpu_names/unique/")
            found = answer.body.get("gpu_names") if answer.ok and isinstance(answer.body, dict) else None
            if not isinstance(found, list):
                logger.info("vast: the list of GPU names cannot be read: %s", problem_of(answer))
                return None
            self._gpu_names = [str(one) for one in found]
        return [name for name in self._gpu_names if any(names_model(one, gpu_model(name)) for one in wanted)]

    def _search(self, spec: FleetSpec, bid: bool, names: list[str]) -> list[Offer]:
        offers, bad = [], []
        for row in self._search_page(search_body(spec, bid=bid, gpu_names=names, limit=OFFERS)):
            try:
                offers.append(Ask.model_validate(row).offer(spec, self._now(), bid=bid))
            except ValidationError as error:
                bad.append(str(error.errors()[0]))
        if bad:
            logger.warning(
                "vast: %d of %d offers are unreadable, the first: %s", len(bad), len(bad) + len(offers), bad[0]
            )
            if not offers:
                raise ProviderUnavailable(f"no offer is readable: {bad[0]}")
        return offers

    def _search_page(self, body: Mapping[str, Any]) -> list[Any]:
        answer = self._http.read("POST", "/api/v0/bundles/", body=body)
        if answer.status == 404:
            raise ProviderRefused(RefusalKind.KEY, f"the search was answered {problem_of(answer)}; {NEW_KEY}")
        found = answer.body.get("offers") if answer.ok and isinstance(answer.body, dict) else None
        if isinstance(found, dict):
            found = [found]
        if not isinstance(found, list):
            raise ProviderUnavailable(f"POST /api/v0/bundles/: {problem_of(answer)}: the answer has no list of offers")
        return found

    def _instances(self) -> tuple[list[Instance], bool]:
        """Return the account's instances, and False if a page, a row, or a counted instance is missing."""
        rows: dict[int, Instance] = {}
        complete, token = True, None
        for number in range(LONGEST_LIST):
            if self._now() <= self._listed_at + LIST_INTERVAL_S:  # The clock may count whole seconds.
                self._pause(LIST_INTERVAL_S)
            self._listed_at = self._now()
            query = {"limit": PAGE, "order_by": json.dumps([{"col": "id", "dir": "asc"}])}
            try:
                page = self._page(query | ({"after_token": token} if token else {}))
                listed = page.get("instances")
                if not isinstance(listed, list):
                    raise ProviderUnavailable("GET /api/v1/instances/: the answer has no list of instances")
            except (ProviderUnavailable, ProviderRefused) as error:
                if number == 0:
                    raise
                logger.warning("vast: page %d of the list is missing: %s", number + 1, error)
                return list(rows.values()), False
            for row in listed:
                try:
                    one = Instance.model_validate(row)
                except ValidationError as error:
                    logger.warning("vast: a row of the list is unreadable: %s", error.errors()[0])
                    complete = False
                else:
                    rows[one.id] = one
            token = page.get("next_token")
            if not token:
                total = page.get("total_instances")
                if isinstance(total, int) and total > len(rows):
                    logger.warning("vast: the list has %d of %d instances", len(rows), total)
                    complete = False
                return list(rows.values()), complete
        return list(rows.values()), False

    def _page(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """Read a page of the list, a second time if another process has read one a moment ago.

        An interval that the store keeps, as for the other calls, would cost each tick a write.
        """
        try:
            return self._object("GET", "/api/v1/instances/", query)
        except ProviderThrottled:
            self._pause(LIST_INTERVAL_S)
            self._listed_at = self._now()
            return self._object("GET", "/api/v1/instances/", query)

    def _announced(self) -> dict[int, PriceIncrease]:
        """Return the requests for a higher price that soon holds, by instance; none if they cannot be read now."""
        try:
            page = self._object("GET", "/api/v0/instances/pending-price-increases/", {})
            found = [PriceIncrease.model_validate(one) for one in page.get("pending_price_increases") or []]
        except (ProviderUnavailable, ProviderRefused, ValidationError) as error:
            logger.warning("vast: announced prices cannot be read: %s", error)
            return {}
        soon = self._now() + ANNOUNCED_AHEAD_S
        return {one.contract_id: one for one in found if (one.contract_end_date or 0.0) <= soon}

    def _charges(self, days: int) -> list[Charge]:
        until = int(self._now()) + 86_400
        filters = {"day": {"gte": until - (days + 1) * 86_400, "lte": until}, "type": {"in": ["instance"]}}
        query = {"select_filters": json.dumps(filters), "latest_first": "true", "limit": CHARGES, "format": "table"}
        return [
            Charge.model_validate(one) for one in self._object("GET", "/api/v0/charges/", query).get("results") or []
        ]

    def _user(self) -> User:
        return User.model_validate(self._object("GET", "/api/v0/users/current/", {"owner": "me"}))

    def _probe(self, permission: str, without: str, call: Callable[[], T], problems: list[str]) -> T | None:
        """Return the call's result; None, and a problem with its remedy, if the key lacks the permission."""
        try:
            return call()
        except ProviderRefused as error:
            if error.kind is not RefusalKind.PERMISSION:
                raise
            problems.append(f"the key lacks {permission}: {without}; {NEW_KEY}")
            return None

    def _object(self, method: str, path: str, query: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._http.read(method, path, query=query)
        if not answer.ok or not isinstance(answer.body, dict):
            raise ProviderUnavailable(f"{method} {path}: {problem_of(answer)}")
        return answer.body

    def _send(self, method: str, path: str, body: Mapping[str, Any]) -> ProviderAnswer:
        try:
            answer = self._http.send(method, path, body=body)
        except (AnswerLost, CallNotSent) as error:
            raise ProviderUnavailable(str(error)) from error
        if answer.status == 401:
            raise ProviderRefused(RefusalKind.KEY, f"{method} {path}: {problem_of(answer)}; {NEW_KEY}")
        return answer


def image_login(intent: CreateIntent) -> str | None:
    """Return the options of `docker login` for the image; empty without a login, None for one that needs quotes."""
    if intent.login is None:
        return ""
    options = intent.login.username, intent.login.password.get_secret_value()
    if any(shlex.quote(one) != one for one in options):
        return None
    return "-u {} -p {} {}".format(*options, registry_of(intent.image or ""))
