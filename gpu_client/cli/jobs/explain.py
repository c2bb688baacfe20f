"""Command `baton explain`: derive from API facts why a job is in its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import typer

from baton.contract.history import AttemptView, EventType, EventView
from baton.contract.jobs import AttemptEnd, FailureClass, JobState, JobView, ReasonCode
from gpu_client.cli.core.formats import count, duration
from gpu_client.cli.core.output import Screen
from gpu_client.cli.core.session import AsJson, JobIdArgument, find_job, session_of
from gpu_client.cli.jobs.goodput import advice_on, percent, share_of
from gpu_client.cli.jobs.rule_events import is_of_preset, preset_line
from gpu_client.cli.jobs.summary import headline, reason_text, summarize
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient

LAST_WORDS_CHARACTERS = 160
LATE_S = 180
"""A lease that ran out longer ago than this should have been taken back: the sweeper runs every minute."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known. `attempts` and `events` oldest first; `pending` and `running` are the other jobs of the queue."""

    now: int
    job: JobView
    attempts: Sequence[AttemptView] = ()
    events: Sequence[EventView] = ()
    pending: Sequence[JobView] = ()
    running: Sequence[JobView] = ()


@dataclass(frozen=True)
class Explanation:
    """The answer in one sentence, what led to it, how much patience is left, and what can be done."""

    answer: str
    history: list[str] = field(default_factory=list)
    budgets: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    """What presets tell of its newest attempt, and not that it is over."""

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def explain(facts: Facts) -> Explanation:
    """Why is it not running, and why did it move?"""
    answers: dict[JobState, Callable[[Facts], tuple[str, list[str]]]] = {
        JobState.PENDING: _pending,
        JobState.RUNNING: _running,
        JobState.PAUSED: _paused,
        JobState.COMPLETE: _complete,
        JobState.FAILED: _failed,
        JobState.CANCELED: _canceled,
    }
    answer, advice = answers[facts.job.state](facts)
    if facts.job.copy_of is not None:
        answer += f" A rule made it, as a copy of job {facts.job.copy_of}."
    advice = [*advice, *advice_on(facts.attempts, facts.job.policy.checkpoint_every)]
    return Explanation(answer, [_moved(one) for one in facts.attempts], _budgets(facts), advice, _alerts(facts))


def _alerts(facts: Facts) -> list[str]:
    standing: dict[str, str] = {}
    for event in facts.events:
        if event.epoch == facts.job.epoch and is_of_preset(event):
            standing.pop(event.data["rule"], None)
            if event.type is EventType.RULE_FIRED:
                standing[event.data["rule"]] = f"{preset_line(event)} (at step {event.data.get('step')})"
    return list(standing.values())


_BAD_INPUT = [
    "Data that is missing or wrong: push it (baton data push DIR PREFIX), and the next attempt finds it. "
    "Parameters of a job do not change: baton stop ID, and submit another."
]


def _pending(facts: Facts) -> tuple[str, list[str]]:
    job, now = facts.job, facts.now
    bad_input = _BAD_INPUT if job.reason and job.reason.code == FailureClass.BAD_INPUT else []
    if job.not_before is not None and job.not_before > now:
        why = f" after {reason_text(job)}" if job.reason else ""
        return (
            f"It waits{why}, and is handed out again in {duration(job.not_before - now)}. "
            "The wait doubles with every failure.",
            [*bad_input, "The backoff is part of the job's policy (backoff_s)."],
        )
    if job.not_before is not None:
        return (
            f"Its wait ended {duration(now - job.not_before)} ago; "
            "it is ready as soon as a worker asks, or with the sweeper's next run within a minute.",
            [*bad_input, *_worker_advice(facts)],
        )
    ahead = jobs_ahead(job, facts.pending, now)
    waited = duration(now - job.updated_at)
    place = f"{count(len(ahead), 'job')} of the queue {'is' if len(ahead) == 1 else 'are'} handed out before it"
    first = "It is the next of its queue" if not ahead else place
    needs = requirements_text(job)
    demand = f" Only a worker that declares {needs} is given it." if needs else ""
    answer = f"It has been ready for {waited}, and no worker has taken it. {first}.{demand}"
    return answer, [*bad_input, *_worker_advice(facts)]


