"""Curves of a job: thinned on the server, from summaries that the calls leave in the object store."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from tests.kits.api.harness import NO_JOB, NOW, TENANT, Answer, Api, Held


def store(api: Api, held: Held, values: dict[int, dict[str, Any]], *, per_chunk: int, first_point: int = 0) -> None:
    """Store chunks as `POST /job/{id}/logs` does, without one call for each."""
    points = [{"step": step, "at": NOW, "metrics": metrics} for step, metrics in values.items()]
    for begin in range(0, len(points), per_chunk):
        chunk = {"epoch": held.epoch, "first_line": 0, "at": NOW, "points": points[begin : begin + per_chunk]}
        name = f"{held.epoch:010d}-{0:013d}-{first_point + begin:013d}p"
        api.context.objects.create(
            TENANT, CHECKPOINTS_BUCKET, f"jobs/{held.id}/logs/{name}", json.dumps(chunk).encode()
        )


def get(api: Api, job_id: str, *, etag: str | None = None, **query: Any) -> Answer:
    return api.get(f"/job/{job_id}/curves", query=query, headers={"if-none-match": etag} if etag else {})


def read(api: Api, job_id: str, **query: Any) -> dict[str, Any]:
    found: dict[str, Any] = get(api, job_id, **query).ok()
    return found


def read_whole(api: Api, job_id: str, **query: Any) -> tuple[dict[str, Any], int]:
    """Return the complete answer, and the number of calls until then."""
    for calls in range(1, 50):
        found = read(api, job_id, **query)
        if found["complete"]:
            return found, calls
    raise AssertionError("the curves never become complete")


def summaries(api: Api, job_id: str) -> list[str]:
    return [key.split("/")[3] for key in api.objects(prefix=f"jobs/{job_id}/curves/")]


@pytest.fixture
def held(api: Api) -> Held:
    api.submit()
    return api.claim()


def test_few_points_come_back_exactly(api: Api, held: Held) -> None:
    held.post(
        f"/job/{held.id}/logs",
        {
            "first_line": 0,
            "lines": ["a"],
            "points": [
                {"step": 1, "at": NOW, "metrics": {"loss": 0.1, "lr": 1e-4}},
                {"step": 2, "at": NOW, "metrics": {"loss": "nan", "eval/f1": 0.5}},
                {"step": 3, "at": NOW, "metrics": {"loss": 0.3}},
                {"step": 4, "at": NOW},
            ],
        },
    ).ok()
    found = read(api, held.id)
    loss = {"epoch": 1, "name": "loss", "steps": [1, 2, 3], "means": [0.1, None, 0.3], "lows": None, "highs": None}
    assert found == {
        "names": ["loss", "eval/f1", "lr"],
        "seat": None,
        "first_step": 1,
        "last_step": 3,
        "curves": [{**loss, "not_finite": [2]}],
        "complete": True,
        "next_at": NOW,
    }
    chosen = read(api, held.id, names="lr,eval/f1,unknown")["curves"]
    assert [(one["name"], one["steps"], one["means"]) for one in chosen] == [
        ("eval/f1", [2], [0.5]),
        ("lr", [1], [1e-4]),
    ]
    assert summaries(api, held.id) == []


def test_a_pixel_keeps_the_lowest_the_highest_and_the_mean(api: Api, held: Held) -> None:
    values = {step: {"loss": float(step % 10)} for step in range(1600)}
    values[777] = {"loss": -50.0}
    values[1234] = {"loss": "inf"}
    store(api, held, values, per_chunk=100)
    (curve,) = read(api, held.id, width=16)["curves"]
    assert curve["steps"] == list(range(99, 1600, 100))
    assert curve["lows"] == [-50 if index == 7 else 0 for index in range(16)]
    assert curve["highs"] == [9] * 16
    assert curve["means"][0] == 4.5
    assert curve["means"][12] == round((450 - 1234 % 10) / 99, 8)
    assert curve["not_finite"] == [1299]


def test_attempts_are_apart_and_repeated_steps_are_in_both(api: Api, held: Held) -> None:
    store(api, held, {step: {"loss": 1.0} for step in range(1, 31)}, per_chunk=10)
    held.release().ok()
    again = api.claim()
    store(api, again, {step: {"loss": 2.0} for step in range(21, 41)}, per_chunk=10)
    curves = read(api, held.id)["curves"]
    assert [(one["epoch"], one["steps"][0], one["steps"][-1]) for one in curves] == [(1, 1, 30), (2, 21, 40)]


def test_many_points_are_read_once_and_then_from_summaries(api: Api, held: Held) -> None:
    steps = 300 * 50
    values = {step: {"loss": float(step), "lr": 0.5} for step in range(steps)}
    values[7000] = {"loss": 1e9, "lr": 0.5}
    store(api, held, values, per_chunk=50)
    first = read(api, held.id, width=200)
    assert (first["complete"], first["last_step"]) == (False, 32 * 50 - 1), "a call reads 32 new chunks at most"
    whole, calls = read_whole(api, held.id, width=200)
    assert calls == 9
    assert (whole["first_step"], whole["last_step"]) == (0, steps - 1)
    (curve,) = whole["curves"]
    assert len(curve["steps"]) == 200
    assert max(curve["highs"]) == 1e9
    assert curve["steps"][-1] == curve["highs"][-1] == steps - 1
    assert all(
        low <= mean <= high for low, mean, high in zip(curve["lows"], curve["means"], curve["highs"], strict=True)
    )
    assert sorted(summaries(api, held.id)) == ["1"] * 18 + ["2"]
    # Without the chunks behind the summaries the curve is still whole.
    for key in list(api.objects(prefix=f"jobs/{held.id}/logs/"))[:288]:
        api.context.objects.delete(TENANT, CHECKPOINTS_BUCKET, key)
    with api.unchanged():
        assert read(api, held.id, width=200)["curves"] == [curve]
        assert len(read(api, held.id)["curves"][0]["steps"]) > 700, "also at the usual width of 1,000"


def test_a_chunk_without_metrics_moves_no_end_of_the_steps(api: Api, held: Held) -> None:
    """A training that reports that it began sends a point without metrics, which may be in a chunk of its own."""
    store(api, held, {100: {}}, per_chunk=1)
    store(api, held, {step: {"loss": 1.0} for step in range(101, 118)}, per_chunk=1, first_point=1)
    for _ in range(2):
        found = read(api, held.id)
        assert (found["first_step"], found["last_step"]) == (101, 117)
    assert summaries(api, held.id) == ["1"]


def test_a_range_of_steps_shows_the_points_themselves(api: Api, held: Held) -> None:
    sparse = {step: {"eval.loss": float(step)} for step in range(0, 15_000, 1000)}
    values = {step: {"loss": float(step), **sparse.get(step, {})} for step in range(15_000)}
    store(api, held, values, per_chunk=50)
    read_whole(api, held.id)
    query = {"names": "loss,eval.loss", "from_step": 7100, "to_step": 7139}
    curves = {one["name"]: one for one in read(api, held.id, **query)["curves"]}
    steps = curves["loss"]["steps"]
    assert [step for step in steps if 7100 <= step <= 7139] == list(range(7100, 7140))
    assert len(steps) == 42, "one neighbor on each side, to which the line leads"
    assert curves["loss"]["means"][1:-1] == list(range(7100, 7140))
    assert curves["eval.loss"]["steps"] == [7000, 8000]
    assert read(api, held.id, from_step=20_000)["curves"] == []
    assert read(api, held.id, from_step=14_990, to_step=30_000)["curves"][0]["steps"][-1] == 14_999


def test_many_attempts_do_not_make_an_answer_too_large(api: Api, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functions.api.worker.curves._MAX_BUCKETS", 100)
    attempts = held
    for _ in range(5):
        store(api, attempts, {step: {"loss": 1.0} for step in range(100)}, per_chunk=50)
        attempts.release().ok()
        attempts = api.claim()
    curves = read(api, held.id, width=1000)["curves"]
    assert [one["epoch"] for one in curves] == [1, 2, 3, 4, 5]
    assert 50 <= sum(len(one["steps"]) for one in curves) <= 100


@pytest.mark.parametrize("summarized", [15, 16])
def test_a_chunk_of_a_lost_attempt_that_is_stored_late_is_in_the_curves(api: Api, held: Held, summarized: int) -> None:
    """The lease was proved before the next attempt began, and the object store took its time."""
    store(api, held, {step: {"loss": 1.0} for step in range(summarized)}, per_chunk=1)
    read(api, held.id)
    held.release().ok()
    again = api.claim()
    store(api, again, {step: {"loss": 2.0} for step in range(10, 26)}, per_chunk=1)
    seen = read(api, held.id)["curves"]
    assert [(one["epoch"], one["steps"][-1]) for one in seen] == [(1, summarized - 1), (2, 25)]
    store(api, held, {summarized: {"loss": 1.0}}, per_chunk=1, first_point=summarized)
    for later_s in (0, 61, 0):
        api.clock.advance(later_s)
        late = read(api, held.id)["curves"]
        assert [(one["epoch"], one["steps"][-1]) for one in late] == [(1, summarized), (2, 25)]
    assert summaries(api, held.id) == ["1"] * 2


def test_many_chunks_of_a_new_attempt_come_without_further_calls_at_once(api: Api, held: Held) -> None:
    held.release().ok()
    again = api.claim()
    store(api, again, {step: {"loss": 2.0} for step in range(40)}, per_chunk=1)
    early = get(api, held.id)
    assert (early.ok()["complete"], early.ok()["last_step"], summaries(api, held.id)) == (True, 31, [])
    api.clock.advance(61)
    get(api, held.id, etag=early.headers["etag"])
    assert summaries(api, held.id) == ["1"] * 2
    assert read(api, held.id)["last_step"] == 39


def test_an_unchanged_answer_is_not_read_again(api: Api, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    store(api, held, {step: {"loss": 1.0} for step in range(100)}, per_chunk=10)
    answer = get(api, held.id)
    etag = answer.headers["etag"]
    with monkeypatch.context() as patch:
        patch.setattr(api.context.objects, "read_many", None)
        again = get(api, held.id, etag=etag)
    assert (again.status, again.text, again.headers["etag"]) == (304, "", etag)
    assert get(api, held.id, etag=etag, width=500).status == 200
    store(api, held, {100: {"loss": 1.0}}, per_chunk=10, first_point=100)
    changed = get(api, held.id, etag=etag)
    assert (changed.status, changed.ok()["last_step"]) == (200, 100)


def test_the_next_points_of_an_old_attempt_come_late(api: Api, held: Held) -> None:
    api.clock.advance(3600)
    held.heartbeat(step=1).ok()
    held.post(
        f"/job/{held.id}/logs",
        {"first_line": 0, "lines": [], "points": [{"step": 1, "at": NOW, "metrics": {"loss": 1.0}}]},
    ).ok()
    assert read(api, held.id)["next_at"] == NOW + 3600 + 180
    held.fail().ok()
    api.post(f"/job/{held.id}/stop").ok()
    assert read(api, held.id)["next_at"] is None


@pytest.mark.parametrize(
    ("query", "code", "field"),
    [
        ({"width": 15}, ErrorCode.INVALID_VALUE, "width"),
        ({"width": 5000}, ErrorCode.INVALID_VALUE, "width"),
        ({"names": "loss,"}, ErrorCode.INVALID_VALUE, "names"),
        ({"names": ",".join(f"m{n}" for n in range(17))}, ErrorCode.INVALID_VALUE, "names"),
        ({"from_step": 10, "to_step": 9}, ErrorCode.INVALID_VALUE, "to_step"),
        ({"seat": 0}, ErrorCode.NOT_ELASTIC, "seat"),
    ],
)
def test_queries_that_make_no_sense(api: Api, held: Held, query: dict[str, Any], code: ErrorCode, field: str) -> None:
    get(api, held.id, **query).refused(code, field, "Omit seat." if code is ErrorCode.NOT_ELASTIC else None)


def test_a_node_of_an_elastic_job_has_curves_of_its_own(api: Api) -> None:
    job = api.submit(nodes={"min": 1, "max": 2})["id"]
    nodes = [api.claim(machine_id=f"m-{number}") for number in range(2)]
    for number, node in enumerate(nodes):
        store(api, node, {1: {"loss": float(number)}}, per_chunk=1)
    assert [read(api, job, seat=seat)["curves"][0]["means"] for seat in (0, 1)] == [[0.0], [1.0]]
    assert read(api, job)["seat"] == 0


def test_of_an_unknown_job_nothing_is_told(api: Api) -> None:
    get(api, NO_JOB).refused(ErrorCode.JOB_NOT_FOUND, "id")
    job = api.submit()["id"]
    api.get(f"/job/{job}/curves", key="rival_submit").refused(ErrorCode.JOB_NOT_FOUND, "id")
