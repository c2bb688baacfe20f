"""Serve Vast.ai's API: keys with permissions, least intervals between calls, asks, instances, charges and logs.

Each call answers as the live service does, also where that is surprising: a taken ask has three different errors, a bid
that is too low leaves a stopped contract, a fresh instance is listed late, and 429 is plain text without `Retry-After`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from fakes.server import FakeAnswer, FakeCall, FakeProvider
from fakes.vast.create_body import checked_body
from fakes.vast.instances import NEVER, OCI_ERROR, FakeInstance, Status
from fakes.vast.market import CONTRACT_S, BadRequest, FakeAsk, search
from fakes.vast.paging import page

KEY = "vast-account-key"
PERMISSIONS = frozenset({"instance_read", "instance_write", "misc", "billing_read", "user_read"})
"""Permissions of KEY. A key with `machine_read` can do more than a fleet needs."""
SEARCHES_PER_MINUTE = 10
INTERVALS_S: Mapping[str, float] = {
    "create": 4.5,
    "destroy": 3.0,
    "show": 2.0,
    "list": 1.0,
    "state": 1.0,
    "charges": 1.0,
}
GONE = (
    (404, "no_such_ask", "error 404/3603: no_such_ask Instance type by id {id} is not available."),
    (400, "invalid_args", "error 404/3603: no_such_ask Instance type by id {id} is not available."),
    (410, "no_such_ask", "error 410/3907: no_such_ask {id}"),
)
Handler = Callable[["FakeVast", FakeCall, str], FakeAnswer]
Route = tuple[str, re.Pattern[str], str, str, Handler]
ROUTES: list[Route] = []
"""Method, path, permission, name of the interval, handler. The first that fits answers."""


def _route(method: str, path: str, permission: str, name: str) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        ROUTES.append((method, re.compile(f"/api/{path}/?"), permission, name, handler))
        return handler

    return add


class FakeVast(FakeProvider):
    """The service with one account.

    asks: what hosts sell; 20 asks of RTX 4090, the cheapest first, unless the test gives others.
    """

    def __init__(self, now: Callable[[], float], asks: list[FakeAsk] | None = None) -> None:
        super().__init__(now)
        self.asks = [_ask(at) for at in range(20)] if asks is None else asks
        self.instances: list[FakeInstance] = []
        self.keys: dict[str, frozenset[str]] = {KEY: PERMISSIONS}
        self.credit = 100.0
        self.spend_limited = False
        self.hides_search = False
        """A search with a bad key answers 404, as the reference says, in place of 401."""
        self.boot_s = 60.0
        self.fails_to_start = False
        """The next containers fail in the OCI runtime."""
        self.visible_after_s = 5.0
        """Lag of the lists behind the next creates."""
        self.log_after_s = 1.0
        self.intervals_s = dict(INTERVALS_S)
        self.snatched = 0
        """Next creates whose ask another renter took a moment ago."""
        self.ignored_destroys = 0
        """Next destroys that are accepted without an effect."""
        self.listed_after_destroy = 0
        """Polls of the list that still show an instance after its destroy."""
        self.broken_pages = 0
        """Next pages after the first that fail."""
        self.unreadable_rows = 0
        """Next polls of the list in which a row has no id."""
        self.increases: dict[int, tuple[FakeInstance, float]] = {}
        """Price increases that a host asks for: instance and GPU price by the id of the request."""
        self._called: dict[str, list[float]] = {}
        self._results: dict[str, tuple[float, str]] = {}
        self._ids = count(7_000_001)
        self._refusals = count()

    # Events that hosts, other renters and containers cause.

    def instance(self, handle: str) -> FakeInstance:
        """Return an instance that exists."""
        return next(one for one in self.instances if one.handle == handle and not one.destroyed)

    def labels(self) -> list[str]:
        """Return the labels of the instances that exist."""
        return [one.body.get("label") or "" for one in self.instances if not one.destroyed]

    def set_status(self, handle: str, status: Status, message: str = "") -> None:
        """Put an instance into a status, and bill accordingly."""
        instance = self.instance(handle)
        instance.forced, instance.message = status, message
        instance.bill(self.meter)

    def outbid(self, handle: str) -> None:
        """Stop an interruptible instance for another renter."""
        self.instance(handle).state = "stopped"
        self.set_status(handle, "stopped")

    def win_back(self, handle: str) -> None:
        """Resume an outbid instance, because its bid is the highest again."""
        self.instance(handle).state = "running"
        self.set_status(handle, "running")

    def transfer(self, handle: str, gb: float) -> None:
        """Bill traffic of an instance."""
        self.meter.add(handle, "bandwidth_download", gb * self.instance(handle).ask.inet_cost)

    def raise_price(self, handle: str, gpu_usd_per_hour: float) -> int:
        """Let the host ask for a higher price from the end of the contract on; return the id of the request."""
        request = next(self._ids)
        self.increases[request] = self.instance(handle), gpu_usd_per_hour
        return request

    def settle(self) -> None:
        """Stop what has reached the end of its contract, and everything once the credit is used up."""
        for one in self.instances:
            one.settle(self.meter)
            if not one.destroyed and one.state != "stopped" and self.meter.usd() >= self.credit:
                self.outbid(one.handle)

    # Calls.

    def answer(self, call: FakeCall) -> FakeAnswer:
        """Carry out one call."""
        if call.path.startswith("/results/"):
            return self._result(call)
        self.settle()
        if (call.method, call.path) == ("GET", "/api/v0/gpu_names/unique/"):
            return FakeAnswer(200, {"gpu_names": sorted({one.gpu_name for one in self.asks})})
        for method, path, permission, name, handler in ROUTES:
            found = path.fullmatch(call.path)
            if method != call.method or found is None:
                continue
            target = found.group(1) if found.groups() else ""
            refusal = self._authorise(call, permission, target, name) or self._throttle(call, name)
            if refusal is not None:
                return refusal
            if call.raw and not call.headers.get("content-type", "").startswith("application/json"):
                return error(400, "invalid_args", "Content-Type is not application/json")
            try:
                return handler(self, call, target)
            except BadRequest as bad:
                return error(400, bad.code, str(bad))
            except ValueError as bad:
                return error(400, "invalid_args", f"the body is not JSON: {bad}")
        return error(404, "not_found", f"no route {call.method} {call.path}")

    def refused(self) -> FakeAnswer:
        """Answer to an unknown key."""
        return error(401, "auth_error", "Invalid user key")

    def _authorise(self, call: FakeCall, permission: str, target: str, name: str) -> FakeAnswer | None:
        key = call.headers.get("authorization", "").removeprefix("Bearer ")
        owner = next((one for one in self.instances if one.container_key == key and not one.destroyed), None)
        if owner is not None:
            own = owner.handle == target and name in ("destroy", "state")
            return None if own else error(403, "not_authorized", "this key may only manage its own instance")
        if key not in self.keys:
            return error(404, "not_found", "no such user") if name == "search" and self.hides_search else self.refused()
        if permission not in self.keys[key]:
            return error(403, "not_authorized", f"the key lacks {permission}")
        return None

    def _throttle(self, call: FakeCall, name: str) -> FakeAnswer | None:
        now, earlier = self.now(), self._called.setdefault(name, [])
        if name == "search":
            earlier[:] = [at for at in earlier if now - at < 60]
            if "search" in self.intervals_s and len(earlier) >= SEARCHES_PER_MINUTE:
                return self.throttled()
        elif earlier and now - earlier[-1] < self.intervals_s.get(name, 0.0):
            return FakeAnswer(429, f"API requests too frequent: endpoint threshold={self.intervals_s[name]}")
        earlier.append(now)
        return None

    def _result(self, call: FakeCall) -> FakeAnswer:
        """Answer as the object store that keeps logs: it knows no key of ours, and refuses a second way to sign."""
        if "authorization" in call.headers:
            return FakeAnswer(400, "<Error><Code>InvalidArgument</Code></Error>")
        ready_at, text = self._results.get(call.path, (NEVER, ""))
        if self.now() < ready_at:
            return FakeAnswer(404, "<Error><Code>NoSuchKey</Code></Error>")
        return FakeAnswer(200, text)

    def find(self, handle: str) -> FakeInstance | None:
        """Return an instance that exists and has become visible."""
        return next((one for one in self.instances if one.handle == handle and self._visible(one)), None)

    def _visible(self, one: FakeInstance) -> bool:
        return not one.destroyed and self.now() >= one.visible_at

    def listed(self) -> list[dict[str, Any]]:
        """Return the rows of one poll of the list."""
        shown = [one for one in self.instances if self._visible(one) or one.still_listed]
        for one in shown:
            one.still_listed = max(0, one.still_listed - 1)
        return [one.row(self.now()) for one in shown]

    @_route("POST", "v0/bundles", "misc", "search")
    def _search(self, call: FakeCall, target: str) -> FakeAnswer:
        return FakeAnswer(200, {"offers": search(self.asks, call.json(), self.now())})

    @_route("PUT", "v0/search/asks", "misc", "search")
    def _search_older(self, call: FakeCall, target: str) -> FakeAnswer:
        return FakeAnswer(200, {"offers": search(self.asks, call.json().get("q"), self.now())})

    @_route("PUT", r"v0/asks/(\w+)", "instance_write", "create")
    def _create(self, call: FakeCall, target: str) -> FakeAnswer:
        body = checked_body(call.json())
        if self.meter.usd() >= self.credit:
            return error(400, "insufficient_credit", "Your account lacks credit; see the billing page.")
        if self.spend_limited:
            return error(400, "spend_rate_limit", "New accounts may spend at most 2 USD/h.")
        ask = next((one for one in self.asks if str(one.id) == target), None)
        bid = body.get("price")
        taken = ask is None or ask.rented or not ask.rentable
        if self.snatched:
            self.snatched, taken = self.snatched - 1, True
        if ask is None or (taken and body.get("cancel_unavail", bid is None)):
            status, code, text = GONE[next(self._refusals) % len(GONE)]
            return error(status, code, text.format(id=target))
        if bid is not None and bid < ask.min_bid:
            left = self.make(ask, body, bid, running=False)
            return error(400, "invalid_price", f"bid {bid} is below {ask.min_bid}", new_contract=left.id)
        made = self.make(ask, body, ask.usd_per_hour if bid is None else bid, running=not taken)
        ask.rented = True
        return FakeAnswer(
            200, {"success": True, "new_contract": made.id, "instance_api_key": made.container_key, "ask_id": ask.id}
        )

    def make(self, ask: FakeAsk, body: dict[str, Any], gpu_usd_per_hour: float, *, running: bool) -> FakeInstance:
        """Make an instance. `running`: False for a contract that stays stopped."""
        number = next(self._ids)
        made = FakeInstance(
            id=number,
            ask=ask,
            body=body,
            created_at=self.now(),
            gpu_usd_per_hour=gpu_usd_per_hour,
            boot_s=self.boot_s,
            container_key=f"container-key-{number}",
            visible_at=self.now() + self.visible_after_s,
            end_date=self.now() + CONTRACT_S if ask.end_date is None else ask.end_date,
        )
        made.environment = {
            **body["env"],
            "CONTAINER_ID": made.handle,
            "CONTAINER_API_KEY": made.container_key,
            "VAST_CONTAINERLABEL": f"C.{number}",
        }
        if not running:
            made.forced, made.state = "stopped", "stopped"
        elif self.fails_to_start:
            made.forced, made.message = "created", OCI_ERROR
        made.bill_boot(self.meter)
        self.instances.append(made)
        return made

    @_route("GET", "v0/instances/pending-price-increases", "instance_read", "increases")
    def _increases(self, call: FakeCall, target: str) -> FakeAnswer:
        rows = [
            {
                "pending_price_increase_id": request,
                "contract_id": one.id,
                "host_id": one.ask.machine_id + 1000,
                "new_gpu_costpersec": usd / 3600,
                "new_disk_ram_costpersec": None,
                "new_bwu_cost": None,
                "new_bwd_cost": None,
                "new_platform_fee": None,
                "old_gpu_costpersec": one.gpu_usd_per_hour / 3600,
                "old_disk_ram_costpersec": one.disk_usd_per_hour / 3600,
                "old_bwu_cost": one.ask.inet_cost,
                "old_bwd_cost": one.ask.inet_cost,
                "old_platform_fee": None,
                "contract_end_date": one.end_date,
                "ask_end_date": None,
                "created_at": self.now(),
            }
            for request, (one, usd) in self.increases.items()
            if not one.destroyed
        ]
        return FakeAnswer(
            200, {"success": True, "count": len(rows), "truncated": False, "pending_price_increases": rows}
        )

    @_route("PUT", "v0/instances/(accept|reject)-price-increase", "instance_write", "increase")
    def _decide_increase(self, call: FakeCall, target: str) -> FakeAnswer:
        body = call.json()
        if set(body) != {"pending_price_increase_id"}:
            return error(400, "invalid_args", "the body has other fields than pending_price_increase_id")
        one, usd = self.increases.pop(body["pending_price_increase_id"], (None, 0.0))
        if one is None or one.destroyed:
            return FakeAnswer(404, {"success": False, "error": "no_pending_price_increase"})
        if target == "accept":
            one.accepted_usd_per_hour = usd
        return FakeAnswer(200, {"success": True, **body, "contract_id": one.id})

    @_route("GET", "v1/instances", "instance_read", "list")
    def _list(self, call: FakeCall, target: str) -> FakeAnswer:
        if "after_token" in call.query and self.broken_pages:
            self.broken_pages -= 1
            return FakeAnswer(503, "upstream connect error")
        answer = page(self.listed(), call.query)
        if self.unreadable_rows and answer["instances"]:
            self.unreadable_rows -= 1
            answer["instances"][0]["id"] = None
        return FakeAnswer(200, answer)

    @_route("GET", "v0/instances", "instance_read", "list")
    def _list_older(self, call: FakeCall, target: str) -> FakeAnswer:
        rows = self.listed()
        return FakeAnswer(200, {"instances_found": len(rows), "instances": rows})

    @_route("GET", r"v0/instances/([\w-]+)", "instance_read", "show")
    def _show(self, call: FakeCall, target: str) -> FakeAnswer:
        one = self.find(target)
        return FakeAnswer(200, {"instances": None if one is None else one.row(self.now())})

    @_route("PUT", r"v0/instances/(\d+)", "instance_write", "state")
    def _change(self, call: FakeCall, target: str) -> FakeAnswer:
        body = call.json()
        if not set(body) or set(body) - {"state", "label"}:
            return error(400, "invalid_args", "the body has other fields than state and label")
        if len(str(body.get("label", ""))) > 1024:
            return error(400, "label_too_long", "label is longer than 1024")
        one = self.find(target)
        if one is None:
            return error(404, "no_such_instance", f"no instance {target}")
        if "label" in body:
            one.body["label"] = body["label"]
        if "state" in body:
            one.state = body["state"]
            self.set_status(target, "running" if body["state"] == "running" else "stopped")
        return FakeAnswer(200, {"success": True})

    @_route("DELETE", r"v0/instances/([\w-]+)", "instance_write", "destroy")
    def _destroy(self, call: FakeCall, target: str) -> FakeAnswer:
        one = next((one for one in self.instances if one.handle == target and not one.destroyed), None)
        if one is None:
            return error(404, "no_such_instance", f"no instance {target}")
        if self.ignored_destroys:
            self.ignored_destroys -= 1
        else:
            one.destroyed, one.ask.rented = True, False
            one.still_listed = self.listed_after_destroy
            self.meter.end(one.handle)
        return FakeAnswer(200, {"success": True, "msg": f"destroying instance {target}"})

    @_route("PUT", r"v0/instances/request_logs/([\w-]+)", "instance_read", "logs")
    def _request_logs(self, call: FakeCall, target: str) -> FakeAnswer:
        body = call.json()
        if set(body) - {"tail", "filter", "daemon_logs"} or not all(isinstance(one, str) for one in body.values()):
            return error(400, "invalid_args", "tail, filter and daemon_logs are texts")
        one = self.find(target)
        if one is None:
            return error(404, "no_such_instance", f"no instance {target}")
        path = f"/results/{next(self._ids)}.txt"
        lines = one.log.splitlines(keepends=True)[-int(body.get("tail", "1000")) :]
        self._results[path] = self.now() + self.log_after_s, "".join(lines)
        return FakeAnswer(200, {"success": True, "result_url": f"{self.url}{path}?signature=s"})

    @_route("GET", "v0/charges", "billing_read", "charges")
    def _charges(self, call: FakeCall, target: str) -> FakeAnswer:
        if set(call.query) - {"select_filters", "latest_first", "limit", "format", "after_token"}:
            return error(400, "invalid_request", "unknown parameters")
        body = FakeCall("", "", {}, {}, call.query.get("select_filters", "{}").encode()).json()
        if set(body.get("day", {})) != {"gte", "lte"} or not 1 <= int(call.query.get("limit", "20")) <= 500:
            return error(400, "invalid_request", "day needs gte and lte; limit is at most 500")
        found = [one for one in self.instances if one.created_at <= body["day"]["lte"]]
        found.sort(key=lambda one: one.id, reverse=call.query.get("latest_first") == "true")
        shown = found[: int(call.query.get("limit", "20"))]
        return FakeAnswer(
            200,
            {
                "success": True,
                "count": len(shown),
                "total": len(found),
                "next_token": None if len(shown) == len(found) else "eyJ2YWx1ZXMiOiB7fX0=",
                "results": [self._charge(one) for one in shown],
            },
        )

    def _charge(self, one: FakeInstance) -> dict[str, Any]:
        begin, end = int(one.created_at), int(self.now())
        items: list[dict[str, Any]] = [
            {
                "start": begin,
                "end": end,
                "type": kind,
                "source": None,
                "description": kind,
                "amount": self.meter.usd(one.handle, kind),
                "metadata": {},
                "items": [],
            }
            for kind in ("gpu", "disk", "bandwidth_download")
        ]
        return {
            "start": begin,
            "end": end,
            "type": "instance",
            "source": f"instance-{one.handle}",
            "description": f"Instance {one.handle} Charges",
            "amount": self.meter.usd(one.handle),
            "metadata": {"template_id": None, "label": one.body.get("label")},
            "items": items,
        }

    @_route("GET", "v0/users/current", "user_read", "user")
    def _user(self, call: FakeCall, target: str) -> FakeAnswer:
        left = self.credit - self.meter.usd()
        return FakeAnswer(
            200, {"id": 42, "email": "ada@example.com", "credit": left, "balance": 0.0, "ssh_key": None, "username": ""}
        )

    @_route("GET", "v0/machines", "machine_read", "machines")
    def _machines(self, call: FakeCall, target: str) -> FakeAnswer:
        return FakeAnswer(200, {"machines": []})


def error(status: int, code: str, message: str, **more: Any) -> FakeAnswer:
    """Return an error in the shape that most calls of the service have."""
    return FakeAnswer(status, {"success": False, "error": code, "msg": message, **more})


def _ask(at: int) -> FakeAsk:
    return FakeAsk(
        id=1_000_001 + at, machine_id=501 + at, usd_per_hour=0.40 + 0.01 * at, min_bid=round(0.20 + 0.005 * at, 4)
    )
