"""Check the bodies of calls by the rules of SaladCloud's OpenAPI document; refuse each field without a rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Check = Callable[[Any, str], Iterable[str]]
"""Yields the problems of a value at a place."""

NAME = r"^[a-z][a-z0-9-]{0,61}[a-z0-9]$"
UUID = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
LINE = r"^.*$"
PRIORITIES = ("high", "medium", "low", "batch")
GIB = 2**30


def whole(least: int, most: int) -> Check:
    """Return the check of a whole number."""

    def check(value: Any, place: str) -> Iterable[str]:
        if type(value) is not int or not least <= value <= most:
            yield f"{place} must be a whole number from {least} to {most}"

    return check


def text(least: int, most: int, pattern: str = LINE) -> Check:
    """Return the check of a text of one line."""

    def check(value: Any, place: str) -> Iterable[str]:
        if not isinstance(value, str) or not least <= len(value) <= most or not re.fullmatch(pattern, value):
            yield f"{place} must have {least} to {most} characters and match {pattern}"

    return check


def boolean(value: Any, place: str) -> Iterable[str]:
    """Check a truth value."""
    if not isinstance(value, bool):
        yield f"{place} must be a boolean"


def one_of(*choices: str) -> Check:
    """Return the check of an enumeration."""

    def check(value: Any, place: str) -> Iterable[str]:
        if value not in choices:
            yield f"{place} must be one of {', '.join(choices)}"

    return check


def listed(check_one: Check, least: int, most: int) -> Check:
    """Return the check of an array."""

    def check(value: Any, place: str) -> Iterable[str]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            yield f"{place} must be an array of {least} to {most} items"
            return
        for at, one in enumerate(value):
            yield from check_one(one, f"{place}[{at}]")

    return check


def mapped(check_one: Check) -> Check:
    """Return the check of an object with arbitrary keys."""

    def check(value: Any, place: str) -> Iterable[str]:
        if not isinstance(value, dict):
            yield f"{place} must be an object"
            return
        for key, one in value.items():
            yield from check_one(one, f"{place}.{key}")

    return check


def nullable(check_one: Check) -> Check:
    """Return the check of a value or null."""
    return lambda value, place: () if value is None else check_one(value, place)


def fields(checks: Mapping[str, Check], required: Iterable[str] = ()) -> Check:
    """Return the check of an object with these fields alone."""

    def check(value: Any, place: str) -> Iterable[str]:
        if not isinstance(value, dict):
            yield f"{place} must be an object"
            return
        prefix = f"{place}." if place else ""
        yield from (f"{prefix}{key} is required" for key in required if key not in value)
        for key, one in value.items():
            if key not in checks:
                yield f"{prefix}{key} is not a field"
            else:
                yield from checks[key](one, prefix + key)

    return check


_COUNTRIES = text(2, 2, r"^[a-z]{2}$")
_RESOURCES: dict[str, Check] = {
    "cpu": whole(1, 1024),
    "memory": whole(1024, 2**30),
    "gpu_classes": listed(text(36, 36, UUID), 0, 100),
    "shm_size": whole(64, 2**30),
    "storage_amount": whole(GIB, 2**50),
}
_PROBE = fields(
    {
        "exec": fields({"command": listed(text(1, 1000), 1, 100)}, ("command",)),
        "initial_delay_seconds": whole(0, 1200),
        **{
            name: whole(1, 1200)
            for name in ("period_seconds", "timeout_seconds", "success_threshold", "failure_threshold")
        },
    }
)
_CREDENTIAL = text(1, 10_000)
_REGISTRIES = {
    "basic": fields({"username": _CREDENTIAL, "password": _CREDENTIAL}, ("username", "password")),
    "docker_hub": fields(
        {"username": _CREDENTIAL, "personal_access_token": _CREDENTIAL}, ("username", "personal_access_token")
    ),
    "aws_ecr": fields(
        {"access_key_id": _CREDENTIAL, "secret_access_key": _CREDENTIAL}, ("access_key_id", "secret_access_key")
    ),
    "gcp_gar": fields({"service_key": text(1, 10_000, r"^[\s\S]*$")}, ("service_key",)),
    "gcp_gcr": fields({"service_key": text(1, 10_000, r"^[\s\S]*$")}, ("service_key",)),
}


def registry_authentication(value: Any, place: str) -> Iterable[str]:
    """Check the login at a registry: exactly one form."""
    yield from fields(_REGISTRIES)(value, place)
    if isinstance(value, dict) and len(value) != 1:
        yield f"{place} must have one of {', '.join(_REGISTRIES)}"


_CONTAINER: dict[str, Check] = {
    "image": text(1, 2048),
    "command": nullable(listed(text(1, 1000), 0, 100)),
    "environment_variables": mapped(text(1, 1000)),
    "priority": one_of(*PRIORITIES),
    "image_caching": boolean,
    "registry_authentication": registry_authentication,
}
CREATE = fields(
    {
        "name": text(2, 63, NAME),
        "display_name": text(2, 63, r"^[ ,-.0-9A-Za-z]+$"),
        "replicas": whole(0, 500),
        "restart_policy": one_of("always", "on_failure", "never"),
        "autostart_policy": boolean,
        "country_codes": listed(_COUNTRIES, 1, 500),
        "container": fields(
            {**_CONTAINER, "resources": fields(_RESOURCES, ("cpu", "memory"))}, required=("image", "resources")
        ),
        "liveness_probe": _PROBE,
    },
    required=("autostart_policy", "container", "name", "replicas", "restart_policy"),
)
PATCH = fields(
    {
        "display_name": nullable(text(2, 63, r"^[ ,-.0-9A-Za-z]+$")),
        "replicas": nullable(whole(0, 500)),
        "country_codes": nullable(listed(_COUNTRIES, 1, 500)),
        "container": nullable(
            fields(
                {
                    **_CONTAINER,
                    "image": nullable(text(1, 1024)),
                    "resources": fields({name: nullable(check) for name, check in _RESOURCES.items()}),
                }
            )
        ),
    }
)
PATCH_INSTANCE = fields({"deletion_cost": nullable(whole(0, 100_000))})
AVAILABILITY = fields(
    {
        "gpu_classes": listed(text(36, 36, UUID), 1, 100),
        "cpu": nullable(whole(1, 1024)),
        "memory": nullable(whole(1, 2**30)),
        "storage_amount": nullable(whole(1, 2**50)),
        "country_codes": listed(_COUNTRIES, 0, 500),
    },
    required=("gpu_classes",),
)
_TIME = text(20, 35, r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$")
LOG_QUERY = fields(
    {
        "start_time": _TIME,
        "end_time": _TIME,
        "query": text(0, 20_000),
        "page_size": whole(1, 100),
        "sort_order": one_of("asc", "desc"),
    },
    required=("end_time", "query", "start_time"),
)
REALLOCATE = fields({"reason": text(1, 1000)}, required=("reason",))
DELETION_COST = fields({"deletion_cost": whole(-(2**31), 2**31 - 1)}, required=("deletion_cost",))
