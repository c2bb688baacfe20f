"""Command `baton explain`: derive the cause of a job's state from attempts, events and the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import typer

from baton.contract.elastic.world import WorldView
from baton.contract.fleets.job_machines import JobMachines
from baton.contract.jobs.history import AttemptView, EventType, EventView
from baton.contract.jobs.job import AttemptEnd, FailureClass, JobState, JobView, ReasonCode
from gpu_client.cli.core.formats import count, duration
from gpu_client.cli.core.output import CommandOutput
from gpu_client.cli.core.session import AsJson, JobIdArgument, find_job, list_attempts, session_of
from gpu_client.cli.jobs.goodput import advice_on, percent, share_of
from gpu_client.cli.jobs.rented import (
    attempt_note,
    cost_text,
    cost_usd,
    replaced_sentences,
    running_sentence,
    waiting_advice,
    waiting_sentences,
)
from gpu_client.cli.jobs.rule_events import is_preset_event, preset_line
from gpu_client.cli.jobs.summary import headline, reason_text, summarize
from gpu_client.cli.world.view import waiting_sentence, watch_text
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient

MAX_LINE_CHARACTERS = 160
LATE_S = 180
"""Maximum age of an expired lease in seconds. The sweeper, which runs every minute, revokes expired leases."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """Input of an explanation. `attempts`, `events`: oldest first. `pending`, `running`: other jobs of the queue."""

    now: int
    job: JobView
    attempts: Sequence[AttemptView] = ()
    events: Sequence[EventView] = ()
    pending: Sequence[JobView] = ()
    running: Sequence[JobView] = ()
    machines: JobMachines | None = None
    """Fleets and rented machines of the job; None if neither was requested."""
    world: WorldView | None = None
    """Nodes of an elastic job; None for another job."""

    @property
    def rented(self) -> JobMachines | None:
        """Fleets and rented machines, if a fleet serves the queue of the job."""
        return self.machines if self.machines and self.machines.fleets else None


@dataclass(frozen=True)
class Explanation:
    """Cause of a job's state, history, used limits, advice and alerts."""

    answer: str
    history: list[str] = field(default_factory=list)
    budgets: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    """Uncleared preset firings of the newest attempt."""

    def as_data(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        return asdict(self)


def explain(facts: JobFacts) -> Explanation:
    """Explain a job's state and its moves between machines."""
    answers: dict[JobState, Callable[[JobFacts], tuple[str, list[str]]]] = {
        JobState.PENDING: _pending,
        JobState.RUNNING: _running,
        JobState.PAUSED: _paused,
        JobState.COMPLETE: _complete,
        JobState.FAILED: _failed,
        JobState.CANCELED: _canceled,
    }
    answer, advice = answers[facts.job.state](facts)
    if facts.job.copy_of is not None:
        answer += f" A rule created the job as a copy of job {facts.job.copy_of}."
    answer += _money(facts)
    advice = [*advice, *advice_on(facts.attempts, facts.job.policy.checkpoint_every)]
    rented = facts.machines.attempts if facts.machines else ()
    notes = {(one.seat, one.epoch): attempt_note(one) for one in rented}
    history = [_describe_attempt(one, notes.get((one.seat, one.epoch), "")) for one in facts.attempts]
    return Explanation(answer, history, _budgets(facts), advice, _alerts(facts))


def _money(facts: JobFacts) -> str:
    """Return the sentence about the cost of the job on rented machines; empty without any."""
    found = facts.machines
    if found is None or not (found.attempts or cost_usd(found)):
        return ""
    if facts.job.nodes is not None and not facts.job.state.terminal:
        return " ".join(["", *replaced_sentences(found), f"On rented machines {cost_text(found, ' so far')}."])
    if facts.job.state is JobState.RUNNING:
        return f" {running_sentence(found, facts.job.epoch)}".rstrip()
    return f" On rented machines {cost_text(found)}."


def _alerts(facts: JobFacts) -> list[str]:
    active: dict[tuple[Any, str], str] = {}
    for event in facts.events:
        if (event.epoch == facts.job.epoch or facts.job.nodes is not None) and is_preset_event(event):
            seat = event.data.get("seat")
            active.pop((seat, event.data["rule"]), None)
            if event.type is EventType.RULE_FIRED:
                node = "" if seat is None else f"node {seat}: "
                text = f"{node}{preset_line(event)} (at step {event.data.get('step')})"
                active[seat, event.data["rule"]] = text
    return list(active.values())


_BAD_INPUT = [
    "If data is missing or wrong, push the data (baton data push DIR PREFIX); the next attempt reads it. "
    "Parameters of a job cannot change: baton stop ID, then submit a new job."
]


def _forming(facts: JobFacts, world: WorldView) -> tuple[str, list[str]]:
    """Explain a running job whose world has no members yet, or no members any more."""
    claimed = [one for one in facts.attempts if one.ended_at is None]
    where = ", ".join(one.machine_id or one.worker_id or "a worker" for one in claimed)
    answer = (
        f"The job runs and is {waiting_sentence(world)}. Workers hold {len(claimed)} of {count(world.max, 'seat')} "
        f"({where}); a node joins when its script calls session.elastic."
    )
    missing = world.min - len(claimed)
    if missing <= 0:
        return answer, ["To see what the nodes do: baton logs ID"]
    if facts.rented is not None:
        return " ".join([answer, *waiting_sentences(facts.rented)]), waiting_advice(facts.rented)
    return answer, [
        f"Each node needs a worker. Start {missing} more: "
        f"BATON_API_URL=... BATON_API_KEY=... BATON_QUEUE={facts.job.queue} python -m gpu_client.agent"
    ]


def _pending(facts: JobFacts) -> tuple[str, list[str]]:
    answer, advice = _claimable(facts)
    return (
        (answer, advice) if facts.world is None else (f"The job is {waiting_sentence(facts.world)}. {answer}", advice)
    )


def _claimable(facts: JobFacts) -> tuple[str, list[str]]:
    job, now = facts.job, facts.now
    bad_input = _BAD_INPUT if job.reason and job.reason.code == FailureClass.BAD_INPUT else []
    if job.not_before is not None and job.not_before > now:
        why = f" after {reason_text(job)}" if job.reason else ""
        return (
            f"The job backs off{why}; workers can claim it in {duration(job.not_before - now)}. "
            "Each failure doubles the backoff.",
            [*bad_input, "The job's policy sets the backoff (backoff_s)."],
        )
    if job.not_before is not None:
        return (
            f"The backoff ended {duration(now - job.not_before)} ago. "
            "The job becomes claimable when a worker asks, or when the sweeper runs within a minute.",
            [*bad_input, *_worker_advice(facts)],
        )
    ahead = jobs_ahead(job, facts.pending, now)
    waited = duration(now - job.updated_at)
    position = f"{count(len(ahead), 'job')} of its queue {'precedes' if len(ahead) == 1 else 'precede'} it"
    first = "It is the first job of its queue" if not ahead else position
    needs = requirements_text(job)
    demand = f" Only a worker that declares {needs} can claim it." if needs else ""
    if facts.rented is not None:
        demand = "".join(f" {sentence}" for sentence in waiting_sentences(facts.rented, avoided_machines(facts)))
    elif facts.machines is not None:
        demand = f"{demand} No fleet serves the queue {job.queue!r}."
    if job.epoch:
        demand = f"{demand} The next attempt begins from {_checkpoint(job)}."
    answer = f"The job has been claimable for {waited}, and no worker has claimed it. {first}.{demand}"
    return answer, [*bad_input, *_worker_advice(facts)]


def _worker_advice(facts: JobFacts) -> list[str]:
    queue, needs = facts.job.queue, requirements_text(facts.job)
    if facts.rented is not None:
        return [*waiting_advice(facts.rented), *_avoided_advice(facts)]
    advice: list[str] = []
    suited = f" with {needs}" if needs else ""
    if facts.running:
        advice.append(
            f"All workers are busy or unsuitable: {count(len(facts.running), 'job')} of the queue {queue!r} "
            f"{'runs' if len(facts.running) == 1 else 'run'} now."
        )
    else:
        advice.append(
            f"No job of the queue {queue!r} runs now. Start a worker{suited}: "
            f"BATON_API_URL=... BATON_API_KEY=... BATON_QUEUE={queue} python -m gpu_client.agent"
        )
    if needs:
        advice.append(
            "The first log line of a worker lists its resources. If the job needs less: baton stop ID, then submit the "
            "job with lower requirements (in the job file; 0 means no requirement)."
        )
    if facts.machines is not None:
        advice.append(
            f"To rent a machine instead: name the queue {queue!r} in the document of a fleet (baton fleet apply FILE), "
            "or rent for one job: baton submit FILE --rent --budget USD --provider NAME"
        )
    return [*advice, *_avoided_advice(facts)]


def _avoided_advice(facts: JobFacts) -> list[str]:
    avoided = avoided_machines(facts)
    if not avoided:
        return []
    attempt_text = ", ".join(f"{machine} (for {duration(left_s)})" for machine, left_s in avoided.items())
    return [f"These machines failed the job and cannot claim it yet: {attempt_text}. Other machines can."]


def _running(facts: JobFacts) -> tuple[str, list[str]]:
    job = facts.job
    attempt = facts.attempts[-1] if facts.attempts else None
    machine = job.machine_id or (attempt.worker_id if attempt else None) or "a worker"
    if facts.world is not None:
        if facts.world.state == "forming":
            return _forming(facts, facts.world)
        machine = count(len(facts.world.members), "node")
    parts = headline(replace(summarize(job, attempt, None, nodes=facts.attempts), nodes=_describe_world(facts)))
    silent_s = facts.now - job.lease_expires_at if job.lease_expires_at is not None else 0
    if silent_s > 0:
        late = (
            f"The machine {machine} is silent, and its lease expired {duration(silent_s)} ago. "
            "If the machine stays silent, another machine resumes the job from "
            f"{_checkpoint(job)}."
        )
        advice = ["This takeover is late. Check that the sweeper runs."] if silent_s > LATE_S else []
        return late, advice
    if job.reason is not None and job.reason.code in (ReasonCode.PAUSED_BY_USER, ReasonCode.PAUSED_BY_RULE):
        by = f" by {job.reason.message}" if job.reason.code == ReasonCode.PAUSED_BY_RULE else ""
        return (
            f"The job runs on {machine} and was asked to pause{by}: it commits a checkpoint first.",
            ["To continue instead: baton resume ID"],
        )
    return f"The job runs on {machine}: {parts}.", []


def _describe_world(facts: JobFacts) -> str:
    return "" if facts.world is None else watch_text(facts.world)


def _paused(facts: JobFacts) -> tuple[str, list[str]]:
    message = facts.job.reason.message if facts.job.reason else ""
    why = f" ({message})" if message else ""
    by_rule = facts.job.reason is not None and facts.job.reason.code == ReasonCode.PAUSED_BY_RULE
    pauser = "rule" if by_rule else "user"
    return f"The job was paused by a {pauser}{why} and will resume from {_checkpoint(facts.job)}.", [
        "To resume the job: baton resume ID"
    ]


def _complete(facts: JobFacts) -> tuple[str, list[str]]:
    job = facts.job
    took = duration((job.completed_at or job.updated_at) - job.created_at)
    return (
        f"The job completed {took} after its submission and ran for {duration(job.counters.runtime_s)} "
        f"in {count(job.counters.attempts, 'attempt')}.",
        ["To download the outputs: baton fetch ID DIR"] if job.artifacts else [],
    )


_WHY_FAILED: dict[str, tuple[str, str]] = {
    ReasonCode.FAILURE_CAP: (
        "its command failed too often",
        "Read the end of the output (baton logs ID), correct the cause",
    ),
    ReasonCode.NODE_FAULT_CAP: ("it met too many faulty machines", "Read the reasons of the attempts (baton show ID)"),
    ReasonCode.INTERRUPTION_CAP: (
        "it lost its machine too often",
        "Raise policy.max_interruptions, or use machines that are preempted less often",
    ),
    ReasonCode.FRUITLESS_INTERRUPTION_CAP: (
        "it lost several machines in a row without committing a checkpoint, and probably crashes them",
        "Check the memory use, and take checkpoints more often",
    ),
    ReasonCode.MAX_RUNTIME: ("it reached the maximum runtime of its policy", "Raise policy.max_runtime_s"),
    FailureClass.STOPPED_BY_RULE: ("a rule ended it", "If the rule was wrong, change it (baton rules set ID FILE)"),
    ReasonCode.DEADLINE: ("its deadline has passed", "Submit the job with a later policy.deadline_at"),
}


def _failed(facts: JobFacts) -> tuple[str, list[str]]:
    job = facts.job
    code = job.reason.code if job.reason else ""
    why, advice = _WHY_FAILED.get(
        code, (reason_text(job) or "no reason was recorded", "Show the attempts: baton show ID")
    )
    parts = f" ({job.reason.message})" if job.reason and job.reason.message and code in _WHY_FAILED else ""
    return f"The job failed: {why}{parts}.", [f"{advice}; then: baton retry ID"]


def _canceled(facts: JobFacts) -> tuple[str, list[str]]:
    message = facts.job.reason.message if facts.job.reason else ""
    if facts.job.reason is not None and facts.job.reason.code == ReasonCode.CANCELED_BY_RULE:
        return f"The job was canceled: {message}.", ["To run the job again: baton retry ID"]
    return f"A user stopped the job{f' ({message})' if message else ''}.", ["To run the job again: baton retry ID"]


def _describe_attempt(attempt: AttemptView, note: str) -> str:
    """Describe the outcome of one attempt on one line. `note`: on the machine, after its name."""
    where = f"{attempt.machine_id or attempt.worker_id or 'a worker'}{note}"
    resumed = f"from step {attempt.resumed_step}" if attempt.resumed_step is not None else "from the start"
    node = "" if attempt.seat is None else f"node {attempt.seat}, "
    attempt_text = f"{node}attempt {attempt.epoch} on {where}, {resumed}"
    goodput = percent(share_of(attempt.progress.goodput)) if attempt.progress else ""
    useful = f", goodput {goodput}" if goodput else ""
    if attempt.end is None:
        return f"{attempt_text}: runs{useful}"
    lasted = duration((attempt.ended_at or attempt.started_at) - attempt.started_at)
    reason = attempt.reason
    because = f" ({reason.code}{': ' + reason.message if reason.message else ''})" if reason else ""
    committed = f"; committed step {attempt.checkpoint_step}" if attempt.checkpoint_step is not None else ""
    details = f"{useful}{because}{_format_exit(attempt)}{committed}{_format_last_line(attempt)}"
    return f"{attempt_text}: {_END_TEXTS[attempt.end]} after {lasted}{details}"


_END_TEXTS = {
    AttemptEnd.COMPLETE: "completed",
    AttemptEnd.FAILED: "failed",
    AttemptEnd.INTERRUPTED: "lost its machine",
    AttemptEnd.RELEASED: "released the job",
    AttemptEnd.CANCELED: "was stopped",
}


def _format_exit(attempt: AttemptView) -> str:
    if attempt.signal is not None:
        return f", by signal {attempt.signal}"
    parts = f"exit code {attempt.exit_code}"
    is_in_reason = attempt.reason is not None and parts in attempt.reason.message
    return f", {parts}" if attempt.exit_code and not is_in_reason else ""


def _format_last_line(attempt: AttemptView) -> str:
    if attempt.end is not AttemptEnd.FAILED or not attempt.log_tail:
        return ""
    words = attempt.log_tail[-1]
    if attempt.reason and words.removeprefix("error: ") in attempt.reason.message:
        return ""  # The trainer refused the job, and the reason contains the line.
    return f"; last line: {words[:MAX_LINE_CHARACTERS]}{' ...' if len(words) > MAX_LINE_CHARACTERS else ''}"


def _budgets(facts: JobFacts) -> list[str]:
    """List the used limits of the policy. An elastic job has the limits of all its nodes together."""
    counters, policy = facts.job.counters, facts.job.policy
    nodes = facts.job.nodes.max if facts.job.nodes is not None else 0
    used = (
        (counters.failures, policy.max_failures, "failures"),
        (counters.node_faults, policy.max_node_faults, "faulty machines"),
        (counters.interruptions, policy.max_interruptions, "lost machines"),
        (
            fruitless_interruptions(facts.attempts) if facts.job.nodes is None else 0,
            policy.max_fruitless_interruptions,
            "consecutive lost machines without a checkpoint",
        ),
    )
    if nodes:
        # Only the failures and faulty machines since the newest checkpoint count; the line shows all of them.
        since = {"failures": " without a checkpoint", "faulty machines": " without a checkpoint"}
        lines = [
            f"{number} {unit}; {allowed * nodes} of all nodes{since.get(unit, '')} are allowed"
            for number, allowed, unit in used
            if number
        ]
    else:
        lines = [f"{number} of {allowed} {unit}" for number, allowed, unit in used if number]
    if policy.max_runtime_s is not None:
        each = " for each node" if nodes else ""
        lines.append(f"{duration(counters.runtime_s)} of {duration(policy.max_runtime_s)} of runtime{each}")
    if policy.deadline_at is not None and not facts.job.state.terminal:
        left_s = policy.deadline_at - facts.now
        lines.append(f"{duration(left_s)} to its deadline" if left_s > 0 else "its deadline has passed")
    return lines


def fruitless_interruptions(attempts: Sequence[AttemptView]) -> int:
    """Count the newest machine losses without a new checkpoint in between; ignore failures."""
    lost = 0
    for attempt in reversed(attempts):
        if attempt.end is AttemptEnd.INTERRUPTED and attempt.checkpoint_step is None:
            lost += 1
        elif attempt.checkpoint_step is not None:
            break
    return lost


def avoided_machines(facts: JobFacts) -> dict[str, int]:
    """Return the machines that may not claim the job after a failure, with the remaining seconds."""
    left_s = {
        attempt.machine_id: (attempt.ended_at or 0) + facts.job.policy.avoid_machine_s - facts.now
        for attempt in facts.attempts
        if attempt.end is AttemptEnd.FAILED and attempt.machine_id
    }
    return {machine: left_s[machine] for machine in sorted(left_s) if left_s[machine] > 0}


def jobs_ahead(job: JobView, pending: Sequence[JobView], now: int) -> list[JobView]:
    """Return the claimable jobs that precede `job`: begun jobs first, then by priority, then by age."""

    def rank(one: JobView) -> tuple[bool, int, int, str]:
        return (one.epoch == 0, -one.priority, one.created_at, one.id)

    ready = [one for one in pending if one.id != job.id and (one.not_before or 0) <= now and one.queue == job.queue]
    return sorted((one for one in ready if rank(one) < rank(job)), key=rank)


def requirements_text(job: JobView) -> str:
    """Format the requirements of a job; "" without requirements."""
    needs = job.requirements
    parts = [
        f"{value:g} {unit}"
        for value, unit in (
            (needs.min_vram_gib, "GiB of GPU memory"),
            (needs.min_disk_gib, "GiB of disk"),
            (needs.min_gpus, "GPUs"),
        )
        if value
    ]
    if needs.gpu_models:
        parts.append(f"one of the models {', '.join(needs.gpu_models)}")
    if needs.image:
        parts.append(f"the image {needs.image}")
    return ", ".join(parts)


def _checkpoint(job: JobView) -> str:
    return (
        f"step {job.checkpoint_step}"
        if job.checkpoint_step is not None
        else "the start, because no checkpoint is committed"
    )


_ADVICE = "Advice"
_MAX_PAGES = 10
"""Maximum number of pages. 10,000 jobs of one state, or 10,000 events of one job, suffice for an explanation."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain_job)


def explain_job(context: typer.Context, job_id: JobIdArgument, as_json: AsJson = False) -> None:
    """Explain the state of a job and its moves between machines."""
    session = session_of(context)
    with session.client() as client:
        facts = collect_facts(client, find_job(client, job_id))
    explanation = explain(facts)
    if as_json:
        session.output.json({"id": facts.job.id, "state": facts.job.state.value, **explanation.as_data()})
    else:
        _show(session.output, facts.job, explanation)


def collect_facts(client: BatonClient, job: JobView) -> JobFacts:
    """Request the input of an explanation; other jobs of the queue only for a pending job."""
    world = client.world(job.id) if job.nodes is not None and not job.state.terminal else None
    waits = job.state is JobState.PENDING
    return JobFacts(
        world=world,
        now=client.health().server_time,
        job=job,
        attempts=list_attempts(client, job.id),
        events=_events(client, job) if job.epoch else (),
        pending=_list_queue(client, job.queue, JobState.PENDING) if waits else (),
        running=_list_queue(client, job.queue, JobState.RUNNING) if waits else (),
        machines=client.job_machines(job.id),
    )


def _events(client: BatonClient, job: JobView) -> list[EventView]:
    found: list[EventView] = []
    listed = pages(lambda cursor: client.events(job.id, limit=1000, cursor=cursor))
    for _, page in zip(range(_MAX_PAGES), listed, strict=False):
        found += page.events
    return found


def _list_queue(client: BatonClient, queue: str, state: JobState) -> list[JobView]:
    found: list[JobView] = []
    listed = pages(lambda cursor: client.jobs(status=state, queue=queue, limit=1000, cursor=cursor))
    for _, page in zip(range(_MAX_PAGES), listed, strict=False):
        found += page.jobs
    return found


def _show(output: CommandOutput, job: JobView, explanation: Explanation) -> None:
    output.line(f"{job.name or job.recipe or 'job'} {job.id}")
    output.paragraph(explanation.answer)
    for title, lines in (
        ("Alerts of presets", explanation.alerts),
        ("History", explanation.history),
        ("Used limits of the policy", explanation.budgets),
        (_ADVICE, explanation.advice),
    ):
        if lines:
            output.line("")
            output.line(f"{title}:")
            output.items(line.replace(" ID", " " + job.id[:8]) if title == _ADVICE else line for line in lines)