def _worker_advice(facts: Facts) -> list[str]:
    queue, needs = facts.job.queue, requirements_text(facts.job)
    advice: list[str] = []
    suited = f" that has {needs}" if needs else ""
    if facts.running:
        advice.append(
            f"Workers are there, but busy or unsuitable: {count(len(facts.running), 'job')} of the queue {queue!r} "
            f"{'runs' if len(facts.running) == 1 else 'run'} now."
        )
    else:
        advice.append(
            f"No job of the queue {queue!r} runs now. Is a worker{suited} started for it? "
            f"BATON_API_URL=... BATON_API_KEY=... BATON_QUEUE={queue} python -m gpu_client.agent"
        )
    if needs:
        advice.append(
            "A worker's first line says what it has. If the job can do with less: baton stop ID, and submit it "
            "with requirements of its own (in its file; 0 asks for nothing)."
        )
    avoided = avoided_machines(facts)
    if avoided:
        told = ", ".join(f"{machine} (for {duration(left_s)})" for machine, left_s in avoided.items())
        advice.append(f"Machines that failed it are not given it: {told}. Another one is.")
    return advice


def _running(facts: Facts) -> tuple[str, list[str]]:
    job = facts.job
    attempt = facts.attempts[-1] if facts.attempts else None
    machine = job.machine_id or (attempt.worker_id if attempt else None) or "a worker"
    said = headline(summarize(job, attempt, None))
    silent_s = facts.now - job.lease_expires_at if job.lease_expires_at is not None else 0
    if silent_s > 0:
        late = (
            f"Its machine {machine} has not been heard of; its lease ran out {duration(silent_s)} ago. "
            "If it does not come back, another machine goes on from "
            f"{_checkpoint(job)}."
        )
        advice = ["That should have happened by now: is the sweeper running?"] if silent_s > LATE_S else []
        return late, advice
    if job.reason is not None and job.reason.code in (ReasonCode.PAUSED_BY_USER, ReasonCode.PAUSED_BY_RULE):
        by = f" by {job.reason.message}" if job.reason.code == ReasonCode.PAUSED_BY_RULE else ""
        return (
            f"It runs on {machine} and was asked to pause{by}: it commits a checkpoint first.",
            ["To go on instead: baton resume ID"],
        )
    return f"It runs on {machine}: {said}.", []


def _paused(facts: Facts) -> tuple[str, list[str]]:
    message = facts.job.reason.message if facts.job.reason else ""
    why = f" ({message})" if message else ""
    by_rule = facts.job.reason is not None and facts.job.reason.code == ReasonCode.PAUSED_BY_RULE
    return f"It was paused by a {'rule' if by_rule else 'user'}{why} and resumes from {_checkpoint(facts.job)}.", [
        "To let it run: baton resume ID"
    ]


def _complete(facts: Facts) -> tuple[str, list[str]]:
    job = facts.job
    took = duration((job.completed_at or job.updated_at) - job.created_at)
    return (
        f"It is complete: {took} after it was submitted, of which it ran {duration(job.counters.runtime_s)}, "
        f"in {count(job.counters.attempts, 'attempt')}.",
        ["To have its outputs: baton fetch ID DIR"],
    )


_WHY_FAILED: dict[str, tuple[str, str]] = {
    ReasonCode.FAILURE_CAP: ("its command failed too often", "Read the end of its output (baton logs ID), mend it"),
    ReasonCode.NODE_FAULT_CAP: ("it met too many faulty machines", "See what they said (baton show ID)"),
    ReasonCode.INTERRUPTION_CAP: (
        "it lost its machine too often",
        "Raise policy.max_interruptions, or use machines that last longer",
    ),
    ReasonCode.FRUITLESS_INTERRUPTION_CAP: (
        "it lost one machine after the other without committing a checkpoint: it probably kills them",
        "Look for memory that runs out, and let it write checkpoints more often",
    ),
    ReasonCode.MAX_RUNTIME: ("it used up the time that its policy allows", "Raise policy.max_runtime_s"),
    FailureClass.STOPPED_BY_RULE: ("a rule ended it", "If that was wrong, mend the rule (baton rules set ID FILE)"),
    ReasonCode.DEADLINE: ("its deadline has passed", "Submit it with a later policy.deadline_at"),
}


