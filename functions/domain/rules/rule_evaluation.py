"""Evaluate rules in the control plane: observe a job, evaluate, and execute the actions.

The module loads the rule language, therefore callers import the module only for a job with such rules. The decisions of
an evaluation and the new rule state are one transaction: no rule fires twice, and no decision is lost.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.contract.errors import Fault
from baton.contract.jobs.job import JobState, Progress
from baton.contract.rules.document.loader import load
from baton.contract.rules.document.rule import RuleSet
from baton.contract.rules.document.rule_placement import collect_group_values, split
from baton.contract.rules.engine.group_statistics import GroupValues
from baton.contract.rules.engine.rule_evaluator import Evaluator, StateError
from baton.contract.rules.language.faults import Code
from baton.contract.rules.language.typed_ast import Aggregate, walk
from baton.contract.rules.limits import LIMITS
from baton.contract.rules.numbers import encode
from baton.contract.worker.control import MAX_STATUS_CHARS, RuleStatus
from functions.domain.jobs.attempt_end import cost_usd
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import Attempt, CommandRecord, Job, Lease, MemberRecord, RuleStateRecord
from functions.domain.rules.group_metrics import GroupMembers, reported_values, update_member
from functions.domain.rules.rule_actions import RuleActionExecutor
from functions.domain.rules.scaling import GroupJobs

MAX_RULES = 20
"""Rules of a document: the decisions of one evaluation are written in one transaction."""
MAX_POINTS = 2_000
"""Points of all windows together: the rule state is one item, written with every heartbeat."""
DURATION_POINTS = 500
"""Points that a window over a duration may hold."""
EVALUATION_INTERVAL_S = 50
"""Interval of scheduled evaluations: shorter than a minute, so that each sweep, early or late, finds the job."""
MAX_ERRORS = 3
"""Failed evaluations after which the rules are off until the next revision."""
MAX_ERROR_CHARS = 300

_LIMITS = LIMITS._replace(duration_points=DURATION_POINTS)


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """Job as it was read, with the attempt and the lease of the present attempt, if any.

    nodes: running attempts at the seats of an elastic job, whose `lease` is the newest of its seats (`merge_leases`).
    """

    job: Job
    rule_state: RuleStateRecord | None = None
    attempt: Attempt | None = None
    lease: Lease | None = None
    nodes: Sequence[Attempt] = ()


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Writes of an evaluation: `change`, which contains the rule state, or the rule state alone."""

    rule_state: RuleStateRecord
    change: Transaction | None = None


def control_plane_rules(text: str) -> RuleSet:
    """Return the rules of a document that the control plane evaluates. Raises ValueError for a faulty document."""
    if not text.strip():
        return RuleSet()
    loaded = load(text)
    if loaded.rules is None:
        first = loaded.faults[0]
        raise ValueError(f"{first.field}: {first.reason}")
    return split(loaded.rules).control_plane._replace(limits=_LIMITS)


def find_size_faults(rules: RuleSet) -> list[Fault]:
    """Return the faults of too many rules and too large windows in the control plane's rules."""
    faults = []
    if len(rules.rules) > MAX_RULES:
        reason = f"the control plane evaluates {len(rules.rules)} of these rules; at most {MAX_RULES} are allowed"
        faults.append(Fault("rules", reason, "Leave some out.", code=Code.TOO_LARGE))
    expressions = [one for rule in rules.rules for one in (rule.when, rule.clear) if one is not None]
    summaries = {part.summary for one in expressions for part in walk(one) if isinstance(part, Aggregate)}
    windows = {(one.metric, one.function, one.window) for one in summaries if one.window is not None}
    points = sum(math.ceil(window.points or DURATION_POINTS) for _, _, window in windows)
    if points > MAX_POINTS:
        reason = (
            f"windows of rules that the control plane evaluates hold {points:,} points together; "
            f"at most {MAX_POINTS:,} are allowed"
        )
        faults.append(Fault("rules", reason, "Make windows smaller, or use ema.", code=Code.TOO_LARGE))
    return faults


