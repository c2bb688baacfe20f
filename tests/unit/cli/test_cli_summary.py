from __future__ import annotations

from dataclasses import replace

from baton.contract.jobs.job import AttemptEnd, JobState
from gpu_client.cli.jobs.summary import headline, step_text, summarize
from tests.unit.cli.cli_kit import NOW, a_job, an_attempt

PROGRESS = {"step": 150, "total_steps": 500, "metrics": {"loss": 0.31234}, "reported_at": NOW - 300}


def running(**more: object) -> object:
    return a_job(JobState.RUNNING, epoch=2, counters={"attempts": 2, "runtime_s": 3000}, **more)


def test_time_left_is_judged_by_the_pace_of_this_attempt_alone() -> None:
    # 50 steps in 200 s since it resumed at 100: 350 steps are left
    attempt = an_attempt(2, progress=PROGRESS, resumed_step=100)
    found = summarize(a_job(JobState.RUNNING, epoch=2), attempt, None)
    assert (found.step, found.total_steps, found.eta_s, found.loss) == (150, 500, 1400, 0.31234)
    assert found.share == 0.3
    assert step_text(found) == "150 of 500, 23 min 20 s left"
    assert step_text(summarize(a_job(), None, None)) == ""
    assert step_text(replace(found, total_steps=None, eta_s=None)) == "150 of ?"


def test_no_time_left_is_told_before_there_is_a_pace() -> None:
    stale = an_attempt(2, progress={**PROGRESS, "reported_at": NOW - 501}, resumed_step=100)
    assert summarize(a_job(JobState.RUNNING), stale, None).eta_s is None
    same = an_attempt(2, progress=PROGRESS, resumed_step=150)
    assert summarize(a_job(JobState.RUNNING), same, None).eta_s is None
    endless = an_attempt(2, progress={"step": 150, "reported_at": NOW})
    assert summarize(a_job(JobState.RUNNING), endless, None).eta_s is None
    assert summarize(a_job(JobState.RUNNING), None, None).eta_s is None


def test_cost_counts_the_running_attempt_up_to_its_last_heartbeat() -> None:
    # the lease ends 3 x 30 s after the last heartbeat, which came 400 s after the claim
    job = a_job(JobState.RUNNING, counters={"attempts": 2, "runtime_s": 3200}, lease_expires_at=NOW - 100 + 90)
    found = summarize(job, an_attempt(2), 0.25)
    assert (found.runtime_s, found.cost) == (3600, 0.25)
    assert summarize(job, an_attempt(2), None).cost is None
    ended = a_job(JobState.COMPLETE, counters={"attempts": 2, "runtime_s": 3200}, lease_expires_at=NOW)
    assert summarize(ended, an_attempt(2, AttemptEnd.COMPLETE), 0.25).runtime_s == 3200


def test_a_job_that_waits_shows_the_progress_it_made() -> None:
    job = a_job(JobState.PENDING, progress=PROGRESS, counters={"attempts": 1, "interruptions": 1, "runtime_s": 60})
    found = summarize(job, an_attempt(1, AttemptEnd.INTERRUPTED), 1.0)
    assert (found.step, found.eta_s, found.runtime_s) == (150, None, 60)


def test_complete_is_all_of_it() -> None:
    assert summarize(a_job(JobState.COMPLETE), None, None).share == 1.0


def test_the_headline() -> None:
    job = a_job(JobState.RUNNING, counters={"attempts": 2, "runtime_s": 3200}, lease_expires_at=NOW - 100 + 90)
    found = summarize(job, an_attempt(2, progress=PROGRESS, resumed_step=100), 0.25)
    assert (
        headline(found) == "running, step 150/500 (30%), 23 min 20 s left, loss 0.3123, 2 attempts, ran 1 h, cost 0.25"
    )
    fired = replace(found, fired="spike fired at step 120: rollback")
    assert headline(fired) == f"{headline(found)}, spike fired at step 120: rollback"
    parked = a_job(JobState.FAILED, reason={"code": "failure_cap", "message": "failed 3 times"})
    ended = replace(summarize(parked, None, None), fired="spike fired at step 120: rollback")
    assert headline(ended) == "failed, failure_cap: failed 3 times"


def test_it_is_plain_data() -> None:
    assert summarize(a_job(), None, None).as_data()["state"] == "pending"


def test_what_is_made_between_two_steps_is_shown_while_it_is_made() -> None:
    metrics = {"class_images": 12.0, "class_images_total": 200.0, "lonely_total": 3.0}
    progress = {"step": 0, "total_steps": 500, "metrics": metrics, "reported_at": NOW}
    attempt = an_attempt(1, progress=progress)
    found = summarize(a_job(JobState.RUNNING, epoch=1, counters={"attempts": 1}), attempt, None)
    assert found.phases == {"class_images": (12, 200)} and found.as_data()["phases"] == {"class_images": (12, 200)}
    assert headline(found).startswith("running, step 0/500 (0%), class images 12/200, 1 attempt")
    ended = summarize(a_job(JobState.PENDING, progress=progress), None, None)
    assert ended.phases == {} and "class" not in headline(ended), "nobody makes them now"