def _failed(facts: Facts) -> tuple[str, list[str]]:
    job = facts.job
    code = job.reason.code if job.reason else ""
    why, advice = _WHY_FAILED.get(code, (reason_text(job) or "for a reason that was not given", "See: baton show ID"))
    said = f" ({job.reason.message})" if job.reason and job.reason.message and code in _WHY_FAILED else ""
    return f"It failed: {why}{said}.", [f"{advice}; then: baton retry ID"]


def _canceled(facts: Facts) -> tuple[str, list[str]]:
    message = facts.job.reason.message if facts.job.reason else ""
    if facts.job.reason is not None and facts.job.reason.code == ReasonCode.CANCELED_BY_RULE:
        return f"It was canceled: {message}.", ["To run it again: baton retry ID"]
    return f"It was stopped by a user{f' ({message})' if message else ''}.", ["To run it again: baton retry ID"]


def _moved(attempt: AttemptView) -> str:
    """What became of one attempt."""
    where = attempt.machine_id or attempt.worker_id or "a worker"
    resumed = f"from step {attempt.resumed_step}" if attempt.resumed_step is not None else "from the start"
    told = f"attempt {attempt.epoch} on {where}, {resumed}"
    goodput = percent(share_of(attempt.progress.goodput)) if attempt.progress else ""
    useful = f", goodput {goodput}" if goodput else ""
    if attempt.end is None:
        return f"{told}: runs{useful}"
    lasted = duration((attempt.ended_at or attempt.started_at) - attempt.started_at)
    reason = attempt.reason
    because = f" ({reason.code}{': ' + reason.message if reason.message else ''})" if reason else ""
    kept = f"; committed step {attempt.checkpoint_step}" if attempt.checkpoint_step is not None else ""
    return f"{told}: {_ENDED[attempt.end]} after {lasted}{useful}{because}{_how(attempt)}{kept}{_last_words(attempt)}"


_ENDED = {
    AttemptEnd.COMPLETE: "completed it",
    AttemptEnd.FAILED: "failed",
    AttemptEnd.INTERRUPTED: "lost its machine",
    AttemptEnd.RELEASED: "handed it back in good order",
    AttemptEnd.CANCELED: "was stopped",
}


def _how(attempt: AttemptView) -> str:
    if attempt.signal is not None:
        return f", by signal {attempt.signal}"
    said = f"exit code {attempt.exit_code}"
    told_already = attempt.reason is not None and said in attempt.reason.message
    return f", {said}" if attempt.exit_code and not told_already else ""


def _last_words(attempt: AttemptView) -> str:
    if attempt.end is not AttemptEnd.FAILED or not attempt.log_tail:
        return ""
    words = attempt.log_tail[-1]
    if attempt.reason and words.removeprefix("error: ") in attempt.reason.message:
        return ""  # a trainer that refused: its line is the reason
    return f"; last words: {words[:LAST_WORDS_CHARACTERS]}{' ...' if len(words) > LAST_WORDS_CHARACTERS else ''}"


def _budgets(facts: Facts) -> list[str]:
    """What is used of the policy's limits, where something is."""
    counters, policy = facts.job.counters, facts.job.policy
    used = (
        (counters.failures, policy.max_failures, "failures"),
        (counters.node_faults, policy.max_node_faults, "faulty machines"),
        (counters.interruptions, policy.max_interruptions, "lost machines"),
        (
            fruitless_interruptions(facts.attempts),
            policy.max_fruitless_interruptions,
            "lost in a row without a checkpoint",
        ),
    )
    lines = [f"{number} of {allowed} {what}" for number, allowed, what in used if number]
    if policy.max_runtime_s is not None:
        lines.append(f"{duration(counters.runtime_s)} of {duration(policy.max_runtime_s)} of running")
    if policy.deadline_at is not None and not facts.job.state.terminal:
        left_s = policy.deadline_at - facts.now
        lines.append(f"{duration(left_s)} to its deadline" if left_s > 0 else "its deadline has passed")
    return lines


def fruitless_interruptions(attempts: Sequence[AttemptView]) -> int:
    """How many machines were lost in a row, up to now, without a new checkpoint; failures in between do not count."""
    lost = 0
    for attempt in reversed(attempts):
        if attempt.end is AttemptEnd.INTERRUPTED and attempt.checkpoint_step is None:
            lost += 1
        elif attempt.checkpoint_step is not None:
            break
    return lost


