"""Commands for one job in each state, from submission to explanation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.contract.jobs.job import JobState
from baton.contract.jobs.rent import fleet_of
from tests.functional.cli.people import Baton, Labour, submit
from tests.kits.network.proxies import FaultyProxy
from tests.kits.stack.stack import Stack

pytestmark = [pytest.mark.emulator, pytest.mark.processes]


def test_submit_from_a_file(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"recipe: digits@1\nqueue: {labour.queue}\nparameters: {{steps: 5, seed: 7}}\n")
    said = baton("submit", file, "--set", "steps=9", "--input", "digits/:d", "--name", "night", "--tag", "a=b").ok()
    job = stack.job(said.out.strip())
    assert (job.recipe, job.queue, job.name, job.tags) == ("digits@1", labour.queue, "night", {"a": "b"})
    assert (job.parameters["steps"], job.parameters["seed"]) == (9, 7)
    assert [(one.prefix, one.into) for one in job.inputs] == [("digits/", "d")]


def test_submit_a_recipe_and_standard_input(baton: Baton, labour: Labour, stack: Stack) -> None:
    options = ["--recipe", "digits@1", "--queue", labour.queue, "--priority", "90"]
    made = baton("submit", *options, "--json").ok().json
    assert stack.job(made["id"]).priority == 90
    piped = baton("submit", "-", stdin=json.dumps({"command": ["x"], "queue": labour.queue})).ok()
    assert stack.job(piped.out.strip()).command == ["x"]


def test_submit_bad_input(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    baton("submit", tmp_path / "absent.yaml").failed(2, "absent.yaml cannot be read: No such file")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    baton("submit", tmp_path / "binary").failed(2, "is not UTF-8 text")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (1024 * 1024 + 1))
    baton("submit", tmp_path / "huge.yaml").failed(2, "too large for a job")
    (tmp_path / "list.yaml").write_text("recipe: digits@1\nparameters: [1]\n")
    baton("submit", tmp_path / "list.yaml", "--set", "steps=9").failed(2, "parameters: ")
    baton("submit", "--recipe", "digits@1", "--priority", "900").failed(2, "priority")
    baton("submit", "--recipe", "nobody@1").failed(3, "unknown_recipe", "digits@1")
    baton("submit", "--recipe", "digits@1", "--set", "steps=many").failed(3, "invalid_value", "parameters.steps")


def test_a_submission_without_an_answer_is_not_made_twice(
    baton: Baton, labour: Labour, stack: Stack, tmp_path: Path
) -> None:
    """The answer is lost, then the network is gone: the same command again finds the job that was made."""
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"command": ["once"], "queue": labour.queue}))
    arguments = ["submit", str(file)]
    with FaultyProxy(stack.front) as front:
        baton("login", front.url, stdin=stack.keys["submit"]).ok()
        with front.holding("POST /job") as held:
            running = baton.started(*arguments)
            held.wait()
            assert running.interrupt().failed(130, "interrupted")
        assert len(stack.client.jobs(queue=labour.queue).jobs) <= 1
        first = baton(*arguments).ok().out.strip()
        assert [job.id for job in stack.client.jobs(queue=labour.queue).jobs] == [first]
        second = baton(*arguments).ok().out.strip()
    assert {job.id for job in stack.client.jobs(queue=labour.queue).jobs} == {first, second}


def test_jobs_and_their_filters(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    ids = [submit(baton, labour, tmp_path, name=f"job {number}") for number in range(3)]
    baton("stop", ids[0]).ok()
    listed = baton("jobs", "--queue", labour.queue, "--json").ok().json
    assert {job["id"] for job in listed} == set(ids)
    few = baton("jobs", "--queue", labour.queue, "--status", "pending", "--limit", "1").ok()
    # submitted within one second, they have no order
    assert few.out.splitlines()[1].split()[0] in (ids[1][:8], ids[2][:8])
    assert (len(few.out.splitlines()), few.err) == (2, "1 job listed, newest first. To list all: --all\n")
    whole = baton("jobs", "--queue", labour.queue, "--status", "pending", "--all")
    assert (len(whole.ok().out.splitlines()), whole.err) == (3, "")
    baton("jobs", "--all", "--limit", "3").failed(2, "--all", "--limit")
    shown = baton("jobs", "--queue", labour.queue).ok().out
    assert {tuple(line.split()[:4]) for line in shown.splitlines()[1:]} == {
        (ids[0][:8], "canceled", "job", "0"),
        (ids[1][:8], "pending", "job", "1"),
        (ids[2][:8], "pending", "job", "2"),
    }
    empty = baton("jobs", "--queue", "nobody-here").ok()
    assert "No jobs." in empty.err


def test_show_tells_what_is_not_the_recipes_default(baton: Baton, labour: Labour) -> None:
    made = baton("submit", "--recipe", "digits@1", "--queue", labour.queue, "--input", "digits/", "--set", "steps=7")
    shown = baton("show", made.ok().out.strip()).ok()
    lines = shown.out.splitlines()
    assert [line.split() for line in lines[lines.index("") + 1 :]] == [["parameter", "value"], ["steps", "7"]]
    everything = baton("show", made.out.strip(), "--json").ok().json["parameters"]
    others = len(everything) - 1
    assert f"{others} other parameters with the default of digits@1: baton recipes docs digits@1" in shown.err


def test_a_job_without_output_says_so(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path)
    assert baton("logs", job_id).ok().err == (
        f"No output yet: no worker has claimed the job. To see the cause: baton explain {job_id[:8]}\n"
    )
    labour.claim()
    assert baton("logs", job_id).ok().err == "No output yet: the job is running.\n"
    labour.complete({"model.bin": b"weights"})
    for follow in ([], ["-f"]):
        said = baton("logs", job_id, *follow).ok()
        assert (said.out, said.err) == ("", "The job is complete and produced no output.\n")
    assert baton("logs", job_id, "--json").ok().err == ""


def test_jobs_watched_again_and_again(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            labour.claim()
        else:
            raise KeyboardInterrupt

    baton.session_options = {"sleep": sleep}
    said = baton("jobs", "--queue", labour.queue, "--watch", "--json")
    assert said.code == 130
    assert [[(job["id"], job["state"]) for job in jobs] for jobs in said.lines] == [
        [(job_id, "pending")],
        [(job_id, "running")],
    ]


def test_ids_may_be_abbreviated(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path)
    assert baton("show", job_id[:13], "--json").ok().json["id"] == job_id
    assert baton("show", job_id.upper(), "--json").ok().json["id"] == job_id
    baton("show", job_id[:3]).failed(2, "too short")
    baton("show", "not-an-id").failed(2, "is not a job id")
    baton("show", "../keys").failed(2, "is not a job id")
    baton("show", "00000000-0000-4000").failed(2, "no job id begins with")
    baton("show", "00000000-0000-4000-8000-000000000000").failed(3, "job_not_found", "baton jobs")


def test_steering(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path)
    assert baton("pause", job_id, "-m", "too dear", "--json").ok().json == {
        "id": job_id,
        "state": "paused",
        "not_before": None,
    }
    assert "paused by a user (too dear)" in baton("explain", job_id).ok().out
    baton("pause", job_id).failed(3, "illegal_transition", "baton explain")
    assert baton("resume", job_id).ok().out == f"{job_id} is pending\n"
    baton("retry", job_id).failed(3, "illegal_transition")
    assert baton("stop", job_id, "--message", "wrong prompt").ok().out == f"{job_id} is canceled\n"
    baton("stop", job_id).failed(3, "job_canceled", "baton retry ID")
    assert "A user stopped the job (wrong prompt)" in baton("explain", job_id).ok().out
    baton("retry", job_id, "--from-step", "77").failed(3, "checkpoint_not_found", "baton show ID")
    assert baton("retry", job_id).ok().out == f"{job_id} is pending\n"


def test_retry_from_a_step(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path)
    labour.claim()
    labour.commit(10)
    labour.commit(20)
    baton("stop", job_id).ok()
    baton("retry", job_id, "--from-step", "10").ok()
    assert stack.job(job_id).checkpoint_step == 10
    baton("stop", job_id).ok()
    baton("retry", job_id, "--from-step", "0", "--keep-counters").ok()
    assert stack.job(job_id).checkpoint_step is None


def test_a_running_job_is_paused_after_its_checkpoint(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path)
    labour.claim()
    asked = baton("pause", job_id).ok().out
    assert asked == f"{job_id} is running until its checkpoint is committed, then paused\n"


def test_a_complete_job_rents_again_only_on_demand(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    job = tmp_path / "rent.yaml"
    job.write_text(
        "command: ['true']\nrent: {budget_usd: 2, providers: [ssh]}\n"
    )  # without an account no machine starts
    job_id = baton("submit", job).ok().out.strip()
    labour.queue = fleet_of(job_id)
    labour.claim()
    labour.complete({})
    baton("retry", job_id).failed(2, "a retry rents a machine again, for up to 2.00 USD", "--yes")
    assert stack.job(job_id).state is JobState.COMPLETE
    assert baton("retry", job_id, "--yes").ok().out == f"{job_id} is pending\n"
    baton("stop", job_id).ok()
    baton("retry", job_id).ok()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--budget", "0.05", "--provider", "loopback"), "the budget of 0.05 USD (total_usd) does not pay for"),
        (("--budget", "2", "--provider", "ssh"), "ssh: no account is stored; run 'baton fleet login ssh'"),
    ],
)
def test_a_job_that_can_rent_nothing_is_submitted_with_the_reason(
    baton: Baton, tmp_path: Path, options: tuple[str, ...], why: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("command: ['true']\nrequirements: {min_disk_gib: 1}\n")
    said = baton("submit", file, "--rent", *options).ok()
    assert said.err.startswith("No machine can be rented now: ") and why in said.err
    baton("stop", said.out.strip()).ok()


def test_retry_forgets_failures_unless_told_to_keep_them(
    baton: Baton, labour: Labour, stack: Stack, tmp_path: Path
) -> None:
    job_id = submit(baton, labour, tmp_path, policy={"backoff_s": 0, "avoid_machine_s": 0})
    labour.claim()
    labour.fail("exit code 1")
    baton("stop", job_id).ok()
    baton("retry", job_id, "--keep-counters").ok()
    assert stack.job(job_id).counters.failures == 1
    baton("stop", job_id).ok()
    baton("retry", job_id).ok()
    assert stack.job(job_id).counters.failures == 0


def test_show_logs_events_and_explain_along_a_life(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    job_id = submit(
        baton, labour, tmp_path, name="life", outputs=["model.bin"], policy={"backoff_s": 0, "avoid_machine_s": 0}
    )
    waiting = baton("explain", job_id).ok().out
    assert "no worker has claimed it. It is the first job of its queue." in waiting
    assert f"BATON_QUEUE={labour.queue}" in waiting

    labour.claim("gpu-1")
    labour.report(5, 20, 0.75)
    running = baton("explain", job_id, "--json").ok().json
    assert running["state"] == "running"
    assert "runs on gpu-1" in running["answer"]
    assert "step 5/20 (25%)" in running["answer"]
    labour.commit(10)
    labour.log(0, "epoch one", "\x1b]52;c;ZXZpbA==\x07")
    labour.fail("exit code 1", "ValueError: too bad")

    labour.claim("gpu-2")
    labour.log(0, "epoch two")
    labour.complete({"model.bin": b"weights"})

    shown = baton("show", job_id, "--json").ok().json
    assert [(one["machine_id"], one["end"]) for one in shown["attempts"]] == [
        ("gpu-1", "failed"),
        ("gpu-2", "complete"),
    ]
    assert [one["step"] for one in shown["checkpoints"]] == [10]
    for_people = baton("show", job_id).ok()
    assert "gpu-1" in for_people.out
    assert "model.bin" in for_people.out
    assert "baton fetch" in for_people.err

    logs = baton("logs", job_id).ok()
    assert logs.out == "epoch one\n]52;c;ZXZpbA==\nepoch two\n"
    assert "--- attempt 2" in logs.err
    lines = baton("logs", job_id, "--json").ok().lines
    assert [(one["epoch"], one["text"]) for one in lines] == [
        (1, "epoch one"),
        (1, "\x1b]52;c;ZXZpbA==\x07"),
        (2, "epoch two"),
    ]
    assert baton("logs", job_id, "--tail", "1").ok().out == "epoch two\n"

    events = baton("events", job_id, "--json").ok().json
    assert (events[0]["type"], events[-1]["type"]) == ("job.submitted", "job.completed")
    assert "script_error exit code 1" in baton("events", job_id).ok().out

    explained = baton("explain", job_id).ok().out
    assert "The job completed" in explained
    assert "attempt 1 on gpu-1, from the start: failed after" in explained
    assert "committed step 10" in explained
    assert "1 of 3 failures" in explained
    assert f"baton fetch {job_id[:8]} DIR" in explained


def test_explain_a_job_that_failed_for_good(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path, policy={"max_failures": 1})
    labour.claim()
    labour.fail("exit code 1", "ValueError: too bad")
    assert stack.job(job_id).state is JobState.FAILED
    said = baton("explain", job_id).ok().out
    assert "its command failed too often (failed 1 time; the policy allows 1)" in said
    assert "last line: ValueError: too bad" in said
    assert f"baton logs {job_id[:8]}" in said


def test_explain_names_what_is_before_it(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path)
    submit(baton, labour, tmp_path, priority=90)
    submit(baton, labour, tmp_path, priority=10)
    submit(baton, labour, tmp_path, priority=95)
    labour.claim()
    answer = baton("explain", job_id, "--json").ok().json
    assert "1 job of its queue precedes it" in answer["answer"]
    assert "1 job of the queue" in answer["advice"][0]
