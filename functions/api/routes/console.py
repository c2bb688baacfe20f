"""The files of the console."""

from __future__ import annotations

from functools import partial

from baton.contract.errors import ErrorCode as E
from functions.api.admin import console_page
from functions.api.http.route import NOBODY, Route

_public = partial(Route, function="console", scopes=NOBODY, answers_bytes=True)
_root = partial(_public, path="/", call=console_page.show_root, status=307)
_page = partial(_public, path="/console", call=console_page.show_page, refuses=(E.CONSOLE_NOT_BUILT,))

ROUTES: tuple[Route, ...] = (
    # API Gateway answers HEAD by a route of its own alone.
    *(make(method) for make in (_root, _page) for method in ("GET", "HEAD")),
    _public("GET", "/console/{file}", console_page.show_file, refuses=(E.CONSOLE_NOT_BUILT, E.NOT_FOUND)),
)
