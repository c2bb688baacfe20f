"""Rules that the control plane evaluates: what is observed of a job, what they decide, and what is done about it.

It brings the rule language with it, so it is imported where a job has such rules, and nowhere else. What a look has
decided and how the rules stand after it are written together or not at all: nothing fires twice, nothing is lost.
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
from baton.contract.jobs import JobState, Progress
from baton.contract.rules.document.loader import load
from baton.contract.rules.document.rule import RuleSet
from baton.contract.rules.document.rule_placement import collect_group_values, split
from baton.contract.rules.engine.evaluator import Evaluator, StateError
from baton.contract.rules.engine.group_statistics import GroupValues
from baton.contract.rules.language.faults import Code
from baton.contract.rules.language.typed_ast import Aggregate, walk
from baton.contract.rules.limits import LIMITS
from baton.contract.rules.numbers import encode
from baton.contract.steering import MAX_STATUS_CHARS, RuleStatus
from functions.domain.jobs.attempt_end import cost_usd
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import Attempt, CommandRecord, Job, Lease, MemberRecord, RuleStateRecord
from functions.domain.rules.group_metrics import GroupMembers, reported_values, update_member
from functions.domain.rules.rule_actions import RuleActionExecutor
from functions.domain.rules.scaling import GroupJobs

MAX_RULES = 20
"""Of a document: what they decide in one look is written in one transaction."""
MAX_POINTS = 2_000
"""Of all their windows together: how they stand is one item, written with every heartbeat."""
DURATION_POINTS = 500
"""What a window over a duration may hold."""
EVALUATION_INTERVAL_S = 50
"""The sweeper comes once a minute, a second earlier or later: so each of its turns finds the job."""
MAX_ERRORS = 3
"""Looks in vain, after which nobody looks until there is another revision."""
MAX_ERROR_CHARS = 300

_LIMITS = LIMITS._replace(duration_points=DURATION_POINTS)


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """A job as it was read. `attempt` and `lease`: of the attempt that holds it, if one does."""

    job: Job
    rule_state: RuleStateRecord | None = None
    attempt: Attempt | None = None
    lease: Lease | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What is to be written: `change`, which has the rule_state with it, or the rule_state alone."""

    rule_state: RuleStateRecord
    change: Transaction | None = None


def control_plane_rules(text: str) -> RuleSet:
    """Those of a document that are evaluated here. Raises ValueError for one that cannot be read here."""
    if not text.strip():
        return RuleSet()
    loaded = load(text)
    if loaded.rules is None:
        first = loaded.faults[0]
        raise ValueError(f"{first.field}: {first.reason}")
    return split(loaded.rules).control_plane._replace(limits=_LIMITS)


