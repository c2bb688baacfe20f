"""The files of the console."""

from __future__ import annotations

from functools import partial

from baton.contract.errors import ErrorCode as E
from functions.api.admin import console_page
from functions.api.http.route import NOBODY, Route

_public = partial(Route, "GET", function="console", scopes=NOBODY, answers_bytes=True)

ROUTES: tuple[Route, ...] = (
    _public("/console", console_page.show_page, refuses=(E.CONSOLE_NOT_BUILT,)),
    _public("/console/{file}", console_page.show_file, refuses=(E.CONSOLE_NOT_BUILT, E.NOT_FOUND)),
)
