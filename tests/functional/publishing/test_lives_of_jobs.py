"""Test that complete jobs publish the events and fields of docs/events.md."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from baton.contract.jobs.events import JobEvent
from baton.contract.jobs.history import EventType
from functions.domain.records import Event
from functions.publishing.outbox import publish
from tests.functional.api.calls import PROGRAM
from tests.kits.api.harness import NOW, Api, memory_api
from tests.kits.api.stream_records import FakeBus, FakeDeadLetters, no_wait, stream_record

DOCUMENT = Path(__file__).parents[3] / "docs" / "events.md"


def documented() -> dict[str, set[str]]:
    """Return the names in the data of each type, from the table of types."""
    table = DOCUMENT.read_text().partition("## Types")[2].partition("## ")[0]
    found: dict[str, set[str]] = {}
    names: set[str] = set()
    for type_, said in re.findall(r"^\| `([a-z_.]+)` \|[^|]*\| ?(.*?) ?\|$", table, re.MULTILINE):
        if said != "the same":
            # Names within parentheses lie one level deeper.
            names = set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", said)))
        found[type_] = names
    return found


def live(api: Api) -> list[str]:
    """Run jobs through every transition; return their ids."""
    job = api.submit(queue="a", policy={"backoff_s": 30, "avoid_machine_s": 0})["id"]
    for command in ("pause", "resume"):
        api.post(f"/job/{job}/{command}", {"message": "a while"} if command == "pause" else None).ok()
    held = api.claim(queue="a")
    held.commit(100).ok()
    held.commit(200).ok()
    held.post(f"/job/{job}/checkpoints/200/damaged", {"epoch": held.epoch, "message": "digest"}).ok()
    api.post(f"/job/{job}/pause").ok()
    api.post(f"/job/{job}/resume").ok()
    held.fail(message="out of memory").ok()
    api.clock.advance(1000)
    api.sweep()
    held = api.claim(queue="a")
    api.post(f"/job/{job}/pause").ok()
    held.release().ok()
    api.post(f"/job/{job}/resume").ok()
    held = api.claim(queue="a")
    for _ in range(4):
        api.clock.advance(60)
        api.sweep()
    held.heartbeat().ok()
    for _ in range(4):
        api.clock.advance(60)
        api.sweep()
    api.claim(queue="a").complete({}).ok()
    api.post(f"/job/{job}/retry").ok()
    api.post(f"/job/{job}/stop").ok()
    late = api.submit(queue="b", policy={"deadline_at": api.clock.now() + 100})["id"]
    api.clock.advance(200)
    api.sweep()
    return [job, late, *steered(api), *scaled(api), *trained_together(api)]


def steered(api: Api) -> list[str]:
    """Jobs that rules steer and end; their ids."""
    jobs = [api.submit(queue=queue)["id"] for queue in ("c", "d", "e")]
    by = {"rule": "nan", "revision": 1, "step": 5, "message": "loss is nan"}
    held = api.claim(queue="c")
    kinds = [kind for kind in EventType if kind.startswith(("rule.", "action."))]
    about = {"revision": 1, "step": 5, "training_epoch": 0.5, "at": NOW, "operands": {"loss": "nan"}, "message": "m"}
    decisions = [{"number": at, "type": kind, "rule": "nan", **about} for at, kind in enumerate(kinds, 1)]
    held.report(decisions=decisions).ok()
    decisions = [{"number": 10 + at, "type": kind, "command": 1, **about} for at, kind in enumerate(kinds)]
    held.report(decisions=decisions).ok()
    damaged = {"ring": "/mnt/ring", "object": "samples/w/00000001-0000000001", "objects": 1}
    held.report(decisions=[{"number": 20, "type": "ring.quarantined", **damaged, **about, "rule": "nan"}]).ok()
    held.release(by_rule={"kind": "rollback", "ended_by": by, "rollback": {"before_step": 5}}).ok()
    api.claim(queue="c").complete({}, ended_by=by).ok()
    api.claim(queue="d").fail(failure_class="stopped_by_rule", ended_by=by).ok()
    api.claim(queue="e").release(by_rule={"kind": "pause", "ended_by": by}).ok()
    return jobs


def scaled(api: Api) -> list[str]:
    """A job that a rule has copied, its copy, which another rule cancels, and the jobs whose rules those are."""
    source = api.submit(queue="f", tags={"group": "generators"})["id"]
    api.claim(queue="f")
    api.clock.advance(1)
    whose = []
    for queue, delta in (("g", 1), ("h", -1)):
        do = f"{{scale: {{group: generators, delta: {delta}}}}}"
        rules = f"rules: [{{name: grow, when: 'step >= 5', on: [heartbeat], do: {do}}}]"
        whose.append(api.submit(queue=queue, rules=rules)["id"])
        held = api.claim(queue=queue)
        held.heartbeat(step=5).ok()
        held.complete({}).ok()
    (copy,) = [one["id"] for one in api.get("/jobs").ok() if one["copy_of"] == source]
    return [source, copy, *whose]


def trained_together(api: Api) -> list[str]:
    """An elastic job whose nodes join, are lost, fail and complete, and one whose node runs too long."""
    policy = {"heartbeat_interval_s": 600}
    jobs = [api.submit(queue="i", nodes={"max": 2}, policy={**policy, "max_failures": 2})["id"]]
    jobs += [api.submit(queue="j", nodes={"max": 1}, policy={**policy, "max_runtime_s": 60})["id"]]
    first, second = (api.claim(queue="i", machine_id=f"i-{number}") for number in range(2))
    names = [f"{node.item['world']['seat']}.1.00000000" for node in (first, second)]
    for node, name in zip((first, second), names, strict=True):
        node.post(f"/job/{node.id}/world/join", {"node": name, "program": PROGRAM}).ok()
    propose = {"node": names[0], "epoch": 0, "members": names}
    first.post(f"/job/{first.id}/world/epoch", propose).ok()
    rounds = [{"round": 1, "epoch": 1, "contributors": 2, "repaired": 3}, {"round": 2, "epoch": 1, "contributors": 2}]
    for _ in range(2):
        first.post(f"/job/{first.id}/world/report", {"node": names[0], "epoch": 1, "rounds": rounds}).ok()
    lost = {"epoch": 1, "members": names[:1], "lost": [{"node": names[1], "cause": "silent", "message": "for 8 s"}]}
    first.post(f"/job/{first.id}/world/epoch", {**propose, **lost}).ok()
    second.fail().ok()
    api.clock.advance(60)
    api.claim(queue="i", machine_id="i-9").release().ok()
    for _ in range(50):
        api.clock.advance(60)
        api.sweep()
    first.heartbeat().ok()
    api.sweep()
    first.complete({}).ok()
    late = api.claim(queue="j")
    api.clock.advance(60)
    late.heartbeat()
    return jobs


def test_every_type_is_documented() -> None:
    assert set(documented()) == {kind.value for kind in EventType}


def test_the_document_s_example_is_one() -> None:
    example = DOCUMENT.read_text().partition('"detail": ')[2].partition("\n    }")[0]
    event = JobEvent.model_validate_json(example)
    assert set(JobEvent.model_fields) == set(re.findall(r'^        "(\w+)":', example, re.MULTILINE))
    assert set(event.data) == documented()[event.type]
    fields = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text().partition("## Types")[0], re.MULTILINE))
    assert fields == set(JobEvent.model_fields) - {"job_id", "tenant"}, "the rest says itself"


def test_events_hold_what_is_documented_and_are_all_published() -> None:
    api = memory_api()
    said = documented()
    seen: dict[str, set[str]] = defaultdict(set)
    for job_id in live(api):
        history = list(api.context.jobs.history(Event, job_id, limit=1000).items)
        records = [stream_record(e.seq, job_id=job_id, type_=e.type, data=e.data) for e in history]
        bus, letters = FakeBus(), FakeDeadLetters()
        assert publish(records, bus, letters, no_wait) == {"batchItemFailures": []}
        assert letters.letters == []
        published = [JobEvent.model_validate_json(entry.detail) for entry in bus.accepted]
        assert [(event.seq, event.type, event.data) for event in published] == [
            (event.seq, event.type, event.data) for event in history
        ]
        assert [event.seq for event in published] == list(range(1, len(published) + 1)), "without a gap"
        for event in published:
            seen[event.type.value] |= {name for name, value in event.data.items() if value is not None}
            assert set(event.data) <= said[event.type.value], event
    assert set(seen) == set(said), "every type happened"
    # A machine that was lost or handed back does not make the job wait.
    waits = {"attempt.interrupted": {"not_before", "ended_by"}, "attempt.released": {"not_before"}}
    assert {kind: rest for kind in said if (rest := said[kind] - seen[kind])} == waits
