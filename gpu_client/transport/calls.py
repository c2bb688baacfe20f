"""What all groups of calls share: sending a model, reading a model, the lease header, paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter, ValidationError

from gpu_client.transport.errors import UnexpectedAnswer
from gpu_client.transport.http import Answer, Call, HttpClient

T = TypeVar("T")


class Page(Protocol):
    """An answer that is one page of many."""

    @property
    def next_cursor(self) -> str | None:
        """Where the next page begins; None at the end."""
        ...


P = TypeVar("P", bound=Page)


class ApiCalls:
    """Base of the groups of calls. All methods raise ApiError, Unreachable, UnexpectedAnswer."""

    def __init__(self, http: HttpClient, *, budget_s: float | None = None) -> None:
        self._http = http
        self._budget_s = budget_s

    def _send(
        self,
        kind: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | BaseModel | None = None,
        body: BaseModel | None = None,
        lease_token: str | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
    ) -> Answer:
        lease = {"x-lease-token": lease_token} if lease_token is not None else {}
        call = Call(
            kind=kind,
            method=method,
            path=path,
            query=_query(query),
            # only what was said: an older control plane refuses fields that it does not know
            body=body.model_dump_json(exclude_unset=True) if body is not None else None,
            headers={**lease, **(headers or {})},
            repeatable=repeatable,
        )
        return self._http.call(call, budget_s=self._budget_s)


def read_answer(kind: str, answer: Answer, model: type[T]) -> T:
    """The answer's data as `model`. Raises UnexpectedAnswer if it is not one."""
    try:
        return cast(T, _adapter(cast(Any, model)).validate_python(answer.data))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:3]
        )
        raise UnexpectedAnswer(f"{kind}: the answer is not what this version understands ({problems})") from error


def segment(text: str) -> str:
    """`text` as one segment of a path."""
    return quote(text, safe="")


def pages(fetch: Callable[[str | None], P]) -> Iterator[P]:
    """All pages of a list: `pages(lambda cursor: client.jobs(cursor=cursor))`."""
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
