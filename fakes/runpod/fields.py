"""Check the fields of calls, as RunPod's OpenAPI document of version 2.0.0 names them."""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from typing import Any

from fakes.server import FakeCall

Check = Callable[[Any], bool]


class BadFields(Exception):  # noqa: N818 - a normal answer of the fake
    """The provider refuses the request. `errors`: one line for each fault."""

    def __init__(self, status: int, detail: str, errors: list[str]) -> None:
        super().__init__(detail)
        self.status = status
        self.errors = errors


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _number(least: int) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _version(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d+\.\d+", value) is not None


POD: dict[str, Check] = {
    "name": lambda value: isinstance(value, str) and bool(value),
    "image": _text,
    "args": _text,
    "disk": _number(1),
    "env": lambda value: isinstance(value, dict) and all(isinstance(one, str) for one in value.values()),
    "ports": _texts,
    "registry": lambda value: value is None or isinstance(value, str),
    "cloud": lambda value: value in ("SECURE", "COMMUNITY"),
    "dataCenterIds": _texts,
    "globalNetworking": _flag,
    "gpu": lambda value: isinstance(value, dict),
    "mounts": lambda value: isinstance(value, dict),
    "startJupyter": _flag,
    "startSsh": _flag,
}
"""Fields of a create. Pods without a GPU and templates are not part of the fake."""
GPU: dict[str, Check] = {
    "id": _text,
    "count": _number(1),
    "allowedCudaVersions": lambda value: isinstance(value, list) and all(map(_version, value)),
    "minCudaVersion": _version,
}
REGISTRY: dict[str, Check] = dict.fromkeys(("name", "username", "password"), lambda value: _text(value) and bool(value))
PERSISTENT: dict[str, Check] = {"size": _number(10), "path": _text}
MOST_VARIABLES = 50


def check_query(call: FakeCall, names: Set[str]) -> None:
    """Raise BadFields for a parameter that the path does not have."""
    unknown = sorted(set(call.query) - set(names))
    if unknown:
        raise BadFields(422, "Request validation failed.", [f"query: unknown parameter {one!r}" for one in unknown])


def check_registry(call: FakeCall) -> dict[str, Any]:
    """Return the body of a login at a registry. Raises BadFields."""
    body = _object(call)
    errors = _faults("$", body, REGISTRY, tuple(REGISTRY))
    if errors:
        raise BadFields(422, "Request validation failed.", errors)
    return body


def _object(call: FakeCall) -> dict[str, Any]:
    """Return the JSON object of a body. Raises BadFields."""
    if call.headers.get("content-type") != "application/json":
        raise BadFields(422, "Request validation failed.", ["content type: must be application/json"])
    try:
        body = call.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise BadFields(400, "request could not be processed", [])
    return body


def check_pod(call: FakeCall) -> dict[str, Any]:
    """Return the body of a create. Raises BadFields for every field that the document does not permit."""
    body = _object(call)
    mounts = body.get("mounts", {})
    errors = [
        *_faults("$", body, POD, ("name", "image", "gpu")),
        *_faults("$.gpu", body.get("gpu"), GPU, ("id",)),
        *_faults("$.mounts.persistent", mounts.get("persistent") if isinstance(mounts, dict) else None, PERSISTENT, ()),
    ]
    if len(body.get("env") or {}) > MOST_VARIABLES:
        errors.append(f"$.env: more than {MOST_VARIABLES} variables")
    if errors:
        raise BadFields(422, "Request validation failed.", errors)
    return body


def _faults(place: str, value: Any, fields: dict[str, Check], required: tuple[str, ...]) -> list[str]:
    if not isinstance(value, dict):
        return []
    unknown = sorted(set(value) - set(fields))
    lacking = [one for one in required if one not in value]
    return [
        *([f"{place}: additional properties {', '.join(map(repr, unknown))} not allowed"] if unknown else []),
        *([f"{place}: missing properties {', '.join(map(repr, lacking))}"] if lacking else []),
        *(f"{place}.{name}: invalid value" for name, one in value.items() if name in fields and not fields[name](one)),
    ]
