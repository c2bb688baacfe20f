"""Build one valid call of every route, for tests over the whole route table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from functions.api.http.route import Route, all_routes
from tests.kits.api.fleets import DOCUMENT
from tests.kits.files.declared_files import described, in_packs

FILE = described("model.bin", b"weights")
_STEP = {"step": "100"}
NODE = "0.1.9f86d081"
PROGRAM = {"torch": "2.13.0", "engine": "wire", "codec": "int8", "parameters": 64, "model_sha256": "9f" * 32}

_BODIES: dict[str, Any] = {
    "POST /job": {"command": ["train"]},
    "POST /jobs/check": {"command": ["train"]},
    "POST /jobs/batch": {"jobs": [{"command": ["train"]}]},
    "POST /job/{id}/stop": {},
    "POST /job/{id}/pause": {},
    "POST /job/{id}/resume": {},
    "POST /job/{id}/retry": {},
    "PUT /job/{id}/rules": {"text": "rules: [{name: nan, when: not isfinite(loss), do: save}]"},
    "POST /job/{id}/share": {},
    "POST /job/{id}/commands": {"kind": "save"},
    "POST /job/{id}/rules/backtest": {"text": "rules: []"},
    "POST /rules/check": {"text": "rules: []"},
    "POST /heartbeat/{id}": {"step": 1},
    "POST /progress": {"bucket_name": "training-checkpoints"},
    "POST /complete": {"artifacts": []},
    "POST /fail": {},
    "POST /release": {},
    "POST /job/{id}/checkpoints": {"version": 2, "step": 100, "epoch": 1, **in_packs({"model.bin": b"weights"})},
    "POST /job/{id}/checkpoints/{step}/urls": {},
    "POST /job/{id}/checkpoints/{step}/damaged": {"epoch": 1},
    "POST /job/{id}/artifacts": {"artifacts": [FILE]},
    "POST /job/{id}/logs": {"first_line": 0, "lines": ["hello"]},
    "POST /job/{id}/world/join": {"node": NODE, "program": PROGRAM},
    "POST /job/{id}/world/epoch": {"node": NODE, "epoch": 0, "members": [NODE]},
    "POST /job/{id}/world/data": {"node": NODE, "plan_sha256": "9f" * 32},
    "POST /job/{id}/world/report": {"node": NODE, "epoch": 0},
    "POST /job/{id}/world/relay": {"node": NODE, "calls": True},
    "POST /job/{id}/world/exclude": {"seats": [0]},
    "POST /upload/{bucket}/{key+}": {},
    "POST /uploads": {
        "bucket": "training-data",
        "files": [{name: FILE[name] for name in ("size_bytes", "crc64nvme")} | {"key": "a.bin"}],
    },
    "POST /rings/{ring}/records": {"read": ["pointer"]},
    "POST /rings/{ring}/urls": {"get": ["samples/w/1"]},
    "POST /rings/{ring}/delete": {"keys": ["pointer"]},
    "PUT /fleets/{fleet}": DOCUMENT,
    "POST /fleets/{fleet}/plan": {"fleet": DOCUMENT},
    "POST /offers": {},
    "PUT /providers/vast": {"api_key": "k"},
    "PUT /providers/salad": {"api_key": "k", "organization": "acme", "project": "training"},
    "PUT /providers/runpod": {"api_key": "k"},
    "PUT /providers/ec2": {
        "access_key_id": "a",
        "secret_access_key": "s",
        "region": "us-east-1",
        "image_id": "ami-1",
        "subnet_ids": ["subnet-1"],
        "security_group_ids": ["sg-1"],
    },
    "PUT /providers/ssh": {
        "private_key": "k",
        "hosts": [{"name": "desk", "address": "10.0.0.7", "user": "baton", "host_key": "ssh-ed25519 AAAA"}],
    },
    "PUT /registries/{registry}": {"username": "acme", "password": "k"},
    "POST /fleet-doctor/fix": {"findings": ["stray_machine/vast/7"]},
    "POST /machines/preflight": {},
    "POST /machines/enroll": {"gpus": 0, "disk_gib": 80},
    "POST /machines/heartbeat": {},
    "POST /keys": {"name": "k", "scopes": ["submit"]},
    "POST /sessions": {"code": "baton_k3f9a0b1_s3cr3t"},
    "POST /sessions/preview": {"code": "baton_k3f9a0b1_s3cr3t"},
    "POST /webhooks": {"url": "https://hooks.example.com/baton"},
    "POST /webhooks/{id}/replay": {},
    "POST /recipes": {
        "document": "{name: hello, version: 1, description: Says hello., steps: [{name: hello, run: [echo, hello]}]}"
    },
}
_IN_BODY = ("POST /progress", "POST /complete", "POST /fail", "POST /release", "POST /job/{id}/checkpoints")


@dataclass(frozen=True)
class ValidCall:
    """A valid call of a route: method, target and body."""

    route: Route
    method: str
    target: str
    body: Any


def valid_call(route: Route, job_id: str) -> ValidCall:
    """Return a call of the route about the job; only the state of stored records could refuse the call."""
    key = route.route_key
    body = _BODIES.get(key)
    if key in (*_IN_BODY, "POST /webhooks/{id}/replay"):
        body = {"job_id": job_id, **body}
    if key == "POST /progress":
        body["key"] = f"jobs/{job_id}/attempt-1/checkpoint-100.zip"
    target = route.path.replace("{id}", "a" * 20 if route.path.startswith(("/keys/", "/webhooks/")) else job_id)
    target = (
        target.replace("{recipe}", "digits@1")
        .replace("{step}", "100")
        .replace("{ring}", "shapes")
        .replace("{fleet}", "nights")
        .replace("{machine}", "a1b2c3d4-nights-9f8e7d6c5b4a")
        .replace("{registry}", "ghcr.io")
        .replace("{file}", "main-5TQ7A2.js")
        .replace("{bucket}", "training-data")
        .replace("{key+}", "a.bin")
    )
    if key == "GET /rings/{ring}/keys":
        target += "?prefix=inbox/"
    if route.path in ("/upload/token", "/download/token"):
        target += "?bucket=training-data&key=a.bin"
    if route.path.startswith("/upload/{"):
        part = "?uploadId=u&partNumber=1"
        target += {"POST": "?action=mpu-create", "PUT": part, "DELETE": "?action=delete"}[route.method]
        body = b"x" if route.method == "PUT" else body
    return ValidCall(route, route.method, target, body)


ABOUT_A_JOB = [route for route in all_routes() if "/job/{id}" in route.path or route.route_key in _IN_BODY]
"""Every route that names a job, but for the heartbeat, whose answers are the original's."""

GUARDED = [route for route in all_routes() if route.scopes]


def named(route: Route) -> str:
    """For pytest's ids."""
    return route.route_key


def reasons_by_field(error: dict[str, Any]) -> dict[str, str]:
    """Map the fields of an error's problems to their reasons; each problem has a remedy."""
    assert all(problem["reason"] and problem["remedy"] for problem in error["problems"]), error
    return {problem["field"]: problem["reason"] for problem in error["problems"]}
