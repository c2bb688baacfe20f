"""Metric points: stored with the output, read in order, across attempts."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from tests.kits.api.harness import NOW, Api, Held


def point(step: int, **metrics: Any) -> dict[str, Any]:
    return {"step": step, "at": NOW + step / 4, "metrics": metrics}


def ship(held: Held, first_line: int, lines: list[str], first_point: int, points: list[dict[str, Any]]) -> Any:
    body = {"first_line": first_line, "lines": lines, "first_point": first_point, "points": points}
    return held.post(f"/job/{held.id}/logs", body)


def read(api: Api, job_id: str, what: str = "metrics", **query: Any) -> dict[str, Any]:
    found: dict[str, Any] = api.get(f"/job/{job_id}/{what}", query=query).ok()
    return found


def steps(api: Api, job_id: str, **query: Any) -> list[tuple[int, int]]:
    return [(one["epoch"], one["step"]) for one in read(api, job_id, **query)["points"]]


def texts(api: Api, job_id: str) -> list[str]:
    return [line["text"] for line in read(api, job_id, "logs")["lines"]]


def test_points_come_back_as_they_were_reported(api: Api) -> None:
    api.submit()
    held = api.claim()
    sent = [point(1, loss=0.5, lr=1e-4), point(2, loss="nan", grad_norm="inf"), point(3, loss="-inf"), point(4)]
    ship(held, 0, ["a"], 0, sent).ok()
    assert read(api, held.id)["points"] == [{"epoch": 1, **one, "seat": None} for one in sent]
    assert texts(api, held.id) == ["a"]


def test_they_are_read_in_order_across_attempts(api: Api) -> None:
    api.submit()
    first = api.claim()
    ship(first, 0, ["a"], 0, [point(1), point(2)]).ok()
    ship(first, 1, [], 2, [point(3)]).ok()
    first.release().ok()
    second = api.claim()
    ship(second, 0, [], 0, [point(2)]).ok()
    assert steps(api, first.id) == [(1, 1), (1, 2), (1, 3), (2, 2)]


def test_a_reader_may_begin_with_an_attempt(api: Api) -> None:
    api.submit()
    for epoch in (1, 2, 3):
        held = api.claim()
        ship(held, 0, [f"line {epoch}"], 0, [point(epoch)]).ok()
        held.release().ok()
    page = read(api, held.id, from_attempt=2, limit=1)
    assert [one["step"] for one in page["points"]] == [2]
    page = read(api, held.id, from_attempt=2, cursor=page["next_cursor"])
    assert [one["step"] for one in page["points"]] == [3]
    assert [line["text"] for line in read(api, held.id, "logs", from_attempt=3)["lines"]] == ["line 3"]
    assert read(api, held.id, from_attempt=4)["points"] == []


def test_chunks_without_lines_do_not_hide_the_lines_behind_them(api: Api) -> None:
    """The end of a log is a page without lines: there must be none before."""
    api.submit()
    held = api.claim()
    for number in range(50):
        ship(held, 0, [], number, [point(number)]).ok()
    ship(held, 0, ["first"], 50, [point(50)]).ok()
    for number in range(51, 100):
        ship(held, 1, [], number, [point(number)]).ok()
    ship(held, 1, ["second"], 100, []).ok()
    ship(held, 2, [], 100, [point(100)]).ok()
    ship(held, 2, ["third"], 101, [point(101)]).ok()
    page = read(api, held.id, "logs", limit=1)
    assert [line["text"] for line in page["lines"]] == ["first"]
    page = read(api, held.id, "logs", cursor=page["next_cursor"])
    assert [(line["line"], line["text"]) for line in page["lines"]] == [(1, "second"), (2, "third")]
    found: list[int] = []
    query: dict[str, Any] = {}
    while points := (answer := read(api, held.id, **query))["points"]:
        found += [one["step"] for one in points]
        query["cursor"] = answer["next_cursor"]
    assert found == list(range(102))


def test_following(api: Api) -> None:
    """A client that follows a job sees each line and each point once, in every mixture of lines and points."""
    api.submit()
    held = api.claim()
    lines, points = 0, 0
    seen: dict[str, list[int]] = {"logs": [], "metrics": []}
    cursors: dict[str, str | None] = {"logs": None, "metrics": None}
    for mixed in ("lines", "points", "lines", "both", "points", "points", "both", "lines"):
        more_lines = [str(lines)] if mixed != "points" else []
        more_points = [point(points)] if mixed != "lines" else []
        ship(held, lines, more_lines, points, more_points).ok()
        lines, points = lines + len(more_lines), points + len(more_points)
        for what, field, key in (("logs", "lines", "line"), ("metrics", "points", "step")):
            query = {"cursor": cursors[what]} if cursors[what] else {}
            page = read(api, held.id, what, **query)
            seen[what] += [item[key] for item in page[field]]
            cursors[what] = page["next_cursor"]
    assert seen == {"logs": list(range(lines)), "metrics": list(range(points))}


def test_a_chunk_sent_again_changes_nothing(api: Api) -> None:
    api.submit()
    held = api.claim()
    for first_line, lines, first_point, points in (
        (0, ["a"], 0, [point(1)]),
        (1, [], 1, [point(2)]),
        (1, ["b"], 2, []),
    ):
        ship(held, first_line, lines, first_point, points).ok()
        with api.unchanged():
            ship(held, first_line, lines, first_point, points).ok()
    assert steps(api, held.id) == [(1, 1), (1, 2)]
    assert texts(api, held.id) == ["a", "b"]


def test_a_page_has_as_many_as_asked_for(api: Api) -> None:
    api.submit()
    held = api.claim()
    ship(held, 0, [], 0, [point(number) for number in range(1000)]).ok()
    page = read(api, held.id, limit=600)
    assert len(page["points"]) == 600
    page = read(api, held.id, limit=600, cursor=page["next_cursor"])
    assert [one["step"] for one in page["points"]] == list(range(600, 1000))
    assert read(api, held.id, cursor=page["next_cursor"]) == {"points": [], "next_cursor": page["next_cursor"]}


def test_a_page_ends_before_lambda_s_answers_do(api: Api) -> None:
    api.submit()
    held = api.claim()
    wide = {
        f"metric_with_a_rather_long_name_of_sixty_characters_or_so_{number:02d}": 0.123456789 for number in range(64)
    }
    for chunk in range(3):
        points = [point(number, **wide) for number in range(chunk * 500, chunk * 500 + 500)]
        ship(held, 0, [], chunk * 500, points).ok()
    found: list[int] = []
    query: dict[str, Any] = {"limit": 1000}
    while True:
        answer = api.get(f"/job/{held.id}/metrics", query=query)
        assert len(answer.text.encode()) < 5_000_000
        points = answer.ok()["points"]
        if not points:
            break
        found += [one["step"] for one in points]
        query["cursor"] = answer.json["next_cursor"]
    assert found == list(range(1500))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lines": [], "points": []}, "lines"),
        ({"lines": [], "points": [{"step": 1, "at": -1}]}, "points.0.at"),
        ({"lines": ["a"], "points": [{"step": 1.5, "at": 1}]}, "points.0.step"),
        ({"lines": ["a"], "points": [{"step": 1, "at": -1}]}, "points.0.at"),
        (
            {"lines": ["a"], "points": [{"step": 1, "at": 1, "metrics": {f"m{n}": 1 for n in range(65)}}]},
            "points.0.metrics",
        ),
        ({"lines": ["a"], "first_point": -1}, "first_point"),
    ],
)
def test_points_that_make_no_sense(api: Api, body: dict[str, Any], field: str) -> None:
    api.submit()
    held = api.claim()
    with api.unchanged():
        held.post(f"/job/{held.id}/logs", {"first_line": 0, **body}).refused(ErrorCode.INVALID_VALUE, field)


def test_of_another_tenant_s_job_nothing_is_told(api: Api) -> None:
    api.get("/job/146683a1-cb76-4702-9fef-fcccd32594f1/metrics").refused(ErrorCode.JOB_NOT_FOUND, "id")