def evaluate_rules(
    seen: JobSnapshot,
    rules: RuleSet,
    *,
    event: str,
    now: int,
    read_commands: Callable[[], Sequence[CommandRecord]],
    members: Mapping[str, MemberRecord] | None = None,
    groups: Callable[[str], GroupJobs] | None = None,
) -> EvaluationResult:
    """Evaluate a job's rules at `now`.

    `event`: `heartbeat`, `timer` or `state`. `read_commands` reads the job's commands, `groups` reads the jobs of a
    group that a rule scales. `members`: values of the job's group; None for a job without a group or rules that read no
    group.
    """
    job, before = seen.job, seen.rule_state
    progress = _unseen(seen)
    needed = collect_group_values(rules)
    member = before.member if before is not None else MemberRecord()
    if needed and members is not None:
        member = update_member(member, needed, progress, now=now)
    group = GroupMembers(job.id, member, members) if needed else None
    known = progress is None and before is not None and before.epoch == job.epoch
    step = before.step if known and before is not None else _step(seen)
    version = 1 if before is None else before.version + 1
    more: dict[str, Any] = {} if groups is None else {"groups": groups}
    pending = before.orders if before is not None else []
    executor = RuleActionExecutor(
        seen.job,
        seen.attempt,
        seen.lease,
        step=step,
        now=now,
        read_commands=read_commands,
        evaluation=version,
        pending=pending,
        **more,
    )
    evaluator, message = _restored(rules, group, before, job.rules_revision)
    if message:
        executor.add_event("rule.updated", severity="info", message=message)
    observed = {**_of_another_machine(rules, seen), **_observed(evaluator, progress, before), **measure_job(seen, now)}
    values: Callable[[], Mapping[str, float | None]] = evaluator.values
    for verdict in evaluator.observe(observed, step=step, now=float(now), event=event):
        executor.execute(verdict, values())
    after = RuleStateRecord(
        version=version,
        revision=job.rules_revision,
        state=pack_state(evaluator.state_dict()),
        at=now,
        next_at=now if executor.orders else _next_at(before, now),
        epoch=job.epoch,
        step=step,
        seen_at=(progress.reported_at or now) if progress else before.seen_at if before else 0,
        member=member,
        orders=executor.orders,
    )
    return _result(executor, after)


def asks_for_group(rules: RuleSet) -> bool:
    """Return True if a rule reads the reports of a group's jobs."""
    return bool(collect_group_values(rules))


def record_failure(seen: JobSnapshot, error: str, *, now: int, severity: str = "error") -> EvaluationResult:
    """Record a failed evaluation. After three failures of one revision the rules are off until the next revision."""
    before = seen.rule_state or RuleStateRecord(version=0)
    anew = before.revision != seen.job.rules_revision
    errors = (0 if anew else before.errors) + 1
    executor = RuleActionExecutor(seen.job, seen.attempt, seen.lease, step=_step(seen), now=now, read_commands=list)
    last = "; they are switched off until there is another revision" if errors == MAX_ERRORS else ""
    message = f"the rules cannot be checked in the control plane: {error[:MAX_ERROR_CHARS]}{last}"
    executor.add_event("rule.error", severity=severity, message=message)
    after = before.model_copy(
        update={
            "version": before.version + 1,
            "revision": seen.job.rules_revision,
            "state": None if anew else before.state,
            "errors": errors,
            "at": now,
            "next_at": None if errors >= MAX_ERRORS and not before.orders else _next_at(before, now),
        }
    )
    return _result(executor, after)


def has_nothing_to_evaluate(job: Job, rule_state: RuleStateRecord | None) -> bool:
    """Return True for a job without rules of the control plane, an ended job, and rules off after failures."""
    if not job.watched or job.state.terminal:
        return True
    return rule_state is not None and rule_state.revision == job.rules_revision and rule_state.errors >= MAX_ERRORS


def without_next_evaluation(rule_state: RuleStateRecord) -> RuleStateRecord:
    """Disable scheduled evaluation."""
    return rule_state.model_copy(update={"version": rule_state.version + 1, "next_at": None})


def describe_rules(
    rules: RuleSet, rule_state: RuleStateRecord, job_id: str, members: Mapping[str, MemberRecord] | None
) -> Iterator[RuleStatus]:
    """Describe the state of each rule. `members`: present values of the group, as for `evaluate_rules`."""
    group = GroupMembers(job_id, rule_state.member, members) if collect_group_values(rules) else None
    evaluator, _ = _restored(rules, group, rule_state, rule_state.revision)
    for one in evaluator.statuses():
        yield RuleStatus(rule=one.rule, state=str(one.state), said=one.describe()[:MAX_STATUS_CHARS], fires=one.fires)


def measure_job(seen: JobSnapshot, now: int) -> dict[str, float | None]:
    """Return the control plane's own metrics of a job; None for an unknown value."""
    job, attempt, lease = seen.job, seen.attempt, seen.lease
    running = job.state is JobState.RUNNING
    attempts = [attempt] if attempt is not None else seen.nodes
    ran = [(one, max(now - one.started_at, 0)) for one in attempts] if running else []
    wall_s = job.counters.runtime_s + sum(ran_s for _, ran_s in ran)
    if job.spec.nodes is not None:
        wall_s = now - (job.started_at or now)
    silent_s = None
    if running and lease is not None and lease.epoch == job.epoch:
        silent_s = float(max(now - (lease.expires_at - lease.duration_s), 0))
    since = job.waiting_since if job.waiting_since is not None else job.created_at
    return {
        "wall": float(wall_s),
        "cost": _cost(job, ran),
        "heartbeat.age": silent_s,
        "queue.age": float(max(now - since, 0)) if job.claimable else 0.0,
        "failures": float(job.counters.failures),
        "interruptions": float(job.counters.interruptions),
    }


