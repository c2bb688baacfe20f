"""Replay the events of `events/` against the handlers' logic, on the twins in memory.

By hand: `python -m tests.functional.api.replay events/worker/claim.json`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

from baton.contract.fleets.fleet import MachineState
from baton.contract.names import Scope
from functions.api.checkpoints.retention_runner import run_due_retentions
from functions.api.http.authorizer import authorize
from functions.api.http.dispatch import dispatch
from functions.api.http.route import Function
from functions.api.machines.enrolment_keys import EnrolmentKeys
from functions.api.operations.sweeper import sweep
from functions.domain.access.api_keys import ApiKey, token_digest
from functions.domain.access.rings import StoredRing
from functions.domain.records import TransferGrant
from functions.domain.webhooks import WebhookTarget
from functions.fleet.clock import FleetClock
from functions.fleet.ticks.controller import FleetController
from functions.fleet.ticks.demand import waiting_jobs
from functions.publishing.outbox import publish
from functions.webhooks.batch_consumer import consume_batch
from functions.webhooks.delivery import deliver
from functions.webhooks.http_delivery import PostOutcome
from tests.kits.api.fleets import DOCUMENT, make_machine, put_machine
from tests.kits.api.harness import NOW, TENANT, Api, Held, memory_api
from tests.kits.api.stream_records import FakeBus, FakeDeadLetters
from tests.kits.api.webhooks import make_webhook
from tests.twins.fleet import MemoryFleetStore

EVENTS = Path(__file__).parents[3] / "events"
JOB_ID = "146683a1-cb76-4702-9fef-fcccd32594f1"
LEASE_TOKEN = "bGVhc2UtdG9rZW4tb2YtdGhlLWZpcnN0LWF0dGVtcHQ0"
KEY_ID, KEY_SECRET = "k3f9a2c47d10be586a2f", "Zm9yLXRoZS1ldmVudHMtb2YtdGhpcy1mb2xkZXItb25seQ"
DOWNLOAD_TOKEN = "ZG93bmxvYWQtdG9rZW4tZm9yLXRoZS1vZGQta2V5ISEh"
DOWN_HOOK_ID, DOWN_HOST = "0d0b0a0d0b0a0d0b0a00", "down.example.com"
BOOTING_MACHINE, ENROLLED_MACHINE = "a1b2c3d4-nights-9f8e7d6c5b4a", "a1b2c3d4-nights-0f1e2d3c4b5a"
ODD_KEY = "timber/100% of ü+1.jpg"


class _NamedRandomness:
    """The ids and tokens that the events name, once each; then what the harness draws."""

    def __init__(self, api: Api) -> None:
        self._random = api.context.random
        self._job_ids, self._tokens = [JOB_ID], [LEASE_TOKEN]

    def job_id(self) -> str:
        return self._job_ids.pop() if self._job_ids else self._random.job_id()

    def token(self) -> str:
        return self._tokens.pop() if self._tokens else self._random.token()

    def key_id(self) -> str:
        return self._random.key_id()

    def below(self, bound: int) -> int:
        return self._random.below(bound)


def events_key(*scopes: Scope) -> ApiKey:
    """The key that the events carry, as it is stored."""
    return ApiKey(
        id=KEY_ID,
        tenant=TENANT,
        name="events",
        secret_sha256=token_digest(KEY_SECRET),
        scopes=scopes,
        created_at=NOW,
    )


def prepared_api(*, claimed: bool) -> Api:
    """An API that knows what the events name: a key, a job (held, if `claimed`), an object with a token, a fleet."""
    api = memory_api()
    api.context.__dict__["random"] = _NamedRandomness(api)
    api.context.tokens.put_key(events_key(Scope.SUBMIT, Scope.WORKER))
    api.submit()
    if claimed:
        held: Held = api.claim()
        assert (held.id, held.token) == (JOB_ID, LEASE_TOKEN)
    api.put_object("training-data", ODD_KEY)
    ring = StoredRing(tenant=TENANT, name="shapes", id="0123456789abcdef", settings=b"{}", created_at=NOW)
    assert api.context.rings is not None and api.context.rings.make(ring)
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    put_machine(api, make_machine(BOOTING_MACHINE, MachineState.BOOTING))
    put_machine(api, make_machine(ENROLLED_MACHINE, MachineState.READY, enrolled_at=NOW))
    api.context.tokens.put_grant(
        TransferGrant(
            token_sha256=token_digest(DOWNLOAD_TOKEN),
            purpose="download",
            tenant=TENANT,
            bucket="training-data",
            key=ODD_KEY,
            expires_at=NOW + 300,
        )
    )
    return api


def replay(path: Path, api: Api) -> dict[str, Any]:
    """Give an event to the handler that its folder names; return the answer, and messages of publisher or deliverer."""
    event = json.loads(path.read_text())
    handler = path.parent.name
    if handler == "authorizer":
        return authorize(event, api.context.tokens, api.clock.now(), api.context.leases)
    if handler == "publisher":
        bus, letters = FakeBus(), FakeDeadLetters()
        answer = publish(event["Records"], bus, letters, lambda _: None)
        published = [json.loads(entry.detail) for entry in bus.accepted]
        return {**answer, "published": published, "dead_letters": letters.letters}
    if handler == "deliverer":
        api.context.webhooks.put(make_webhook())
        api.context.webhooks.put(make_webhook(id=DOWN_HOOK_ID, url=f"https://{DOWN_HOST}/baton"))
        posted: list[dict[str, Any]] = []
        postponed: list[int] = []

        def post(target: WebhookTarget, headers: Mapping[str, str], body: bytes) -> PostOutcome:
            posted.append({"host": target.host, "headers": dict(headers), "body": json.loads(body)})
            return PostOutcome(503, "answered 503") if target.host == DOWN_HOST else PostOutcome(204)

        def attempt(record: dict[str, Any]) -> int | None:
            return deliver(record, api.context.webhooks, post, api.clock.now())

        answer = consume_batch(event["Records"], attempt, lambda _receipt, wait_s: postponed.append(wait_s))
        return {**answer, "posted": posted, "postponed_s": postponed}
    if handler == "sweeper":
        swept = sweep(api.context.jobs, api.context.leases, api.clock, sweep_interval_s=1).as_dict()
        return swept | {"retentions": run_due_retentions(api.context, api.clock.now())}
    if handler == "fleet":
        context = api.context
        controller = FleetController(
            MemoryFleetStore(),
            {},
            waiting=partial(waiting_jobs, context.jobs, shards=1),
            keys=EnrolmentKeys(context.tokens, context.random, api.clock, FleetClock(), None),
            now=api.clock.now,
            random_token=context.random.token,
            time_left_s=lambda: 55.0,
        )
        return asdict(controller.tick())
    return dispatch(event, api.context, cast("Function", handler))


if __name__ == "__main__":
    given = Path(sys.argv[1])
    answered = replay(given.resolve(), prepared_api(claimed=given.stem != "claim"))
    sys.stdout.write(json.dumps(answered, indent=2) + "\n")
