"""`baton watch` and `baton logs -f`: until the end, through outages, until Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.contract.jobs.goodput import Goodput
from gpu_client.cli.core import session as session_module
from gpu_client.cli.insight import logs as logs_module
from gpu_client.transport.retry import RetryPolicy
from tests.functional.cli.people import Baton, Labour, submit
from tests.kits.network.proxies import FaultyProxy
from tests.kits.stack.stack import Stack

pytestmark = [pytest.mark.emulator, pytest.mark.processes]


def steps(*actions: Callable[[], object]) -> Callable[[float], None]:
    """A sleep that lets something happen each time instead."""
    waiting = list(actions)

    def sleep(_: float) -> None:
        waiting.pop(0)()

    return sleep


def test_watch_to_the_end(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path, outputs=["m"])
    baton.session_options = {
        "sleep": steps(
            lambda: labour.claim("gpu-1"),
            lambda: labour.report(5, 20, 0.75),
            lambda: None,
            labour.release,
            lambda: labour.claim("gpu-2"),
            lambda: labour.complete({"m": b"x"}),
        )
    }
    said = baton("watch", job_id[:12], "--json", "--price-per-hour", "2").ok()
    seen = said.lines
    assert [one["state"] for one in seen] == ["pending", "running", "running", "pending", "running", "complete"]
    assert (seen[2]["step"], seen[2]["total_steps"], seen[2]["loss"], seen[2]["machine_id"]) == (5, 20, 0.75, "gpu-1")
    assert [one["attempts"] for one in seen] == [0, 1, 1, 1, 2, 2]
    assert seen[-1]["cost"] is not None
    assert said.err == ""


def test_watch_for_people(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path, policy={"max_failures": 1})
    baton.session_options = {"sleep": steps(lambda: labour.claim("gpu-1"), lambda: labour.fail("exit code 1"))}
    said = baton("watch", job_id)
    assert said.code == 1, "the job failed"
    assert said.err.splitlines() == ["pending", "running, 1 attempt"]
    assert said.out.startswith(f"{job_id[:8]} failed")


def test_where_the_time_of_all_attempts_went(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    """The first one's as of its end, while the second has not reported any yet, and both together in the end."""
    job_id = submit(baton, labour, tmp_path, outputs=["m"])
    first = Goodput(productive_s=3600, idle_s=900, checkpoints_committed=2, raw_bytes=4000, uploaded_bytes=1000)
    second = Goodput(productive_s=1800, repeated_s=900, stalled_s=0.5, checkpoints_committed=2, raw_bytes=4000)

    baton.session_options = {
        "sleep": steps(
            lambda: labour.claim("gpu-1"),
            lambda: labour.report(5, 20, 0.75, first),
            lambda: (labour.release(), labour.claim("gpu-2")),
            lambda: None,
            lambda: labour.report(9, 20, 0.5, second),
            lambda: labour.complete({"m": b"x"}),
        )
    }
    seen = baton("watch", job_id, "--json").ok().lines
    found = [one["goodput"] and one["goodput"]["productive_s"] for one in seen]
    assert found[:2] == [None, None]
    assert 3600 in found
    assert 7200 not in found, "the second attempt has reported nothing yet, and the first one counts once"
    assert found[-1] == 5400
    baton.session_options = {}
    shown = baton("show", job_id, "--price-per-hour", "2").ok().out
    assert "75%: 1 h 30 min of 2 h (3.00 of 4.00) went into new steps" in shown
    assert "repeated steps 15 min (0.50), starting and ending 15 min (0.50), taking checkpoints 0.5 s (<0.01)" in shown
    assert "4 stored; 1.0 kB sent of 8.0 kB (12%); 0.1 s of stall each" in shown
    assert baton("show", job_id, "--json").ok().json["goodput"]["repeated_s"] == 900
    watched = baton("watch", job_id).ok().out
    assert "goodput 75%" in watched.splitlines()[0]
    assert "75%: 1 h 30 min of 2 h went into new steps" in watched
    assert "goodput 80%" in baton("explain", job_id).ok().out


