"""Fuzz the API with schemathesis: requests from the description, answers checked against the description."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import hypothesis
import pytest
import requests
import schemathesis
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.generation.hypothesis.builder import InvalidHeadersExampleMark, MissingPathParameters
from schemathesis.pytest._test_builder import build_operation_test
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance
from starlette.types import Message, Receive, Scope, Send

import functions.api
from functions.api.http.authorizer import authorize
from functions.api.http.dispatch import dispatch
from functions.api.http.route import Route, all_routes
from functions.local.gateway.http_gateway import GatewayRoute, build_gateway
from tests.kits.api.harness import ALL_SCOPES, TENANT, Held, memory_api


class World:
    """A control plane with one key and one object.

    `answered` holds the statuses of the test's own calls; `guarded` the operations that refused a call without a key
    and a call with a wrong one.
    """

    def __init__(self) -> None:
        self.api = memory_api()
        self.key = self.api.issue(TENANT, *ALL_SCOPES)
        self.api.put_object("training-data", "timber/1.jpg")
        self.held: list[Held] = []
        self.answered: dict[str, set[int]] = defaultdict(set)
        self.guarded: set[str] = set()
        self.refused_keys = 0


world = World()


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep requests from reading the whole environment twice for each call: no call leaves this process."""
    monkeypatch.setattr(requests.sessions, "get_environ_proxies", lambda *_, **__: {})


@pytest.fixture(autouse=True)
def _no_neighbors() -> Iterator[None]:
    """Begin each test in a world of its own: its findings are the same alone and in any order.

    Afterwards require that the calls reached what lies behind the checks: alone, too, a test proves more than refusals.
    """
    global world  # noqa: PLW0603 - schemathesis calls the application and the hooks without arguments of ours
    world = World()
    yield
    for label, statuses in world.answered.items():
        missing = expected_statuses(label) - statuses
        assert not missing, f"{label} never answered {missing}, only {statuses}"
        assert max(statuses) < 500
        assert label in world.guarded or label in WITHOUT_A_KEY or min(statuses) >= 300, f"{label} asks for no key"


def _front_route(route: Route) -> GatewayRoute:
    def handler(event: dict[str, Any], _: Any) -> dict[str, Any]:
        return dispatch(event, world.api.context, route.function)

    return GatewayRoute(route.method, route.path, handler, bool(route.scopes))


_front = build_gateway(
    [_front_route(route) for route in all_routes()],
    lambda event, _: authorize(event, world.api.context.tokens, world.api.clock.now(), world.api.context.leases),
)
# test_description.py compares the file with the code.
_description = Path(functions.api.__file__).with_name("openapi.json").read_bytes()


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """The front, and beside it the description. The client begins and ends a lifespan with every request."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    if scope["type"] == "http" and scope["path"] == "/openapi.json":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": _description})
        return

    async def counted(message: Message) -> None:
        world.refused_keys += message.get("status") in (401, 403)
        await send(message)

    await _front(scope, receive, counted)


schema = schemathesis.openapi.from_asgi("/openapi.json", application)
schema.config.generation.update(max_examples=5)
schema.config.generation.deterministic = True
# Literals found in whatever modules happen to be loaded would make every run another one.
schema.config.analysis.constants.enabled = False
# Each call is given a good key, so a request whose only fault is its key would not be sent; `ignored_auth` tries them.
schema.config.generation.with_security_parameters = False
# API Gateway's HTTP APIs, and the local front like them, answer 404 to a method that a path does not have; the check
# insists on 405, which no code of ours could answer there.
schema.config.checks.unsupported_method.enabled = False
# A body with too many items may be too large before anything counts the items.
_rejection = schema.config.checks.negative_data_rejection
_rejection.expected_statuses = [*_rejection.expected_statuses, "413"]


EXAMPLE_ID = json.loads(_description)["paths"]["/job/{id}"]["get"]["parameters"][0]["example"]
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def held() -> Held:
    """A job that is running with a checkpoint; another one when the last was ended."""
    api, jobs = world.api, world.held
    if jobs:
        lease = api.context.leases.get(jobs[-1].id)
        if lease is not None and not lease.closed:
            return jobs[-1]
    # A queue that nobody else asks for.
    queue = f"held-{len(jobs)}"
    api.submit(queue=queue, inputs=[{"prefix": "a/"}])
    jobs.append(api.claim(queue=queue))
    jobs[-1].commit(100).ok()
    return jobs[-1]


def _is_job_id(value: object) -> bool:
    return isinstance(value, str) and _UUID.fullmatch(value) is not None and value[0] in "02468ace"


@schema.hook
def map_path_parameters(context: schemathesis.HookContext, path_parameters: Any) -> Any:
    """Replace half of the valid job ids in a path by the id of a running job: all others answer 404."""
    if isinstance(path_parameters, dict) and _is_job_id(path_parameters.get("id")):
        return {**path_parameters, "id": held().id}
    return path_parameters


@schema.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Replace half of the valid job ids in a body by the id of a running job."""
    return {**body, "job_id": held().id} if isinstance(body, dict) and _is_job_id(body.get("job_id")) else body


