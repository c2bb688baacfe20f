"""Errors of the artifact list do not end `baton watch`."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.jobs.job import JobState
from gpu_client.cli.jobs.watch import ArtifactLinks
from gpu_client.transport.errors import NotFound, UnexpectedAnswer, Unreachable

NO_SUCH_ROUTE = NotFound(code="http_404", status=404, message="no such route", foreign=True)


class Client:
    """Answers each question for pictures with an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked = 0

    def artifacts(self, job_id: str, **_: Any) -> Any:
        self.asked += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "asked"), [(NO_SUCH_ROUTE, 1), (UnexpectedAnswer("no page"), 1), (Unreachable("away"), 2)]
)
def test_what_goes_wrong_with_pictures_ends_no_watching(error: Exception, asked: int) -> None:
    client: Any = Client(error)
    session: Any = None  # nothing is shown
    links = ArtifactLinks(session, client, as_json=False, refresh_s=2)
    for _ in range(2):
        links.poll("7c0f", JobState.RUNNING)
    assert client.asked == asked
