"""Provide the base of the call groups: send request models, validate answers, build paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, cast
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter, ValidationError

from gpu_client.transport.api.http import Answer, Call, HttpClient
from gpu_client.transport.errors import UnexpectedAnswer

T = TypeVar("T")


class Page(Protocol):
    """Answer with one page of a list."""

    @property
    def next_cursor(self) -> str | None:
        """Return the cursor of the next page; None after the last page."""
        ...


P = TypeVar("P", bound=Page)


class _Request(TypedDict, total=False):
    """Optional parts of a call; required are kind, method and path."""

    query: Mapping[str, object] | BaseModel | None
    body: BaseModel
    lease_token: str | None
    headers: Mapping[str, str]
    repeatable: bool


class ApiCalls:
    """Base of call groups. All methods raise ApiError, Unreachable, UnexpectedAnswer."""

    def __init__(self, http: HttpClient, *, budget_s: float | None = None) -> None:
        self._http = http
        self._budget_s = budget_s

    def _read(self, model: type[T], kind: str, method: str, path: str, **request: Unpack[_Request]) -> T:
        """Send a call and return its answer as `model`. Raises UnexpectedAnswer for an answer of another form."""
        answer = self._send(kind, method, path, **request)
        try:
            return cast(T, _adapter(cast(Any, model)).validate_python(answer.data))
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:3]
            )
            raise UnexpectedAnswer(f"{kind}: the answer is not what this version understands ({problems})") from error

    def _send(self, kind: str, method: str, path: str, **request: Unpack[_Request]) -> Answer:
        """Send a call and return its raw answer."""
        token, body = request.get("lease_token"), request.get("body")
        lease = {"x-lease-token": token} if token is not None else {}
        call = Call(
            kind=kind,
            method=method,
            path=path,
            query=_query(request.get("query")),
            # The body contains only the fields that the caller has set.
            body=body.model_dump_json(exclude_unset=True) if body is not None else None,
            headers={**lease, **request.get("headers", {})},
            repeatable=request.get("repeatable", True),
        )
        return self._http.call(call, budget_s=self._budget_s)


def segment(text: str) -> str:
    """Return `text` encoded as one segment of a path."""
    return quote(text, safe="")


def job_path(job_id: str) -> str:
    """Return the path of a job."""
    return f"/job/{segment(job_id)}"


def pages(fetch: Callable[[str | None], P]) -> Iterator[P]:
    """Yield all pages of a list: `pages(lambda cursor: client.jobs(cursor=cursor))`."""
    cursor: str | None = None
    while True:
        page = fetch(cursor)
        yield page
        cursor = page.next_cursor
        if cursor is None:
            return


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def _query(query: Mapping[str, object] | BaseModel | None) -> dict[str, str]:
    values = query.model_dump(mode="json") if isinstance(query, BaseModel) else query or {}
    return {name: str(value) for name, value in values.items() if value is not None}