@schema.hook
def map_headers(context: schemathesis.HookContext, headers: Any) -> Any:
    """And the lease token that goes with it."""
    return {**headers, "x-lease-token": held().token} if headers and headers.get("x-lease-token") else headers


# Refusals of requests that JSON Schema cannot tell from valid ones. The check `positive_data_acceptance` excuses an
# answer only if it is one of these.
BEYOND_SCHEMA_CODES = {
    "invalid_cursor": "cursors are opaque: only the API makes valid ones",
    "unknown_recipe": "the recipes that exist are data",
    "invalid_rules": "what is in the text of rules is a language of its own",
    "invalid_recipe": "what is in the text of a recipe is a language of its own",
    "job_not_running": "400 is what the original's clients take as the order to stop",
}
BEYOND_SCHEMA_MESSAGES = {
    "twice": "paths are distinct by value, whatever else the items say",
    "below another file": "no path is both a file and a directory",
    "bytes; 1 to 900 are allowed": "sizes are in bytes, lengths in characters",
    "bytes; 1 to 800 are allowed": "sizes are in bytes, lengths in characters",
    "has an empty prefix": "the files of a recipe lie in a folder",
    "is not a parameter of": "parameters are checked against their recipe",
    "Parameter '": "parameters are checked against their recipe",
    "names the program": "the first word of a command is not blank, and NUL is in none",
    "NUL character": "processes cannot be given NUL",
    "bytes; at most 32768 are allowed": "sizes are in bytes, lengths in characters",
    "has passed": "a deadline lies in the future",
    "The manifest is for job": "the job is named in the path and in the body",
    "A checkpoint is named": "the name says the job and the step",
    "is needed without a lease": "what an original client sends depends on who asks",
    ", which has ": "some prefixes are those of objects",
    "is deleted with its ring": "settings are no ordinary record",
    "The address ": "where a webhook may lead is no question of form",
    "webhooks, the maximum": "a tenant has a limited number",
    "does not name pack": "a checkpoint has the packs it has",
    "not in 'packs'": "an index is below the length of another list",
    "not in 'chunks'": "an index is below the length of another list",
    "do not add up to its": "a file is as long as its chunks together",
    "a chunk that no file uses": "each chunk is used",
    "a pack without chunks": "each pack is used",
    "ends behind the end of its pack": "a chunk lies within its pack",
    "has a 'length_bytes' other than its 'size_bytes'": "two sizes are equal",
    "is a delta or has another size": "an index leads to a chunk that fits",
    " parts of ": "a file has as many parts as follow from its size and theirs",
    "The path names the fleet": "the fleet is named in the path and in the body",
    "less than min": "a maximum is not below another field",
    "which is above 'max'": "a minimum is not above another field",
    "does not pay for an hour of min": "a budget pays for the product of two other fields",
    "start a container, therefore image is required": "the providers of one field need another field",
    "belongs to a job that rents": "queues with the names of such jobs are theirs",
    "beside rent": "a job that rents its machine names no queue",
    "a rented machine has one GPU": "a requirement that no fleet can promise",
    "No machine can be rented for the requirements": "what a job may need is more than a fleet may rent",
    "is not ascending": "items are in order by value",
    "of one upload": "a file beyond 5 GiB is declared with its parts",
}


def beyond_schema(text: str) -> bool:
    error = json.loads(text)["error"]
    return error["code"] in BEYOND_SCHEMA_CODES or any(words in error["message"] for words in BEYOND_SCHEMA_MESSAGES)


def cut_by_the_gateway(case: schemathesis.Case, text: str) -> bool:
    """API Gateway drops what follows a `?` in a key: what is left of a sound one may end with a slash."""
    key = unquote(str(case.path_parameters.get("key", "")))  # in some of its phases the fuzzer has escaped it
    return "/?" in key and json.loads(text)["error"]["code"] == "invalid_key"


