"""Serve the instance metadata of one container on SaladCloud: identity token, status, reallocation, deletion cost.

A container reads the real service at http://169.254.169.254. The identity token (ES256, 5 minutes) has the header and
the claims that Salad's documentation shows; the test signs, because this room has no cryptography.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

from fakes.salad import fields
from fakes.salad.api import FakeSalad, Refused
from fakes.salad.cloud import FakeGroup
from fakes.server import FakeAnswer, FakeCall, FakeProvider

TOKEN_LIFE_S = 300


class FakeImds(FakeProvider):
    """Metadata service on the node of a group's first instance.

    sign: returns the signature of the signed part of a token, 64 bytes. key_id: the id of the public key.
    """

    def __init__(self, salad: FakeSalad, name: str, *, sign: Callable[[bytes], bytes], key_id: str) -> None:
        super().__init__(salad.now)
        self.salad = salad
        self.name = name
        self.sign = sign
        self.key_id = key_id
        self.claims: dict[str, Any] = {}
        """Claims in place of the honest ones."""

    def answer(self, call: FakeCall) -> FakeAnswer:
        """Carry out one call."""
        if call.headers.get("metadata") != "true" or any(name.startswith("x-forwarded-") for name in call.headers):
            return _problem(403, "forbidden", "The header Metadata: true is required, and no proxy may forward a call.")
        try:
            return self._answer(call, self.salad.group(self.name))
        except KeyError:
            return _problem(404, "container-not-found", "The container instance could not be found.")
        except Refused as refused:
            return refused.answer

    def token(self) -> str:
        """Return a new identity token of the container."""
        group, now = self.salad.group(self.name), int(self.now())
        machine, organization = group.instances[0].machine_id, "2c3573b6-88de-4067-821f-1af088bd9c6a"
        header = {"alg": "ES256", "kid": self.key_id, "typ": "JWT"}
        claims = {
            "sub": machine,
            "jti": self.salad.cloud.new_id(),
            "salad_machine_id": machine,
            "salad_workload_id": group.id,
            "salad_workload_name": group.name,
            "salad_organization_id": organization,
            "salad_organization_name": self.salad.organization,
            "aud": organization,
            "exp": now + TOKEN_LIFE_S,
            "iss": "https://matrix-api.salad.io",
            "iat": now,
            "nbf": now,
            **self.claims,
        }
        signed = f"{_encode(json.dumps(header).encode())}.{_encode(json.dumps(claims).encode())}"
        return f"{signed}.{_encode(self.sign(signed.encode()))}"

    def _answer(self, call: FakeCall, group: FakeGroup) -> FakeAnswer:
        instance = group.instances[0]
        match (call.method, call.path):
            case ("GET", "/v1/token"):
                return FakeAnswer(200, {"jwt": self.token()})
            case ("GET", "/v1/status"):
                running = instance.state == "running"
                return FakeAnswer(200, {"ready": running, "started": running})
            case ("GET", "/v1/deletion-cost"):
                return FakeAnswer(200, {"deletion_cost": instance.deletion_cost})
            case ("PUT", "/v1/deletion-cost"):
                instance.deletion_cost = _body(call, fields.DELETION_COST)["deletion_cost"]
                return FakeAnswer(204)
            case ("POST", "/v1/reallocate"):
                _body(call, fields.REALLOCATE)
                self.salad.move(group, instance, "reallocate")
                return FakeAnswer(204)
            case ("POST", "/v1/recreate" | "/v1/restart"):
                self.salad.move(group, instance, "restart")
                return FakeAnswer(204)
        return _problem(404, "not-found", f"{call.path} could not be found.")


def _body(call: FakeCall, check: fields.Check) -> Any:
    problems = list(check(call.json(), ""))
    if problems:
        raise Refused(400, "; ".join(problems))
    return call.json()


def _problem(status: int, code: str, detail: str) -> FakeAnswer:
    return FakeAnswer(
        status,
        {"code": code, "status": status, "detail": detail, "errors": {}},
        {"Content-Type": "application/problem+json"},
    )


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
