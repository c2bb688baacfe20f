"""The table of errors is complete and says something useful for each."""

from __future__ import annotations

from collections import Counter

import pytest

from baton.contract.error_body import ErrorBody
from baton.contract.errors import ERRORS, ErrorCode

STATUSES = {400, 401, 403, 404, 409, 413, 422, 424, 429, 500, 503}


def test_every_code_is_in_the_table_and_nothing_else() -> None:
    assert list(ERRORS) == list(ErrorCode)


@pytest.mark.parametrize("code", ErrorCode)
def test_status_meaning_and_remedy(code: ErrorCode) -> None:
    assert code.status in STATUSES
    for text in (code.meaning, code.remedy):
        assert text == text.strip()
        assert text[0].isupper()
        assert text.endswith(".")
        assert len(text) > 10
    assert code.meaning != code.remedy


def test_codes_are_told_apart() -> None:
    assert [text for text, times in Counter(code.meaning for code in ErrorCode).items() if times > 1] == []


@pytest.mark.parametrize(
    ("code", "status"),
    [
        # The original's clients take exactly this as the order to stop.
        (ErrorCode.JOB_NOT_RUNNING, 400),
        (ErrorCode.UNAUTHORIZED, 401),
        (ErrorCode.TOKEN_INVALID, 401),
        (ErrorCode.TOKEN_WRONG_KEY, 403),
        (ErrorCode.WRONG_SCOPE, 403),
        (ErrorCode.JOB_NOT_FOUND, 404),
        (ErrorCode.LEASE_LOST, 409),
        (ErrorCode.JOB_CANCELED, 409),
        (ErrorCode.NOT_STORED_YET, 409),
        (ErrorCode.PAYLOAD_TOO_LARGE, 413),
        (ErrorCode.INVALID_VALUE, 422),
        (ErrorCode.TOO_MANY_REQUESTS, 429),
        (ErrorCode.UNAVAILABLE, 503),
    ],
)
def test_status_that_clients_depend_on(code: ErrorCode, status: int) -> None:
    assert code.status == status


def test_the_body_of_an_answer() -> None:
    body = ErrorBody.model_validate({"error": {"code": "lease_lost", "message": "m", "field": "x-lease-token"}})
    assert body.error.code == ErrorCode.LEASE_LOST
    assert body.error.request_id == ""
