"""The calls for rings, for users and for the processes of jobs that name a ring."""

from __future__ import annotations

from functools import partial

from baton.contract.errors import ErrorCode as E
from baton.contract.objects.rings import (
    DeleteRequest,
    RecordsAnswer,
    RecordsRequest,
    RemovalAnswer,
    RingKeysPage,
    RingKeysQuery,
    RingRecordsQuery,
    RingRecordsView,
    RingsPage,
    RingsQuery,
    UrlsAnswer,
    UrlsRequest,
)
from functions.api.http.route import RING, SUBMIT, Route
from functions.api.objects import rings

_NAMED = (E.RING_NOT_FOUND,)
_rings = partial(Route, function="rings", scopes=SUBMIT | RING)

ROUTES: tuple[Route, ...] = (
    _rings(
        "GET",
        "/rings",
        rings.list_rings,
        scopes=SUBMIT,
        query=RingsQuery,
        answer=RingsPage,
        refuses=(E.INVALID_CURSOR, E.INVALID_KEY),
    ),
    _rings("DELETE", "/rings/{ring}", rings.remove, scopes=SUBMIT, answer=RemovalAnswer, refuses=_NAMED),
    _rings(
        "GET",
        "/rings/{ring}/records",
        rings.list_records,
        query=RingRecordsQuery,
        answer=RingRecordsView,
        refuses=(*_NAMED, E.INVALID_KEY),
    ),
    _rings(
        "POST", "/rings/{ring}/records", rings.records, body=(RecordsRequest,), answer=RecordsAnswer, refuses=_NAMED
    ),
    _rings("POST", "/rings/{ring}/urls", rings.urls, body=(UrlsRequest,), answer=UrlsAnswer, refuses=_NAMED),
    _rings("POST", "/rings/{ring}/delete", rings.delete_keys, body=(DeleteRequest,), status=204, refuses=_NAMED),
    _rings(
        "GET",
        "/rings/{ring}/keys",
        rings.list_keys,
        query=RingKeysQuery,
        answer=RingKeysPage,
        refuses=(*_NAMED, E.INVALID_CURSOR),
    ),
)
