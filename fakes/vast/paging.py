"""Page the list of instances: `GET /api/v1/instances/` with its parameters as JSON texts."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fakes.vast.market import OPERATORS, BadRequest

LARGEST_PAGE = 25
COMPUTED = ("dph_total", "num_gpus", "duration", "uptime_mins")
"""Columns that the service computes for the answer and cannot filter by."""
PARAMETERS = frozenset({"limit", "after_token", "order_by", "select_cols", "select_filters", "owner"})
ORDERS = ("id", "start_date")


def page(rows: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of the rows. Raises BadRequest."""
    if unknown := set(query) - PARAMETERS:
        raise BadRequest(f"unknown parameters {sorted(unknown)}", "invalid_request")
    limit = _json(query, "limit", LARGEST_PAGE)
    if not isinstance(limit, int) or not 1 <= limit <= LARGEST_PAGE:
        raise BadRequest(f"limit is not within 1 and {LARGEST_PAGE}", "invalid_request")
    filters = _json(query, "select_filters", {})
    for name in filters:
        if name in COMPUTED:
            raise BadRequest(f"cannot filter by the computed column {name}", "invalid_request")
    found = [
        row
        for row in rows
        if all(OPERATORS[key](row[name], bound) for name, ops in filters.items() for key, bound in ops.items())
    ]
    (order,) = _json(query, "order_by", [{"col": "id", "dir": "asc"}])
    if order["col"] not in ORDERS:
        raise BadRequest(f"cannot order by {order['col']}", "invalid_request")
    descending = order.get("dir") == "desc"
    found.sort(key=lambda row: (row[order["col"]], row["id"]), reverse=descending)
    rest = found
    if "after_token" in query:
        after = _token_id(query["after_token"])
        rest = [row for row in found if (row["id"] < after if descending else row["id"] > after)]
    shown, more = rest[:limit], len(rest) > limit
    labels = [row["label"] or "" for row in found]
    return {
        "success": True,
        "instances_found": len(found),
        "total_instances": len(rows),
        "label_counts": {label: labels.count(label) for label in labels},
        "next_token": _token(shown[-1]["id"]) if more else None,
        "instances": shown,
    }


def _token(last: int) -> str:
    return base64.b64encode(json.dumps({"values": {"id": last}}).encode()).decode()


def _token_id(token: str) -> int:
    try:
        return int(json.loads(base64.b64decode(token, validate=True))["values"]["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest("after_token is not a token of this list", "invalid_token") from error


def _json(query: Mapping[str, str], name: str, default: Any) -> Any:
    if name not in query:
        return default
    try:
        return json.loads(query[name])
    except ValueError as error:
        raise BadRequest(f"{name} is not JSON", "invalid_request") from error
