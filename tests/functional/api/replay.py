"""Replays the events of `events/` against the handlers' logic, on the twins in memory.

By hand: `python -m tests.functional.api.replay events/worker/claim.json`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

from contract.keys import Scope
from functions.api.authorizing import authorize
from functions.api.dispatch import dispatch
from functions.api.routes import Function
from functions.api.sweeping import sweep
from functions.domain.leases import token_digest
from functions.domain.records import ApiKey, TransferGrant
from tests.api_harness import NOW, TENANT, Api, Held, memory_api

EVENTS = Path(__file__).parents[3] / "events"
JOB_ID = "146683a1-cb76-4702-9fef-fcccd32594f1"
LEASE_TOKEN = "bGVhc2UtdG9rZW4tb2YtdGhlLWZpcnN0LWF0dGVtcHQ0"
KEY_ID, KEY_SECRET = "k3f9a2c47d10be586a2f", "Zm9yLXRoZS1ldmVudHMtb2YtdGhpcy1mb2xkZXItb25seQ"
DOWNLOAD_TOKEN = "ZG93bmxvYWQtdG9rZW4tZm9yLXRoZS1vZGQta2V5ISEh"
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
        scopes=list(scopes),
        created_at=NOW,
    )


def prepared_api(*, claimed: bool) -> Api:
    """An API that knows what the events name: a key, a job (held, if `claimed`), an object and its download token."""
    api = memory_api()
    api.context.__dict__["random"] = _NamedRandomness(api)
    api.context.tokens.put_key(events_key(Scope.SUBMIT, Scope.WORKER))
    api.submit()
    if claimed:
        held: Held = api.claim()
        assert (held.id, held.token) == (JOB_ID, LEASE_TOKEN)
    api.put_object("training-data", ODD_KEY)
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
    """What the handler named by the event's folder answers."""
    event = json.loads(path.read_text())
    handler = path.parent.name
    if handler == "authorizer":
        return authorize(event, api.context.tokens, api.clock)
    if handler == "sweeper":
        return dict(sweep(api.context.jobs, api.context.leases, api.clock.now()).as_dict())
    return dispatch(event, api.context, cast("Function", handler))


if __name__ == "__main__":
    given = Path(sys.argv[1])
    answered = replay(given.resolve(), prepared_api(claimed=given.stem != "claim"))
    sys.stdout.write(json.dumps(answered, indent=2) + "\n")