def _cost(job: Job, running: Sequence[tuple[Attempt, int]]) -> float | None:
    """Return the cost of all attempts in USD; None if the price of an attempt is unknown.

    `running`: the attempts that have not ended, with their running times in seconds.
    """
    if job.counters.runtime_s > job.priced_s or any(one.price_usd_per_hour is None for one, _ in running):
        return None
    return job.cost_usd + sum(cost_usd(ran_s, one.price_usd_per_hour or 0.0) for one, ran_s in running)


def merge_leases(job: Job, leases: Sequence[Lease]) -> Lease | None:
    """Return the lease of an elastic job for its rules: the newest heartbeat and the newest progress of its seats.

    The loss is the loss of the world, if the node with the newest progress reports the loss of the world.
    """
    if not leases:
        return None
    newest = max(leases, key=lambda one: one.expires_at - one.duration_s)
    progress = max((one.progress for one in leases if one.progress), key=lambda one: one.step, default=None)
    if progress is not None:
        metrics, nonfinite = dict(progress.metrics), dict(progress.nonfinite)
        if "world.loss" in metrics:
            metrics["loss"] = metrics["world.loss"]
            nonfinite.pop("loss", None)
        elif "world.loss" in nonfinite:
            nonfinite["loss"] = nonfinite["world.loss"]
        progress = progress.model_copy(update={"metrics": metrics, "nonfinite": nonfinite})
    return newest.model_copy(update={"job_id": job.id, "epoch": job.epoch, "progress": progress})


def _progress(seen: JobSnapshot) -> Progress | None:
    held = seen.lease is not None and seen.lease.epoch == seen.job.epoch and seen.job.state is JobState.RUNNING
    return seen.lease.progress if held and seen.lease is not None else None


def _unseen(seen: JobSnapshot) -> Progress | None:
    """Return the newest report, unless an evaluation has used a later report."""
    progress, before = _progress(seen), seen.rule_state
    if progress is None or before is None or before.epoch != seen.job.epoch:
        return progress
    return progress if (progress.reported_at or 0) >= before.seen_at else None


def _step(seen: JobSnapshot) -> int:
    progress = _progress(seen) or seen.job.progress
    return progress.step if progress is not None else 0


def _observed(
    evaluator: Evaluator, progress: Progress | None, before: RuleStateRecord | None
) -> dict[str, float | None]:
    """Return the new metrics of the training. Values that a heartbeat repeats at the same step are not new."""
    if progress is None:
        return {}
    found = reported_values(progress)
    if before is None or before.state is None or progress.step != before.step:
        return found
    known = evaluator.values()
    # In stored form NaN equals NaN.
    return {name: value for name, value in found.items() if encode(known.get(name)) != encode(value)}


def _of_another_machine(rules: RuleSet, seen: JobSnapshot) -> dict[str, float | None]:
    """Return the signals of an earlier attempt as unknown, until the present attempt reports them."""
    if seen.rule_state is None or seen.rule_state.epoch == seen.job.epoch:
        return {}
    return dict.fromkeys(signal.metric.name for signal in rules.signals)


def _restored(
    rules: RuleSet, group: GroupValues | None, before: RuleStateRecord | None, revision: int
) -> tuple[Evaluator, str]:
    """Return the evaluator in its stored state, and the text of an event about the restoration, or ""."""
    evaluator = Evaluator(rules, group)
    same = before is not None and before.revision == revision
    message = "" if same else f"revision {revision} is in force in the control plane"
    if before is None or before.state is None:
        return evaluator, message
    try:
        restored = evaluator.load_state_dict(unpack_state(before.state))
    except (StateError, ValueError, zlib.error) as error:
        message = message or f"revision {revision} goes on in the control plane"
        return Evaluator(rules, group), f"{message}; all counters begin anew: {error}"
    anew = [f"{one.rule} ({one.reason})" for one in restored if not one.kept]
    return evaluator, f"{message}; counters begin anew: {', '.join(anew)}" if message and anew else message


def pack_state(state: Mapping[str, Any]) -> str:
    """Encode an evaluator's state as compressed text."""
    return base64.b64encode(zlib.compress(json.dumps(state, separators=(",", ":")).encode())).decode()


def unpack_state(text: str) -> Any:
    """Decode a state of `pack_state`. Raises ValueError or zlib.error for another text."""
    return json.loads(zlib.decompress(base64.b64decode(text, validate=True)))


def _next_at(before: RuleStateRecord | None, now: int) -> int:
    """Return the instant of the next evaluation; a future instant stays, because each move is two index writes."""
    if before is not None and before.next_at is not None and before.next_at > now:
        return before.next_at
    return now + EVALUATION_INTERVAL_S


def _result(executor: RuleActionExecutor, after: RuleStateRecord) -> EvaluationResult:
    change = executor.change()
    if change is None:
        return EvaluationResult(rule_state=after)
    if change.job.state.terminal and not after.orders:
        after = after.model_copy(update={"next_at": None})
    return EvaluationResult(rule_state=after, change=change.put(after))
