"""Logs: stored once, read in order, across attempts."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from tests.kits.api.harness import NOW, Api, Held


def ship(held: Held, first_line: int, *lines: str, **more: Any) -> Any:
    body = {"first_line": first_line, "lines": list(lines), **more}
    return held.post(f"/job/{held.id}/logs", body)


def read(api: Api, job_id: str, **query: Any) -> dict[str, Any]:
    found: dict[str, Any] = api.get(f"/job/{job_id}/logs", query=query).ok()
    return found


def test_lines_are_read_in_order_across_attempts(api: Api) -> None:
    api.submit()
    first = api.claim()
    ship(first, 2, "c").ok()
    ship(first, 0, "a", "b").ok()
    first.release().ok()
    api.clock.advance(7)
    second = api.claim()
    ship(second, 0, "d").ok()
    lines = read(api, first.id)["lines"]
    assert [(line["epoch"], line["line"], line["text"]) for line in lines] == [
        (1, 0, "a"),
        (1, 1, "b"),
        (1, 2, "c"),
        (2, 0, "d"),
    ]
    assert [line["at"] for line in lines] == [NOW, NOW, NOW, NOW + 7]


def test_the_order_holds_for_large_numbers(api: Api) -> None:
    api.submit()
    held = api.claim()
    for first_line in (10**12, 9, 999_999_999_999, 10):
        ship(held, first_line, str(first_line)).ok()
    numbers: list[int] = []
    query: dict[str, Any] = {"limit": 1}
    while lines := (answer := read(api, held.id, **query))["lines"]:
        numbers += [line["line"] for line in lines]
        query["cursor"] = answer["next_cursor"]
    assert numbers == [9, 10, 999_999_999_999, 10**12]


def test_a_chunk_sent_again_changes_nothing(api: Api) -> None:
    api.submit()
    held = api.claim()
    ship(held, 0, "a", "b", dropped_bytes=5).ok()
    with api.unchanged():
        api.clock.advance(5)
        ship(held, 0, "a", "b", dropped_bytes=5).ok()
    assert [line["text"] for line in read(api, held.id)["lines"]] == ["a", "b"]


def test_following_a_log_that_grows(api: Api) -> None:
    api.submit()
    held = api.claim()
    assert read(api, held.id) == {"lines": [], "next_cursor": None}
    ship(held, 0, "a").ok()
    page = read(api, held.id)
    assert [line["text"] for line in page["lines"]] == ["a"]
    for _ in range(2):
        same = read(api, held.id, cursor=page["next_cursor"])
        assert same == {"lines": [], "next_cursor": page["next_cursor"]}
    ship(held, 1, "b", "c").ok()
    page = read(api, held.id, cursor=page["next_cursor"], limit=1)
    assert [line["text"] for line in page["lines"]] == ["b"]
    assert [line["text"] for line in read(api, held.id, cursor=page["next_cursor"])["lines"]] == ["c"]


def test_a_chunk_that_is_gone_is_passed_over(api: Api) -> None:
    api.submit()
    held = api.claim()
    ship(held, 0, "a", "b").ok()
    ship(held, 2, "c", "d").ok()
    cursor = read(api, held.id, limit=2)["next_cursor"]
    (first, _) = sorted(api.objects(prefix=f"jobs/{held.id}/logs/"))
    api.context.objects.delete("acme", "training-checkpoints", first)
    assert [line["text"] for line in read(api, held.id, cursor=cursor)["lines"]] == ["c", "d"]


def test_a_page_ends_before_lambda_s_answers_do(api: Api) -> None:
    api.submit()
    held = api.claim()
    for chunk in range(5):
        ship(held, chunk * 180, *["€" * 4000] * 180).ok()
    count, query = 0, {"limit": 1000}
    while True:
        answer = api.get(f"/job/{held.id}/logs", query=query)
        assert len(answer.text.encode()) < 4_000_000
        lines = answer.ok()["lines"]
        assert [line["line"] for line in lines] == list(range(count, count + len(lines)))
        count += len(lines)
        if not lines:
            break
        query["cursor"] = answer.json["next_cursor"]
    assert count == 900


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"first_line": -1, "lines": ["a"]}, "first_line"),
        ({"first_line": 0, "lines": []}, "lines"),
        ({"first_line": 0, "lines": ["a"] * 501}, "lines"),
        ({"first_line": 0, "lines": ["a" * 4001]}, "lines.0"),
        ({"first_line": 0, "lines": ["a"], "dropped_bytes": -1}, "dropped_bytes"),
    ],
)
def test_a_chunk_that_makes_no_sense(api: Api, body: dict[str, Any], field: str) -> None:
    api.submit()
    held = api.claim()
    with api.unchanged():
        held.post(f"/job/{held.id}/logs", body).refused(ErrorCode.INVALID_VALUE, field)
