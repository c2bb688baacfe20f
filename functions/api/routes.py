"""Every call of the API in one table: path, function, scope, models. API Gateway, the local front and the OpenAPI
description are made from it; a function loads its own calls alone (`routes_of`)."""

from __future__ import annotations

from typing import get_args

from functions.api.route import Function, Route, routes_of

__all__ = ["ROUTES", "Function", "Route", "routes_of"]

ROUTES: tuple[Route, ...] = tuple(route for function in get_args(Function) for route in routes_of(function).values())
