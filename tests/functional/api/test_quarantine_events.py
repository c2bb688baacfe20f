"""Reports of damaged ring objects: each becomes one event of the job."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.worker.control import MAX_PLACE_CHARS
from tests.kits.api.harness import NOW, Api

KEY = "samples/w/00000001-0000000001"


def said(number: int = 1, **more: Any) -> dict[str, Any]:
    about = {"ring": "/mnt/ring", "object": KEY, "objects": 1, "step": 9, "at": NOW + 3, "message": "altered"}
    return {"number": number, "type": "ring.quarantined", **about, **more}


def quarantines(api: Api, job_id: str) -> list[dict[str, Any]]:
    return [one for one in api.get(f"/job/{job_id}/events").ok() if one["type"] == "ring.quarantined"]


def test_it_becomes_one_event_of_a_job_without_rules(api: Api) -> None:
    job_id = api.submit()["id"]
    held = api.claim()
    assert held.item["quarantines"] is True, "an agent says it only where it is understood"
    api.clock.advance(10)
    for _ in range(2):
        held.report(decisions=[said(rank=2)]).ok()
    (event,) = quarantines(api, job_id)
    assert (event["at"], event["epoch"], event["event_type"]) == (NOW + 10, 1, "ring.quarantined")
    assert event["data"] == {
        "place": "training",
        "number": 1,
        "step": 9,
        "rank": 2,
        "at": NOW + 3,
        "severity": "warning",
        "ring": "/mnt/ring",
        "object": KEY,
        "objects": 1,
        "message": "altered",
    }
    held.release().ok()
    api.claim().report(decisions=[said()]).ok()
    assert [one["epoch"] for one in quarantines(api, job_id)] == [1, 2], "each attempt tells for itself"


def test_it_may_come_with_the_last_word(api: Api) -> None:
    job_id = api.submit()["id"]
    held = api.claim()
    control = {"rules_revision": 0, "commands_seq": 0, "decisions": [said()]}
    held.post("/complete", {"job_id": job_id, "control": control}).ok()
    assert len(quarantines(api, job_id)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"object": "k" * (MAX_PLACE_CHARS + 1)},
        {"object": ""},
        {"object": 7},
        {"object": None},
        {"ring": "r" * (MAX_PLACE_CHARS + 1)},
        {"ring": None},
        {"objects": 0},
        {"objects": "many"},
        {"objects": None},
        {"step": -1},
        {"rank": -1},
        {"message": "m" * 1025},
        {"array": "sample"},
        {"type": "rule.fired"},
    ],
)
def test_what_is_none_is_refused_and_changes_nothing(api: Api, wrong: dict[str, Any]) -> None:
    api.submit()
    held = api.claim()
    with api.unchanged():
        ((name, value),) = wrong.items()
        whole = value is None or name == "type"  # what it lacks, or has too much
        field = "control.decisions.0" if whole else f"control.decisions.0.{name}"
        code = ErrorCode.UNKNOWN_FIELD if name == "array" else ErrorCode.INVALID_VALUE
        held.report(decisions=[said(**wrong)]).refused(code, field)
    held.report(decisions=[said()]).ok()