def test_the_price_of_the_profile(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    baton("login", stack.url, "--price-per-hour", "0.5", stdin=stack.keys["submit"]).ok()
    job_id = submit(baton, labour, tmp_path)
    baton("stop", job_id).ok()
    baton("login", stack.url, stdin=stack.keys["submit"]).ok()
    said = baton("watch", job_id, "--json")
    assert (said.code, said.lines[0]["cost"]) == (1, 0.0)


def test_an_outage_is_waited_for_once_there_was_an_answer(
    baton: Baton, labour: Labour, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "RETRY_POLICY", RetryPolicy(max_tries=1, budget_s=5))
    job_id = submit(baton, labour, tmp_path, outputs=["m"])
    labour.claim()
    labour.log(0, "first")
    with FaultyProxy(stack.front) as front:
        baton("login", front.url, stdin=stack.keys["submit"]).ok()
        for arguments in (["watch", job_id, "--json"], ["logs", "-f", job_id, "--json"]):
            with front.dropping() as trouble:
                baton(*arguments).failed(4, "baton doctor")
                front.forget(trouble)
                baton.session_options = {
                    "sleep": steps(
                        lambda: front._faults.append(trouble),
                        lambda: None,
                        lambda: front.forget(trouble),
                        lambda: (_ for _ in ()).throw(KeyboardInterrupt),
                    )
                }
                said = baton(*arguments)
            assert said.code == 130
            assert said.err.count("Retrying") == 1
            assert json.loads(said.out.splitlines()[0])


def test_logs_are_followed_to_the_end(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path, outputs=["m"])
    labour.claim()
    labour.log(0, "one", "two")

    def last_words() -> None:
        labour.log(3, "four")
        labour.complete({"m": b"x"})

    baton.session_options = {"sleep": steps(lambda: None, lambda: labour.log(2, "three"), last_words)}
    assert baton("logs", "--follow", job_id).ok().out == "one\ntwo\nthree\nfour\n"


def test_one_who_follows_is_told_how_long_lines_are_held_back(
    baton: Baton, labour: Labour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(baton, labour, tmp_path, outputs=["m"])
    waits = {"s": 0.5}
    monkeypatch.setattr(logs_module, "log_wait_s", lambda age_s: waits["s"])

    def grow_old() -> None:
        waits["s"] = 120.0

    def go_on_elsewhere() -> None:
        labour.release()
        labour.claim()
        labour.log(0, "two")

    baton.session_options = {
        "sleep": steps(
            labour.claim,
            lambda: labour.log(0, "one"),
            lambda: None,
            grow_old,
            lambda: None,
            go_on_elsewhere,
            lambda: None,
            lambda: None,
            lambda: labour.complete({"m": b"x"}),
        )
    }
    said = baton("logs", "-f", job_id).ok()
    assert said.out == "one\ntwo\n"
    told = [line for line in said.err.splitlines() if "sends its output" in line]
    assert told == [f"--- attempt {epoch} now sends its output about every 2 min ---" for epoch in (1, 2)]
    assert "sends its output" not in baton("logs", job_id).ok().err


@pytest.mark.parametrize("command", [["watch"], ["logs", "-f"], ["jobs", "--watch"]], ids=" ".join)
def test_ctrl_c_ends_the_looking_and_not_the_job(
    command: list[str], baton: Baton, labour: Labour, stack: Stack, tmp_path: Path
) -> None:
    job_id = submit(baton, labour, tmp_path)
    labour.claim()
    labour.log(0, "hello")
    with FaultyProxy(stack.front) as front:
        baton("login", front.url, stdin=stack.keys["submit"]).ok()
        asked = len(front.requests())
        arguments = [*command, job_id] if command != ["jobs", "--watch"] else [*command, "--queue", labour.queue]
        running = baton.started(*arguments, "--json")
        assert running.process.stdout is not None
        first = running.process.stdout.readline()
        assert json.loads(first)
        said = running.interrupt()
        assert len(front.requests()) > asked
    assert (said.code, said.err) == (130, "baton: interrupted\n")
    assert stack.job(job_id).state == "running"


def test_a_reader_that_goes_away_is_no_error(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path)
    labour.claim()
    for first in range(0, 3000, 500):
        labour.log(first, *("x" * 1000 for _ in range(500)))
    running = baton.started("logs", job_id)
    assert running.process.stdout is not None
    running.process.stdout.read(10)
    running.process.stdout.close()
    assert running.process.stderr is not None
    assert (running.process.wait(60), running.process.stderr.read()) == (141, "")
    running.process.stderr.close()
