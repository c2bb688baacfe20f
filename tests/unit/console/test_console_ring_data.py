"""The console's view of a ring agrees with the ring's own: status, rates, and which side waits."""

from __future__ import annotations

import base64
import json
import random
import subprocess
from pathlib import Path
from typing import Any

from cdk import NODE
from gpu_client.ring.core.back_pressure import RingFlow, reader_wait_reason, writer_wait_reason
from gpu_client.ring.format.records import PUBLISHER, READ_BEFORE
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.tools.status import read_status
from tests.unit.ring.reading_scene import Scene

SOURCE = Path(__file__).parents[3] / "console" / "src" / "ring" / "ring-data.js"
KEYS = ("ring.json", "pointer", PUBLISHER, READ_BEFORE, "watched")


def run(expression: str, given: Any) -> Any:
    """Evaluate an expression over the module `r` and `given`."""
    program = (
        "const given = JSON.parse(require('fs').readFileSync(0));"
        f"import(process.argv[1]).then((r) => console.log(JSON.stringify({expression})))"
    )
    done = subprocess.run(
        [str(NODE), "-e", program, SOURCE.as_uri()], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def records_of(scene: Scene) -> list[dict[str, str]]:
    keys = [*KEYS, *(key for prefix in ("writers/", "readers/") for key in scene.store.keys(prefix))]
    found = {key: scene.store.record(key) for key in keys}
    return [
        {"key": key, "data": base64.b64encode(one.data).decode(), "version": one.version}
        for key, one in found.items()
        if one is not None
    ]


def test_records_are_read_as_the_command_line_reads_them() -> None:
    scene = Scene()
    scene.put(6)
    with RingReader(scene.ring, "old", threads=False) as reader:
        reader.record_consumed(7)
    reader = RingReader(scene.ring, "new", threads=False)
    reader.record_consumed(5)
    reader.flush_stats()
    status = read_status(scene.ring)
    seen = run("r.readRing(given)", records_of(scene))
    assert (seen["readable"], seen["inserted"], seen["read"], seen["manifest"]) == (
        status.readable,
        status.inserted,
        status.read,
        status.manifest,
    )
    assert seen["read"] == 12 and seen["settings"]["cap"] == status.cap
    assert [one["name"] for one in seen["readers"]] == [one.name for one in status.readers] == ["new"]
    damaged = [{"key": "pointer", "data": base64.b64encode(b"rubbish").decode(), "version": "1"}]
    assert run("r.readRing(given).readable", damaged) == 0
    reader.close()


def test_the_console_says_that_a_side_waits_exactly_when_the_side_waits() -> None:
    chance = random.Random(7)
    cases, expected = [], []
    for _ in range(400):
        settings = RingSettings.model_validate(
            {
                "cap": (cap := chance.choice([4, 20, 100])),
                "mode": chance.choice(["rolling", "generation"]),
                "min_size": chance.choice([1, 4]),
                "pack": chance.choice([1, 4]),
                "samples_per_insert": chance.choice([None, 1, 2.5, (1, 4)]),
            }
        )
        inserted = chance.randrange(0, 3 * cap)
        flow = RingFlow(
            inserted=inserted,
            finished=chance.randrange(0, cap + 5),
            read=chance.randrange(0, 5 * cap),
            readable=min(inserted, cap),
            wanted=chance.choice([0, 1, 16]),
            starved=chance.choice([0, 0, 0, 1]),
        )
        content = {**flow.content(), "count": 3}
        shared = {name: content[name] for name in ("inserted", "finished", "read", "readable")}
        cases.append({"settings": settings.model_dump(mode="json"), "flow": content, "ahead": settings.ahead, **shared})
        waits = (
            bool(writer_wait_reason(flow, settings, 1)),
            bool(flow.starved or reader_wait_reason(flow, settings, max(1, flow.wanted))),
        )
        expected.append(list(waits))
    found = run("given.map((one) => [r.whyWritersWait(one) !== '', r.whyReadersWait(one) !== ''])", cases)
    assert found == expected
    assert {tuple(one) for one in expected} == {(False, False), (False, True), (True, False), (True, True)}


def test_rates_fall_to_nothing_when_nothing_changes_and_a_new_ring_begins_anew() -> None:
    samples = [
        {"at": at, "inserted": 10 * at, "read": 20 * at, "turns": at, "writers": {"w": {"put": at}} if at > 40 else {}}
        for at in range(0, 61, 5)
    ]
    given = {"samples": samples, "anew": {"at": 70, "inserted": 1, "read": 0, "turns": 1}}
    rates, late, still, none, kept = run(
        "[r.rateOf(given.samples, 61, (one) => one.inserted), r.rateOf(given.samples, 61, (one) => one.writers.w?.put),"
        " r.rateOf(given.samples, 120, (one) => one.inserted),"
        " r.rateOf(given.samples.slice(0, 1), 1, (one) => one.inserted), r.addSample(given.samples, given.anew)]",
        given,
    )
    assert rates == 10 and late == 1 and 0 < still < 4 and none is None and kept == [given["anew"]]
    live = run(
        "[['flow', 61], ['flow', 200], ['none', 61]].map(([flow, now]) => r.lifeOf({flow: flow === 'flow' ? {} : null,"
        " settings: {lease_s: 15}, sign_at: 0}, given.samples, now))",
        given,
    )
    assert live == ["live", "silent", "silent"]
