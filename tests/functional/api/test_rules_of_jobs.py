"""Rules of a job: stored, changed during a run, acknowledged, refused."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.worker.control import MAX_RULES_BYTES
from functions.api.rules.rule_calls import MAX_BATCH_RULES_BYTES
from tests.kits.api.harness import NOW, Api, Held

FIRST = "rules: [{name: nan, when: not isfinite(loss), do: {stop: failed}}]"
SECOND = "rules: [{name: spike, when: 'zscore(loss, 100) > 6', do: rollback}]"
DOUBTFUL = "rules: [{name: never, when: step < 0, do: save}]"
WRONG = "rules:\n  - {name: nan, when: mena(loss) > 1, do: save}\n  - {name: nan, wenn: loss > 1, do: save}\n"


def put(api: Api, job_id: str, text: str, **more: Any) -> Any:
    return api.call("PUT", f"/job/{job_id}/rules", {"text": text, **more})


def shown(api: Api, job_id: str) -> Any:
    return api.get(f"/job/{job_id}/rules").ok()


def test_a_job_begins_with_the_rules_that_it_was_submitted_with(api: Api) -> None:
    job_id = api.submit(rules=FIRST)["id"]
    found = shown(api, job_id)
    assert (found["newest"]["revision"], found["newest"]["text"]) == (1, FIRST)
    assert found["newest"]["created_at"] == NOW
    assert found["newest"]["created_by"] == api.keys["submit"].split("_")[1]
    assert found["acknowledged"] is None
    control = api.claim().item["control"]
    assert control == {
        "rules": {"revision": 1, "text": FIRST},
        "commands": [],
        "commands_seq": 0,
        "rollbacks": [],
        "ends": 0,
        "ran_s": 0,
    }


def test_nobody_is_told_of_rules_that_there_are_not(api: Api) -> None:
    job_id = api.submit(rules=" \n")["id"]
    assert api.claim().item["control"] is None
    assert shown(api, job_id) == {"newest": None, "warnings": [], "acknowledged": None, "control_plane": None}
    assert api.get(f"/job/{job_id}/rules/history").ok()["revisions"] == []


def test_faults_are_told_with_their_places_and_nothing_is_stored(api: Api) -> None:
    job_id = api.submit()["id"]
    with api.unchanged():
        calls = [
            ("POST", "/job", {"command": ["train"], "rules": WRONG}, "rules"),
            ("POST", "/jobs/batch", {"jobs": [{"command": ["train"]}, {"command": ["train"], "rules": WRONG}]}, ""),
            ("PUT", f"/job/{job_id}/rules", {"text": WRONG}, "text"),
        ]
        for method, target, body, field in calls:
            prefix = "" if field else "jobs.1."
            error = api.call(method, target, body).refused(ErrorCode.INVALID_RULES, field or "jobs.1.rules")
            first = error["problems"][0]
            assert (first["field"], first["line"]) == (f"{prefix}rules.0.when", 2)
            assert "mean" in first["remedy"]
            assert len(error["problems"]) > 1, "all are told"


def test_doubts_refuse_nothing_and_are_told(api: Api) -> None:
    job_id = api.submit(rules=DOUBTFUL)["id"]
    assert [one["code"] for one in shown(api, job_id)["warnings"]] == ["never_fires"]
    assert put(api, job_id, FIRST).ok()["warnings"] == []
    assert [one["code"] for one in put(api, job_id, DOUBTFUL).ok()["warnings"]] == ["never_fires"]


def test_a_metric_that_is_a_slip_away_from_a_known_one_is_doubted(api: Api) -> None:
    slip = "rules: [{name: r, when: cots > 5, do: {alert: x}}]"
    job_id = api.submit(rules=slip)["id"]
    for warnings in (shown(api, job_id)["warnings"], put(api, job_id, slip + " ").ok()["warnings"]):
        ((code, remedy),) = [(one["code"], one["remedy"]) for one in warnings]
        assert code == "doubtful_name" and "cost" in remedy


@pytest.mark.parametrize(("bound", "met"), [("1m", True), ("205s", True), ("4m", False)])
def test_a_silence_that_no_lease_outlives_is_doubted(api: Api, bound: str, met: bool) -> None:
    rules = f"rules: [{{name: silent, when: heartbeat.age > {bound}, do: {{alert: x}}}}]"
    found = shown(api, api.submit(rules=rules)["id"])["warnings"]
    assert [(one["code"], one["field"]) for one in found] == ([] if met else [("never_fires", "rules.0.when")])
    longer = api.submit(rules=rules, policy={"heartbeat_interval_s": 60})["id"]
    assert shown(api, longer)["warnings"] == []
    either = api.submit(rules=rules.replace(bound, f"{bound} or failures > 2"))["id"]
    assert shown(api, either)["warnings"] == []


def test_a_document_is_checked_without_a_job(api: Api) -> None:
    with api.unchanged():
        found = api.post("/rules/check", {"text": WRONG}).ok()
        assert {"unknown_function", "unknown_key"} <= {one["code"] for one in found["faults"]}
        found = api.post("/rules/check", {"text": DOUBTFUL}).ok()
        assert (found["faults"], [one["code"] for one in found["warnings"]]) == ([], ["never_fires"])
        assert api.post("/rules/check", {"text": ""}).ok() == {"faults": [], "warnings": []}


def test_rules_have_a_largest_size(api: Api) -> None:
    comment = "#" * (MAX_RULES_BYTES - len(FIRST) - 1)
    job_id = api.submit(rules=f"{FIRST}\n{comment}")["id"]
    put(api, job_id, f"{FIRST}\n{comment}#").refused(ErrorCode.INVALID_VALUE, "text")
    put(api, job_id, f"{FIRST}\n#{'é' * (len(comment) // 2 + 1)}").refused(ErrorCode.INVALID_VALUE, "text")


def test_a_batch_may_not_bring_more_rules_than_can_be_checked_in_its_time(api: Api) -> None:
    texts = [f"{FIRST}\n#{'x' * (MAX_RULES_BYTES - 100)}{number}" for number in range(9)]
    one = {"command": ["train"], "rules": texts[0]}
    assert len(api.post("/jobs/batch", {"jobs": [one] * 20}).ok()) == 20, "equal ones are checked once"
    assert sum(map(len, texts)) > MAX_BATCH_RULES_BYTES
    with api.unchanged():
        jobs = [{"command": ["train"], "rules": text} for text in texts]
        api.post("/jobs/batch", {"jobs": jobs}).refused(ErrorCode.PAYLOAD_TOO_LARGE, "jobs")


def test_the_same_key_with_other_rules_is_another_job(api: Api) -> None:
    headers = {"idempotency-key": "k"}
    first = api.submit(headers=headers, rules=FIRST)
    assert api.submit(headers=headers, rules=FIRST) == first
    for rules in ({"rules": SECOND}, {}):
        body = {"command": ["train"], **rules}
        api.post("/job", body, headers=headers).refused(ErrorCode.IDEMPOTENCY_MISMATCH, "idempotency-key")


def test_revisions_rise_and_never_change(api: Api) -> None:
    job_id = api.submit()["id"]
    for number, text in enumerate([FIRST, SECOND, "", FIRST], start=1):
        api.clock.advance(1)
        assert put(api, job_id, text).ok()["newest"]["revision"] == number
    page = api.get(f"/job/{job_id}/rules/history", query={"limit": 3}).ok()
    assert [(one["revision"], one["text"]) for one in page["revisions"]] == [(4, FIRST), (3, ""), (2, SECOND)]
    query = {"limit": 3, "cursor": page["next_cursor"]}
    page = api.get(f"/job/{job_id}/rules/history", query=query).ok()
    assert [(one["revision"], one["created_at"]) for one in page["revisions"]] == [(1, NOW + 1)]
    assert page["next_cursor"] is None


def test_the_same_text_again_writes_nothing(api: Api) -> None:
    job_id = api.submit()["id"]
    with api.unchanged():
        assert put(api, job_id, "").ok()["newest"] is None
    first = put(api, job_id, FIRST, if_revision=0).ok()
    with api.unchanged():
        assert put(api, job_id, FIRST, if_revision=0).ok() == first, "the answer was lost"


def test_who_has_not_seen_the_newest_revision_does_not_replace_it(api: Api) -> None:
    job_id = api.submit(rules=FIRST)["id"]
    with api.unchanged():
        for seen in (0, 2):
            put(api, job_id, SECOND, if_revision=seen).refused(ErrorCode.CONFLICT, "if_revision")
    assert put(api, job_id, SECOND, if_revision=1).ok()["newest"]["revision"] == 2


def test_a_job_that_has_ended_takes_no_rules(api: Api) -> None:
    done = api.submit()["id"]
    api.claim().complete().ok()
    stopped = api.submit()["id"]
    api.post(f"/job/{stopped}/stop").ok()
    with api.unchanged():
        for job_id in (done, stopped):
            put(api, job_id, FIRST).refused(ErrorCode.JOB_FINISHED)


def test_waiting_and_paused_jobs_take_rules_for_their_next_attempt(api: Api) -> None:
    job_id = api.submit()["id"]
    put(api, job_id, FIRST).ok()
    api.post(f"/job/{job_id}/pause").ok()
    put(api, job_id, SECOND).ok()
    api.post(f"/job/{job_id}/resume").ok()
    assert api.claim().item["control"]["rules"] == {"revision": 2, "text": SECOND}


def test_a_running_worker_is_sent_what_is_newer_than_it_has(api: Api) -> None:
    job_id = api.submit(rules=FIRST)["id"]
    held = api.claim()
    assert held.report(1).ok()["rules"] is None
    put(api, job_id, SECOND).ok()
    assert held.heartbeat().ok()["rules"] is None, "it knows no rules"
    for _ in range(2):
        assert held.report(1).ok()["rules"] == {"revision": 2, "text": SECOND}
    assert held.report(2).ok()["rules"] is None


def test_a_later_attempt_is_told_of_changes_too(api: Api) -> None:
    job_id = api.submit(rules=FIRST)["id"]
    api.claim().release().ok()
    held = api.claim()
    put(api, job_id, SECOND).ok()
    assert held.report(1).ok()["rules"]["revision"] == 2


def test_what_is_in_force_is_acknowledged_with_how_the_rules_stand(api: Api) -> None:
    job_id = api.submit(rules=FIRST)["id"]
    held = api.claim()
    api.clock.advance(5)
    held.report(1, step=7).ok()
    expected = {
        "revision": 1,
        "epoch": 1,
        "step": 7,
        "at": NOW + 5,
        "rejected": None,
        "reason": "",
        "statuses": [],
    }
    assert shown(api, job_id)["acknowledged"] == expected
    api.clock.advance(5)
    status = {"rule": "nan", "state": "armed", "said": "last value 2.31", "fires": 0}
    held.report(1, statuses=[status]).ok()
    assert shown(api, job_id)["acknowledged"] == {**expected, "at": NOW + 10, "statuses": [status]}
    held.release().ok()
    held = api.claim()
    held.report(1).ok()
    found = shown(api, job_id)["acknowledged"]
    assert (found["epoch"], found["step"], found["statuses"]) == (2, None, []), "another training"


def test_how_rules_stand_changes_neither_job_nor_history(api: Api) -> None:
    job_id = api.submit(rules=FIRST)["id"]
    held = api.claim()
    before = api.context.jobs.get(job_id)
    held.report(1, statuses=[{"rule": "nan", "state": "armed"}]).ok()
    assert api.context.jobs.get(job_id) == before


def test_a_rejected_revision_is_told_and_not_sent_again(api: Api) -> None:
    job_id = api.submit(rules=FIRST)["id"]
    held = api.claim()
    put(api, job_id, SECOND).ok()
    held.report(1).ok()
    said = {"rejected": 2, "reason": "no metric 'loss' here"}
    assert held.report(1, **said).ok()["rules"] is None
    found = shown(api, job_id)
    assert found["newest"]["revision"] == 2
    acknowledged = found["acknowledged"]
    assert (acknowledged["revision"], acknowledged["rejected"]) == (1, 2)
    assert acknowledged["reason"] == said["reason"]
    put(api, job_id, FIRST).ok()
    assert held.report(1, **said).ok()["rules"] == {"revision": 3, "text": FIRST}
    held.report(3).ok()
    acknowledged = shown(api, job_id)["acknowledged"]
    assert (acknowledged["revision"], acknowledged["rejected"], acknowledged["reason"]) == (3, None, "")


def test_what_is_known_already_is_not_written_again(api: Api) -> None:
    job_id = api.submit(rules=FIRST)["id"]
    held = api.claim()
    put(api, job_id, SECOND).ok()
    for report in ({"step": 7}, {"rejected": 2, "reason": "no"}):
        held.report(1, **report).ok()
        with api.unchanged():
            held.report(1, **report).ok()


def decision(number: int, **more: Any) -> dict[str, Any]:
    return {"number": number, "type": "rule.fired", "rule": "nan", "revision": 1, "step": 9, "at": NOW + 3, **more}


def told(api: Api, job_id: str) -> list[tuple[str, int, int]]:
    """Type, attempt and number of each decision among the events."""
    events = api.get(f"/job/{job_id}/events").ok()
    return [(one["type"], one["epoch"], one["data"]["number"]) for one in events if "number" in one["data"]]


def test_each_decision_becomes_one_event(api: Api) -> None:
    job_id = api.submit(rules=FIRST)["id"]
    held = api.claim()
    api.clock.advance(10)
    said = decision(1, operands={"loss": "nan", "step": 9, "ready": True}, actions=["stop"], message="loss is nan")
    held.report(1, decisions=[said]).ok()
    held.report(1, decisions=[said, decision(2, type="action.applied")]).ok()
    held.report(1, decisions=[said]).ok()
    assert told(api, job_id) == [("rule.fired", 1, 1), ("action.applied", 1, 2)]
    event = api.get(f"/job/{job_id}/events").ok()[2]
    assert event["at"] == NOW + 10
    assert event["data"] == {
        "place": "training",
        "number": 1,
        "rule": "nan",
        "revision": 1,
        "step": 9,
        "rank": 0,
        "at": NOW + 3,
        "severity": "warning",
        "dry_run": False,
        "operands": {"loss": "nan", "step": 9.0, "ready": True},
        "actions": ["stop"],
        "message": "loss is nan",
    }
    held.release().ok()
    api.claim().report(1, decisions=[decision(1)]).ok()
    assert told(api, job_id)[2:] == [("rule.fired", 2, 1)], "each attempt counts for itself"


def test_decisions_of_one_report_are_written_in_order_and_once(api: Api) -> None:
    job_id = api.submit()["id"]
    held = api.claim()
    numbers = [3, 1, 2, 3]
    held.report(0, decisions=[decision(number) for number in numbers]).ok()
    assert [number for _, _, number in told(api, job_id)] == [1, 2, 3]


@pytest.mark.parametrize("end", ["complete", "fail", "release"])
def test_the_last_word_is_written_with_the_end(api: Api, end: str) -> None:
    job_id = api.submit(rules=FIRST)["id"]
    held = api.claim()
    held.report(1, decisions=[decision(1)]).ok()
    control = {
        "rules_revision": 1,
        "commands_seq": 0,
        "decisions": [decision(1), decision(2)],
        "statuses": [{"rule": "nan", "state": "fired", "fires": 1}],
    }
    for _ in range(2):
        held.post(f"/{end}", {"job_id": job_id, "control": control}).ok()
    types = api.events(job_id)
    assert types.count("rule.fired") == 2
    assert types.index("rule.fired") < len(types) - 1 and types[-1].startswith(("job.", "attempt."))
    assert shown(api, job_id)["acknowledged"]["statuses"][0]["fires"] == 1


def zombie(api: Api) -> tuple[str, Held]:
    """A worker whose job has moved on."""
    job_id: str = api.submit(rules=FIRST)["id"]
    held = api.claim()
    api.clock.advance(1000)
    api.sweep()
    api.claim(machine_id="m-2")
    return job_id, held


def test_who_lost_the_job_writes_nothing(api: Api) -> None:
    job_id, held = zombie(api)
    control = {
        "rules_revision": 1,
        "commands_seq": 0,
        "decisions": [decision(1)],
        "statuses": [],
        "results": [{"seq": 1, "status": "applied"}],
    }
    api.post(f"/job/{job_id}/commands", {"kind": "save"}).ok()
    by_rule = {"kind": "rollback", "ended_by": {"rule": "nan", "step": 9}, "rollback": {"before_step": 9}}
    with api.unchanged():
        held.heartbeat(control=control).refused(ErrorCode.LEASE_LOST, "x-lease-token")
        for end in ("complete", "fail", "release"):
            body = {"job_id": job_id, "control": control}
            held.post(f"/{end}", body).refused(ErrorCode.LEASE_LOST, "x-lease-token")
        held.release(by_rule=by_rule).refused(ErrorCode.LEASE_LOST, "x-lease-token")