SUCCEED_AS_DESCRIBED = {
    *("POST /job", "POST /jobs/batch", "GET /jobs", "GET /job/{id}", "GET /job/{id}/events", "GET /job/{id}/attempts"),
    *(
        "GET /job/{id}/checkpoints",
        "GET /job/{id}/logs",
        "GET /job/{id}/metrics",
        "POST /job/{id}/stop",
        "POST /job/{id}/pause",
    ),
    *("GET /work", "GET /work/peek", "POST /heartbeat/{id}", "POST /complete", "POST /fail", "POST /release"),
    *("POST /job/{id}/artifacts", "POST /job/{id}/logs", "GET /job/{id}/inputs", "GET /download/token"),
    *("GET /job/{id}/rules", "GET /job/{id}/rules/history", "POST /rules/check", "GET /job/{id}/commands"),
    *(
        "POST /job/{id}/commands",
        "GET /upload/token",
        "POST /uploads",
        "GET /data",
        "POST /keys",
        "GET /keys",
        "GET /health",
    ),
}
"""Calls whose example in the description needs no more than a running job and its lease."""
PROVE_A_LEASE = {"POST /heartbeat/{id}", "POST /progress", "POST /complete", "POST /fail", "POST /release"}
"""Calls that an ended attempt's worker may make."""
WITHOUT_A_KEY = {f"{route.method} {route.path}" for route in all_routes() if not route.scopes}


def expected_statuses(label: str) -> set[int]:
    """Statuses with which the calls of an operation must have been answered, among others."""
    statuses = {404} if "{" in label else set()
    if label in SUCCEED_AS_DESCRIBED:
        statuses |= {200, 422} if label.startswith("POST") else {200}
    if label in PROVE_A_LEASE:
        statuses |= {400, 409}
    if "{key}" in label:
        statuses |= {401}
    return statuses


def about_a_running_job(case: schemathesis.Case) -> None:
    """The job of the description's examples is one that runs, and the caller has its lease."""
    in_path = case.path_parameters.get("id") == EXAMPLE_ID
    in_body = isinstance(case.body, dict) and case.body.get("job_id") == EXAMPLE_ID
    if in_path:
        case.path_parameters["id"] = held().id
    if in_body:
        case.body = {**case.body, "job_id": held().id}
    if in_path or in_body:
        case.headers["x-lease-token"] = held().token


def require_no_findings(case: schemathesis.Case) -> None:
    about_a_running_job(case)
    response = case.call(headers={"x-api-key": world.key})
    world.answered[case.operation.label].add(response.status_code)
    excused = response.status_code in (400, 422) and (
        beyond_schema(response.text) or cut_by_the_gateway(case, response.text)
    )
    validate(case, response, excused=excused)


def validate(case: schemathesis.Case, response: Any, *, excused: bool) -> None:
    """Apply all checks of schemathesis. Each operation is called once without a key and once with a wrong one.

    The authorizer decides by the key alone. Without a list of the operations that refused both calls, schemathesis
    repeats both after each success.
    """
    label, before = case.operation.label, world.refused_keys
    excluded = [positive_data_acceptance] * excused + [ignored_auth] * (label in world.guarded)
    case.validate_response(response, excluded_checks=excluded)
    if world.refused_keys - before == 2:
        world.guarded.add(label)


@pytest.mark.parametrize("operation", [one.ok().label for one in schema.get_all_operations()])
def test_no_findings(operation: str) -> None:
    """Make the requests in the test: `schema.parametrize` makes them in each process that collects the tests."""
    test = build_operation_test(
        config=schema.config,
        operation=schema.find_operation_by_label(operation),
        test_func=require_no_findings,
        given_kwargs={},
        feedback=FeedbackSources(),
    )
    test()
    assert not MissingPathParameters.get(test) and not InvalidHeadersExampleMark.get(test)


def test_no_findings_in_chains_of_calls() -> None:
    """Chains of calls have no findings: each call uses an earlier answer, for example submit, read, pause, stop."""
    state_machine = schema.as_state_machine()

    class Chains(state_machine):  # type: ignore[misc, valid-type]
        def get_call_kwargs(self, case: schemathesis.Case) -> dict[str, Any]:
            return {"headers": {"x-api-key": world.key}}

        def validate_response(self, response: Any, case: schemathesis.Case, **more: Any) -> None:
            excused = response.status_code in (400, 422) and beyond_schema(response.text)
            validate(case, response, excused=excused)

    Chains.run(
        settings=hypothesis.settings(
            max_examples=15,
            stateful_step_count=8,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
    )