def avoided_machines(facts: Facts) -> dict[str, int]:
    """Machines that failed the job so recently that they are not given it, and for how many seconds more."""
    left_s = {
        attempt.machine_id: (attempt.ended_at or 0) + facts.job.policy.avoid_machine_s - facts.now
        for attempt in facts.attempts
        if attempt.end is AttemptEnd.FAILED and attempt.machine_id
    }
    return {machine: left_s[machine] for machine in sorted(left_s) if left_s[machine] > 0}


def jobs_ahead(job: JobView, pending: Sequence[JobView], now: int) -> list[JobView]:
    """Ready jobs that are handed out first: begun before, then by priority, then by age."""

    def rank(one: JobView) -> tuple[bool, int, int, str]:
        return (one.epoch == 0, -one.priority, one.created_at, one.id)

    ready = [one for one in pending if one.id != job.id and (one.not_before or 0) <= now and one.queue == job.queue]
    return sorted((one for one in ready if rank(one) < rank(job)), key=rank)


def requirements_text(job: JobView) -> str:
    """What a worker must declare; "" if nothing."""
    needs = job.requirements
    said = [
        f"{value:g} {unit}"
        for value, unit in (
            (needs.min_vram_gib, "GiB of GPU memory"),
            (needs.min_disk_gib, "GiB of disk"),
            (needs.min_gpus, "GPUs"),
        )
        if value
    ]
    if needs.gpu_models:
        said.append(f"one of the models {', '.join(needs.gpu_models)}")
    if needs.image:
        said.append(f"the image {needs.image}")
    return ", ".join(said)


def _checkpoint(job: JobView) -> str:
    return (
        f"step {job.checkpoint_step}"
        if job.checkpoint_step is not None
        else "the start, for no checkpoint is committed"
    )


_TO_DO = "What to do"
_MAX_PAGES = 10
"""Ten thousand jobs in one state are enough to tell that a queue is long, and as many events of one job."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain_job)


def explain_job(context: typer.Context, job_id: JobIdArgument, as_json: AsJson = False) -> None:
    """Say in plain words why a job is where it is, and why it moved."""
    session = session_of(context)
    with session.client() as client:
        facts = gather(client, find_job(client, job_id))
    explanation = explain(facts)
    if as_json:
        session.screen.json({"id": facts.job.id, "state": facts.job.state.value, **explanation.as_data()})
    else:
        _show(session.screen, facts.job, explanation)


def gather(client: BatonClient, job: JobView) -> Facts:
    """Everything that the explanation needs, and for a job that does not wait nothing about others."""
    waits = job.state is JobState.PENDING
    return Facts(
        now=client.health().server_time,
        job=job,
        attempts=[one for page in pages(lambda c: client.attempts(job.id, cursor=c)) for one in page.attempts],
        events=_events(client, job) if job.epoch else (),
        pending=_of_queue(client, job.queue, JobState.PENDING) if waits else (),
        running=_of_queue(client, job.queue, JobState.RUNNING) if waits else (),
    )


def _events(client: BatonClient, job: JobView) -> list[EventView]:
    found: list[EventView] = []
    listed = pages(lambda cursor: client.events(job.id, limit=1000, cursor=cursor))
    for _, page in zip(range(_MAX_PAGES), listed, strict=False):
        found += page.events
    return found


def _of_queue(client: BatonClient, queue: str, state: JobState) -> list[JobView]:
    found: list[JobView] = []
    listed = pages(lambda cursor: client.jobs(status=state, queue=queue, limit=1000, cursor=cursor))
    for _, page in zip(range(_MAX_PAGES), listed, strict=False):
        found += page.jobs
    return found


def _show(screen: Screen, job: JobView, explanation: Explanation) -> None:
    screen.line(f"{job.name or job.recipe or 'job'} {job.id}")
    screen.paragraph(explanation.answer)
    for title, lines in (
        ("What presets tell", explanation.alerts),
        ("What happened", explanation.history),
        ("Used of its policy", explanation.budgets),
        (_TO_DO, explanation.advice),
    ):
        if lines:
            screen.line("")
            screen.line(f"{title}:")
            screen.items(line.replace(" ID", " " + job.id[:8]) if title == _TO_DO else line for line in lines)
