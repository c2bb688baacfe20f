"""Check the body of a create: `PUT /api/v0/asks/{id}/`."""

from __future__ import annotations

import re
from typing import Any

from fakes.vast.market import BadRequest

FIELDS = frozenset(
    name
    for names in (
        (
            "client_id",
            "image",
            "image_login",
            "disk",
            "label",
            "env",
            "runtype",
            "args",
            "args_str",
            "onstart",
            "price",
        ),
        ("target_state", "cancel_unavail", "template_hash_id", "template_id", "volume_info", "vm", "user"),
        ("force", "python_utf8", "lang_utf8", "extra", "use_jupyter_lab", "jupyter_dir"),
    )
    for name in names
)
RUNTYPE_WORDS = frozenset(
    (
        *("args", "ssh", "ssh_proxy", "ssh_direct", "ssh_direc"),
        *("jupyter", "jupyter_proxy", "jupyter_direct", "jupyter_direc"),
    )
)
BIDS = (0.001, 128)
LEAST_DISK_GB = 8
LOGIN = re.compile(r"-u \S+ -p \S+ [a-z0-9.-]+(:\d+)?")
LONGEST = {"image": 1024, "image_login": 8192, "label": 1024, "env": 32_768, "args": 4096}


def checked_body(body: Any) -> dict[str, Any]:
    """Return the body. Raises BadRequest for the first unknown or unsuitable field."""
    if not isinstance(body, dict):
        raise BadRequest("the body is not an object")
    if unknown := set(body) - FIELDS:
        raise BadRequest(f"unknown fields {sorted(unknown)}")
    if body.get("client_id") != "me":
        raise BadRequest("client_id is not 'me'")
    if not _is_text(body.get("image"), LONGEST["image"]) or not body["image"]:
        raise BadRequest("image is missing")
    # The vendor's client sends an empty text for an image without a login.
    if body.get("image_login") and not (
        _is_text(body["image_login"], LONGEST["image_login"]) and LOGIN.fullmatch(body["image_login"])
    ):
        raise BadRequest("image_login is not '-u user -p password registry'")
    if body.get("label") is not None and not _is_text(body["label"], LONGEST["label"]):
        raise BadRequest("label is too long", "label_too_long")
    _check_numbers(body)
    _check_program(body)
    return body


def _check_numbers(body: dict[str, Any]) -> None:
    if not _is_number(body.get("disk")) or body["disk"] < LEAST_DISK_GB:
        raise BadRequest(f"disk is less than {LEAST_DISK_GB} GB")
    price = body.get("price")
    if price is not None and not (_is_number(price) and BIDS[0] <= price <= BIDS[1]):
        raise BadRequest(f"price is not within {BIDS}", "invalid_price")


def _check_program(body: dict[str, Any]) -> None:
    env = body.get("env")
    if not isinstance(env, dict) or not all(isinstance(one, str) for pair in env.items() for one in pair):
        raise BadRequest("env is not an object of texts")
    if sum(len(name) + len(value) for name, value in env.items()) > LONGEST["env"]:
        raise BadRequest("env is too long")
    if unknown := set(str(body.get("runtype") or "ssh").split()) - RUNTYPE_WORDS:
        raise BadRequest(f"runtype has unknown words {sorted(unknown)}")
    if body.get("target_state", "running") not in ("running", "stopped"):
        raise BadRequest("target_state is neither running nor stopped")
    if not isinstance(body.get("cancel_unavail", True), bool):
        raise BadRequest("cancel_unavail is not a boolean")
    if len(str(body.get("args") or "")) + len(str(body.get("onstart") or "")) > LONGEST["args"]:
        raise BadRequest("args and onstart are too long")


def _is_text(value: Any, longest: int) -> bool:
    return isinstance(value, str) and len(value) <= longest


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
