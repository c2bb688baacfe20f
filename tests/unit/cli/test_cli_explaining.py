"""`baton explain` in each state of a job."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.jobs.job import AttemptEnd, JobState, JobView
from gpu_client.cli.jobs.explain import (
    Explanation,
    JobFacts,
    avoided_machines,
    explain,
    fruitless_interruptions,
    jobs_ahead,
)
from tests.unit.cli.cli_kit import ID, NOW, a_job, an_attempt


def explained(job: JobView, **more: Any) -> Explanation:
    return explain(JobFacts(now=NOW, job=job, **more))


def another(number: int, **more: Any) -> JobView:
    return a_job(id=f"{number:08d}-0000-4000-8000-000000000000", **more)


def test_ready_and_nobody_there() -> None:
    found = explained(a_job(queue="night"))
    assert (
        found.answer
        == "The job has been claimable for 10 min, and no worker has claimed it. It is the first job of its queue."
    )
    assert "BATON_QUEUE=night" in found.advice[0]


def test_ready_behind_others_with_workers_busy() -> None:
    ahead = [another(1, priority=90), another(2, created_at=NOW - 700), another(3, epoch=1, priority=1)]
    behind = [another(4, priority=10), another(5, created_at=NOW), another(6, not_before=NOW + 60, priority=99)]
    found = explained(a_job(), pending=[*behind, *ahead], running=[another(7)])
    assert "3 jobs of its queue precede it." in found.answer
    assert found.advice == ["All workers are busy or unsuitable: 1 job of the queue 'default' runs now."]
    assert [one.id[:8] for one in jobs_ahead(a_job(), [*behind, *ahead], NOW)] == ["00000003", "00000001", "00000002"]


def test_the_job_itself_and_other_queues_are_not_ahead() -> None:
    assert jobs_ahead(a_job(), [a_job(priority=99), another(1, queue="other", priority=99)], NOW) == []


def test_requirements_are_named() -> None:
    needs = {"min_vram_gib": 24, "min_gpus": 2, "gpu_models": ["A100", "H100"]}
    found = explained(a_job(requirements=needs))
    named = "24 GiB of GPU memory, 2 GPUs, one of the models A100, H100"
    assert f"Only a worker that declares {named}" in found.answer
    assert f"Start a worker with {named}: " in found.advice[0], "one without them may well be"
    assert "first log line of a worker lists its resources" in found.advice[1] and "baton stop ID" in found.advice[1]
    assert "the image registry/trainer:2" in explained(a_job(requirements={"image": "registry/trainer:2"})).answer
    assert len(explained(a_job()).advice) == 1


def test_waiting_after_a_failure() -> None:
    job = a_job(
        not_before=NOW + 45, reason={"code": "script_error", "message": "exit code 1"}, counters={"failures": 2}
    )
    failed = an_attempt(
        1, AttemptEnd.FAILED, reason={"code": "script_error"}, exit_code=1, resumed_step=100, checkpoint_step=200
    )
    found = explained(job, attempts=[failed])
    assert "after script_error: exit code 1; workers can claim it in 45 s" in found.answer
    assert found.history == [
        "attempt 1 on m-1, from step 100: failed after 1 min 40 s (script_error), exit code 1; committed step 200"
    ]
    assert found.budgets == ["2 of 3 failures"]


def test_waiting_though_its_input_is_wrong() -> None:
    reason = {"code": "bad_input", "message": "no object lies below digits/"}
    found = explained(a_job(not_before=NOW + 45, reason=reason), attempts=[an_attempt(1, AttemptEnd.FAILED)])
    assert "after bad_input: no object lies below digits/" in found.answer
    assert "baton data push" in found.advice[0] and "baton stop" in found.advice[0]
    assert "backoff_s" in found.advice[1]
    assert not any("data push" in line for line in explained(a_job(not_before=NOW + 45)).advice)
    for not_before in (None, NOW - 20):
        assert "baton stop" in explained(a_job(not_before=not_before, reason=reason)).advice[0], (
            "nor will a wait mend it"
        )


def test_what_a_trainer_refused_is_told_once() -> None:
    reason = {"code": "bad_input", "message": "the VAE x/y cannot be loaded. Name another"}
    last = an_attempt(
        1,
        AttemptEnd.FAILED,
        reason=reason,
        exit_code=65,
        log_tail=["error: the VAE x/y cannot be loaded. Name another"],
    )
    (history,) = explained(a_job(reason=reason), attempts=[last]).history
    assert history.count("the VAE x/y") == 1 and "last words" not in history


def test_a_wait_that_has_ended() -> None:
    job = a_job(not_before=NOW - 20)
    failed = an_attempt(1, AttemptEnd.FAILED)
    found = explained(job, attempts=[failed])
    assert "The backoff ended 20 s ago" in found.answer
    assert (
        found.advice[-1]
        == "These machines failed the job and cannot claim it yet: m-1 (for 23 h 53 min). Other machines can."
    )


def test_machines_are_avoided_for_a_while() -> None:
    job = a_job(policy={"avoid_machine_s": 300})
    old = an_attempt(1, AttemptEnd.FAILED, ended_at=NOW - 301)
    new = an_attempt(2, AttemptEnd.FAILED, ended_at=NOW - 299)
    lost = an_attempt(3, AttemptEnd.INTERRUPTED)
    assert avoided_machines(JobFacts(now=NOW, job=job, attempts=[old, new, lost])) == {"m-2": 1}


def test_running() -> None:
    job = a_job(JobState.RUNNING, machine_id="gpu-7", lease_expires_at=NOW + 60, counters={"attempts": 1})
    found = explained(job, attempts=[an_attempt(1)])
    assert found.answer.startswith("The job runs on gpu-7: running, 1 attempt")
    assert found.history == ["attempt 1 on m-1, from the start: runs"]


def test_running_and_asked_to_pause() -> None:
    job = a_job(JobState.RUNNING, machine_id="gpu-7", lease_expires_at=NOW + 9, reason={"code": "paused_by_user"})
    assert "was asked to pause" in explained(job, attempts=[an_attempt(1)]).answer


@pytest.mark.parametrize(("silent_s", "advice"), [(20, 0), (200, 1)])
def test_a_machine_that_is_silent(silent_s: int, advice: int) -> None:
    job = a_job(JobState.RUNNING, machine_id="gpu-7", lease_expires_at=NOW - silent_s, checkpoint_step=400)
    found = explained(job, attempts=[an_attempt(1)])
    assert "gpu-7 is silent" in found.answer
    assert "resumes the job from step 400." in found.answer
    assert len(found.advice) == advice


def test_paused() -> None:
    found = explained(a_job(JobState.PAUSED, reason={"code": "paused_by_user", "message": "too dear at noon"}))
    assert "paused by a user (too dear at noon)" in found.answer
    assert "baton resume ID" in found.advice[0]


def test_what_a_rule_did_is_not_put_on_a_user() -> None:
    said = {"code": "paused_by_rule", "message": "rule dear at step 7: cost = 41"}
    paused = explained(a_job(JobState.PAUSED, reason=said))
    assert "paused by a rule (rule dear at step 7: cost = 41)" in paused.answer
    running = a_job(JobState.RUNNING, machine_id="gpu-7", lease_expires_at=NOW + 9, reason=said)
    assert "was asked to pause by rule dear at step 7: cost = 41" in explained(running).answer
    failed = explained(a_job(JobState.FAILED, reason={**said, "code": "stopped_by_rule"}))
    assert failed.answer == "The job failed: a rule ended it (rule dear at step 7: cost = 41)."
    assert "baton rules set ID FILE" in failed.advice[0]


def test_complete() -> None:
    job = a_job(JobState.COMPLETE, completed_at=NOW, counters={"attempts": 3, "runtime_s": 300})
    assert explained(job).answer == ("The job completed 10 min after its submission and ran for 5 min in 3 attempts.")
    assert explained(job).advice == [], "there is nothing to fetch"
    output = {"path": "model.safetensors", "bucket": "training-checkpoints", "key": "jobs/x/model.safetensors"}
    kept = a_job(JobState.COMPLETE, completed_at=NOW, artifacts=[output])
    assert explained(kept).advice == ["To download the outputs: baton fetch ID DIR"]


@pytest.mark.parametrize(
    ("step", "begins"), [(None, "the start, because no checkpoint is committed"), (400, "step 400")]
)
def test_a_job_that_waits_again_says_where_it_begins(step: int | None, begins: str) -> None:
    waiting = explained(a_job(epoch=1, checkpoint_step=step), attempts=[an_attempt(1, AttemptEnd.RELEASED)])
    assert waiting.answer.endswith(f"The next attempt begins from {begins}.")


@pytest.mark.parametrize(
    ("code", "said", "advice"),
    [
        ("failure_cap", "its command failed too often", "baton logs ID"),
        ("node_fault_cap", "faulty machines", "baton show ID"),
        ("interruption_cap", "lost its machine too often", "max_interruptions"),
        ("fruitless_interruption_cap", "probably crashes them", "checkpoints more often"),
        ("max_runtime", "reached the maximum runtime", "max_runtime_s"),
        ("deadline", "deadline has passed", "deadline_at"),
        ("something_new", "something_new: because", "baton show ID"),
    ],
)
def test_failed(code: str, said: str, advice: str) -> None:
    job = a_job(JobState.FAILED, reason={"code": code, "message": "because"})
    last = an_attempt(3, AttemptEnd.FAILED, log_tail=["Traceback", "CUDA out of memory"])
    found = explained(job, attempts=[last])
    assert said in found.answer
    assert "because" in found.answer
    assert found.history[-1].endswith("; last line: CUDA out of memory")
    (what_to_do,) = found.advice
    assert advice in what_to_do
    assert what_to_do.endswith("then: baton retry ID")


def test_canceled() -> None:
    job = a_job(JobState.CANCELED, reason={"code": "canceled_by_user", "message": "wrong prompt"})
    assert explained(job).answer == "A user stopped the job (wrong prompt)."


def test_canceled_by_a_rule() -> None:
    message = "rule shrink of job 1 takes it out of group g"
    job = a_job(JobState.CANCELED, reason={"code": "canceled_by_rule", "message": message})
    assert explained(job).answer == f"The job was canceled: {message}."


def test_a_copy_says_where_it_comes_from() -> None:
    source = "00000000-0000-4000-8000-000000000001"
    assert explained(a_job(JobState.CANCELED, copy_of=source)).answer.endswith(
        f" A rule created the job as a copy of job {source}."
    )


def test_death_by_signal_is_told() -> None:
    killed = an_attempt(1, AttemptEnd.FAILED, signal=9, reason={"code": "out_of_memory", "message": "killed"})
    assert "(out_of_memory: killed), by signal 9" in explained(a_job(), attempts=[killed]).history[0]


def test_an_exit_code_is_told_once_and_last_words_in_short() -> None:
    failed = an_attempt(
        1,
        AttemptEnd.FAILED,
        exit_code=3,
        reason={"code": "script_error", "message": "exit code 3"},
        log_tail=["Traceback", "ValueError: " + "x" * 500],
    )
    (attempt_text,) = explained(a_job(), attempts=[failed]).history
    assert attempt_text.count("exit code 3") == 1
    assert "; last line: ValueError: xxx" in attempt_text
    assert attempt_text.endswith("xxx ...")
    assert len(attempt_text) < 320


def test_machines_lost_in_a_row() -> None:
    lost = an_attempt(1, AttemptEnd.INTERRUPTED)
    fruitful = an_attempt(2, AttemptEnd.INTERRUPTED, checkpoint_step=7)
    released = an_attempt(3, AttemptEnd.RELEASED)
    assert fruitless_interruptions([lost, fruitful]) == 0
    assert fruitless_interruptions([fruitful, lost, released, lost]) == 2
    assert fruitless_interruptions([]) == 0


def test_budgets() -> None:
    job = a_job(
        counters={"interruptions": 4, "node_faults": 1, "runtime_s": 1800},
        policy={"max_runtime_s": 7200, "deadline_at": NOW + 3600},
    )
    assert explained(job, attempts=[an_attempt(1, AttemptEnd.INTERRUPTED)]).budgets == [
        "1 of 10 faulty machines",
        "4 of 100 lost machines",
        "1 of 10 consecutive lost machines without a checkpoint",
        "30 min of 2 h of runtime",
        "1 h to its deadline",
    ]


def test_every_state_has_an_answer() -> None:
    for state in JobState:
        assert explained(a_job(state, id=ID)).answer
