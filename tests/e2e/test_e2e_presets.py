"""Test presets on real processes: a firing is an event, the job goes on, a user can switch presets off."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from baton.contract.jobs.job import JobState
from tests.kits.stack.stack import clean_environment
from tests.kits.stack.workshop import Workshop

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

LOSSES = ["1.0", "0.9", "nan", "nan", "0.7", "0.6"]


def run(shop: Workshop, rules: str | None = None, script: str = "told_losses.py", **more: Any) -> str:
    parameters = {"losses": LOSSES, "step_s": 0.4, "steps": 5}
    job_id: str = shop.submit(script, parameters, rules=rules, **{"outputs": ("end.json",), **more})
    job = shop.stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED)
    assert job.state is JobState.COMPLETE, job.reason
    assert job.counters.attempts == 1 and job.ended_by is None
    return job_id


def presets_of(shop: Workshop, job_id: str) -> list[tuple[str, dict[str, Any]]]:
    events = shop.stack.client.events(job_id, limit=1000).events
    return [(event.type, event.data) for event in events if str(event.data.get("rule")).startswith("preset-")]


def baton(shop: Workshop, *arguments: str) -> str:
    """Run the command line; return its text on both streams."""
    environment = {
        **clean_environment(),
        "BATON_API_URL": shop.stack.url,
        "BATON_API_KEY": shop.stack.keys["admin"],
    }
    done = subprocess.run(
        [sys.executable, "-m", "gpu_client.cli", *arguments],
        env={**environment, "HOME": str(shop.tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout + done.stderr


def test_a_loss_that_is_no_number_is_told_and_the_training_goes_on(shop: Workshop) -> None:
    shop.agent("w1")
    job_id = run(shop)
    (fired, said), (cleared, over) = presets_of(shop, job_id)
    assert (fired, said["rule"], said["step"], said["severity"]) == ("rule.fired", "preset-nonfinite", 3, "error")
    assert said["message"] == "the loss is NaN (that of an evaluation: unknown)" and said["actions"] == ["alert"]
    assert (cleared, over["rule"], over["step"]) == ("rule.cleared", "preset-nonfinite", 5)
    assert [one["number"] for one in (said, over)] == [1, 2]
    assert json.loads(shop.stack.artifact(job_id, "end.json")) == {"steps": 6}

    watched = baton(shop, "watch", job_id)
    assert "step 3: preset-nonfinite: the loss is NaN" in watched and "step 5: preset-nonfinite: cleared" in watched
    assert "preset" not in baton(shop, "explain", job_id), "it is over"
    assert "[baton] preset-nonfinite: the loss is NaN" in baton(shop, "logs", job_id)


def test_they_are_switched_off_and_silent_for_a_script_that_says_nothing(shop: Workshop) -> None:
    shop.agent("w1")
    job_id = run(shop, "presets: off\nrules: []")
    assert presets_of(shop, job_id) == []
    some = "presets: {preset-nonfinite: off}\nrules: [{name: mine, when: not isfinite(loss), do: {log: 'no number'}}]"
    job_id = run(shop, some)
    assert presets_of(shop, job_id) == []
    kinds = [(event.type, event.data.get("rule")) for event in shop.stack.client.events(job_id, limit=1000).events]
    assert ("rule.fired", "mine") in kinds, "rules of its own are untouched"

    job_id = run(shop, script="plain.py", outputs=("model.bin",))
    assert presets_of(shop, job_id) == []


def test_numbers_of_presets_and_rules_leave_no_gap(shop: Workshop) -> None:
    shop.agent("w1")
    job_id = run(shop, "rules: [{name: low, when: loss < 0.95, do: {log: 'low'}}]")
    events = shop.stack.client.events(job_id, limit=1000).events
    decided = [event.data for event in events if "number" in event.data]
    assert [one["number"] for one in decided] == list(range(1, len(decided) + 1))
    assert {"low", "preset-nonfinite"} <= {one.get("rule") for one in decided}
