"""The calls for fleets, for users and for the workers of rented machines."""

from __future__ import annotations

from functions.api.http.route import Route

ROUTES: tuple[Route, ...] = ()
