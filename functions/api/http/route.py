"""The description of an API call, and the tables of calls by function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, get_args

from pydantic import BaseModel

from baton.contract.errors import ErrorCode as E
from baton.contract.names import Scope
from functions.api.http.context import ApiCall, Context

Function = Literal["submitter", "worker", "transfer", "admin", "rings", "machines", "console"]
"""Privilege group: a Lambda function with its own role."""

SUBMIT = frozenset({Scope.SUBMIT})
WORKER = frozenset({Scope.WORKER})
ADMIN = frozenset({Scope.ADMIN})
BOTH = SUBMIT | WORKER
RING = frozenset({Scope.RING})
ENROLL = frozenset({Scope.ENROLL})
NOBODY: frozenset[Scope] = frozenset()


@dataclass(frozen=True)
class Route:
    """Route of an API call. With several body models the required fields in the body select the model."""

    method: Literal["GET", "HEAD", "POST", "PUT", "DELETE"]
    path: str
    """Path in API Gateway's notation: `{id}`, and `{key+}` for the rest of the path."""
    call: Callable[[Context, ApiCall], Any]
    _: KW_ONLY
    function: Function
    scopes: frozenset[Scope]
    """The key needs any one of these scopes; empty: the call needs no key."""
    operator: bool = False
    """Only keys of the tenant that operates the deployment may make the call, which concerns all tenants."""
    query: type[BaseModel] | None = None
    body: tuple[type[BaseModel], ...] = ()
    body_required: bool = True
    takes_bytes: bool = False
    """The body is a part of a file; the call receives bytes."""
    answer: Any = None
    answers_bytes: bool = False
    """The call may also answer with the bytes of an object; without `answer` always, with a content type of its own."""
    status: int = 200
    refuses: tuple[E, ...] = ()
    """Error codes of this call; openapi.py adds the codes that follow from scopes, models and headers."""
    headers: tuple[str, ...] = ()

    @property
    def route_key(self) -> str:
        """Return API Gateway's name of the route."""
        return f"{self.method} {self.path}"

    @property
    def shared(self) -> bool:
        """Return True for the reads of one job, which the job's share key may make."""
        return self.method == "GET" and self.function == "submitter" and self.path.startswith("/job/{id}")

    @property
    def revalidates(self) -> bool:
        """Return True for reads that clients poll: the answers have an ETag, and a known ETag is answered with 304.

        The GETs of workers claim jobs, and those of `transfer` issue tokens, so their answers never repeat.
        HEAD is as GET.
        """
        is_for_users = self.function != "worker" or Scope.SUBMIT in self.scopes
        return self.method in ("GET", "HEAD") and self.function != "transfer" and is_for_users


JOB = (E.JOB_NOT_FOUND,)
PAGE = (*JOB, E.INVALID_CURSOR)
LEASE = (
    *JOB,
    E.JOB_NOT_RUNNING,
    E.JOB_CANCELED,
    E.JOB_FINISHED,
    E.LEASE_LOST,
    E.LEASE_EXPIRED,
    E.LEASE_REQUIRED,
    E.CONFLICT,
)


@cache
def routes_of(function: Function) -> dict[str, Route]:
    """Return the routes of one function by route key. Loads the modules of this function's routes only."""
    routes: tuple[Route, ...] = import_module(f"functions.api.routes.{function}").ROUTES
    return {route.route_key: route for route in routes}


@cache
def all_routes() -> tuple[Route, ...]:
    """Return every call of the API, for API Gateway, the local gateway and the OpenAPI description."""
    return tuple(route for function in get_args(Function) for route in routes_of(function).values())