def find_size_faults(rules: RuleSet) -> list[Fault]:
    """Why so many rules, or such windows, cannot be evaluated here. `rules`: those that are."""
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
    kept: Callable[[], Sequence[CommandRecord]],
    members: Mapping[str, MemberRecord] | None = None,
    groups: Callable[[str], GroupJobs] | None = None,
) -> EvaluationResult:
    """Evaluate a job's rules at `now`. `event`: `heartbeat`, `timer` or `state`. `kept` reads the job's commands,
    `groups` the jobs of a group that a rule scales.

    `members`: what is known of the job's group, where rules ask for it and it is in one.
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
    acting = RuleActionExecutor(
        seen.job, seen.attempt, seen.lease, step=step, now=now, kept=kept, look=version, pending=pending, **more
    )
    evaluator, told = _restored(rules, group, before, job.rules_revision)
    if told:
        acting.tell("rule.updated", severity="info", message=told)
    observed = {**_of_another_machine(rules, seen), **_observed(evaluator, progress, before), **measure_job(seen, now)}
    values: Callable[[], Mapping[str, float | None]] = evaluator.values
    for verdict in evaluator.observe(observed, step=step, now=float(now), event=event):
        acting.take(verdict, values())
    after = RuleStateRecord(
        version=version,
        revision=job.rules_revision,
        state=pack_state(evaluator.state_dict()),
        at=now,
        next_at=now if acting.orders else _next_at(before, now),
        epoch=job.epoch,
        step=step,
        seen_at=(progress.reported_at or now) if progress else before.seen_at if before else 0,
        member=member,
        orders=acting.orders,
    )
    return _looked(acting, after)


def asks_for_group(rules: RuleSet) -> bool:
    """Whether any of them reads what the jobs of a group report."""
    return bool(collect_group_values(rules))


def record_failure(seen: JobSnapshot, error: str, *, now: int, severity: str = "error") -> EvaluationResult:
    """A look that came to nothing, and why. After three of one revision nobody looks until there is another."""
    before = seen.rule_state or RuleStateRecord(version=0)
    anew = before.revision != seen.job.rules_revision
    errors = (0 if anew else before.errors) + 1
    acting = RuleActionExecutor(seen.job, seen.attempt, seen.lease, step=_step(seen), now=now, kept=list)
    last = "; they are switched off until there is another revision" if errors == MAX_ERRORS else ""
    message = f"the rules cannot be checked in the control plane: {error[:MAX_ERROR_CHARS]}{last}"
    acting.tell("rule.error", severity=severity, message=message)
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
    return _looked(acting, after)


def has_nothing_to_evaluate(job: Job, rule_state: RuleStateRecord | None) -> bool:
    """Whether there is nothing to look at: no such rules, an ended job, or rules that could not be checked."""
    if not job.watched or job.state.terminal:
        return True
    return rule_state is not None and rule_state.revision == job.rules_revision and rule_state.errors >= MAX_ERRORS


def without_next_evaluation(rule_state: RuleStateRecord) -> RuleStateRecord:
    """The same, and nobody looks at it by himself any more."""
    return rule_state.model_copy(update={"version": rule_state.version + 1, "next_at": None})


def describe_rules(
    rules: RuleSet, rule_state: RuleStateRecord, job_id: str, members: Mapping[str, MemberRecord] | None
) -> Iterator[RuleStatus]:
    """How each rule stands, in words; `members` as for `look`: what is said of a group is as of now."""
    group = GroupMembers(job_id, rule_state.member, members) if collect_group_values(rules) else None
    evaluator, _ = _restored(rules, group, rule_state, rule_state.revision)
    for one in evaluator.statuses():
        yield RuleStatus(rule=one.rule, state=str(one.state), said=one.describe()[:MAX_STATUS_CHARS], fires=one.fires)


def measure_job(seen: JobSnapshot, now: int) -> dict[str, float | None]:
    """What the control plane itself knows of a job; None for what is not known."""
    job, attempt, lease = seen.job, seen.attempt, seen.lease
    running = job.state is JobState.RUNNING
    ran_s = max(now - attempt.started_at, 0) if running and attempt is not None else 0
    silent_s = None
    if running and lease is not None and lease.epoch == job.epoch:
        silent_s = float(max(now - (lease.expires_at - lease.duration_s), 0))
    since = job.waiting_since if job.waiting_since is not None else job.created_at
    return {
        "wall": float(job.counters.runtime_s + ran_s),
        "cost": _cost(job, attempt if running else None, ran_s),
        "heartbeat.age": silent_s,
        "queue.age": float(max(now - since, 0)) if job.claimable else 0.0,
        "failures": float(job.counters.failures),
        "interruptions": float(job.counters.interruptions),
    }


def _cost(job: Job, attempt: Attempt | None, ran_s: int) -> float | None:
    """Of all attempts; not known as soon as one of them ran at a price that nobody has said."""
    if job.counters.runtime_s > job.priced_s:
        return None
    if attempt is None:
        return job.cost_usd
    price = attempt.price_usd_per_hour
    return None if price is None else job.cost_usd + cost_usd(ran_s, price)


def _progress(seen: JobSnapshot) -> Progress | None:
    held = seen.lease is not None and seen.lease.epoch == seen.job.epoch and seen.job.state is JobState.RUNNING
    return seen.lease.progress if held and seen.lease is not None else None


def _unseen(seen: JobSnapshot) -> Progress | None:
    """The newest report, unless a look has seen a later one already."""
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
    """The training's metrics. Those that a heartbeat repeats at the same step are no new points."""
    if progress is None:
        return {}
    found = reported_values(progress)
    if before is None or before.state is None or progress.step != before.step:
        return found
    known = evaluator.values()
    # As they are saved: NaN is the same as NaN there.
    return {name: value for name, value in found.items() if encode(known.get(name)) != encode(value)}


def _of_another_machine(rules: RuleSet, seen: JobSnapshot) -> dict[str, float | None]:
    """Signals that an earlier attempt counted: nothing is known of them before this one has said something."""
    if seen.rule_state is None or seen.rule_state.epoch == seen.job.epoch:
        return {}
    return dict.fromkeys(signal.metric.name for signal in rules.signals)


def _restored(
    rules: RuleSet, group: GroupValues | None, before: RuleStateRecord | None, revision: int
) -> tuple[Evaluator, str]:
    """The evaluator where the last look left it, and what is to be told of that, if anything."""
    evaluator = Evaluator(rules, group)
    same = before is not None and before.revision == revision
    told = "" if same else f"revision {revision} is in force in the control plane"
    if before is None or before.state is None:
        return evaluator, told
    try:
        kept = evaluator.load_state_dict(unpack_state(before.state))
    except (StateError, ValueError, zlib.error) as error:
        told = told or f"revision {revision} goes on in the control plane"
        return Evaluator(rules, group), f"{told}; all counters begin anew: {error}"
    anew = [f"{one.rule} ({one.reason})" for one in kept if not one.kept]
    return evaluator, f"{told}; counters begin anew: {', '.join(anew)}" if told and anew else told


def pack_state(state: Mapping[str, Any]) -> str:
    """An evaluator's state as a short text."""
    return base64.b64encode(zlib.compress(json.dumps(state, separators=(",", ":")).encode())).decode()


def unpack_state(text: str) -> Any:
    """From that. Raises ValueError or zlib.error for what it is not."""
    return json.loads(zlib.decompress(base64.b64decode(text, validate=True)))


def _next_at(before: RuleStateRecord | None, now: int) -> int:
    """Not moved while it lies ahead: each move is two writes of an index."""
    if before is not None and before.next_at is not None and before.next_at > now:
        return before.next_at
    return now + EVALUATION_INTERVAL_S


def _looked(acting: RuleActionExecutor, after: RuleStateRecord) -> EvaluationResult:
    change = acting.change()
    if change is None:
        return EvaluationResult(rule_state=after)
    if change.job.state.terminal and not after.orders:
        after = after.model_copy(update={"next_at": None})
    return EvaluationResult(rule_state=after, change=change.put(after))
