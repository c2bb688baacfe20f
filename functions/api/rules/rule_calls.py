"""The submitter's calls that steer a training: rules and commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import sha256
from typing import TypeVar

from baton.contract.base import Cursor, PageLimit, WireModel
from baton.contract.errors import ErrorCode, Fault
from baton.contract.rule_calls import (
    Acknowledged,
    ControlPlaneRules,
    DocumentFault,
    RulesChecked,
    RulesHistory,
    RulesRequest,
    RulesRevision,
    RulesView,
)
from baton.contract.steering import Command, CommandList, CommandRequest, RulesText
from functions.api.http.context import Call, Context, job_of
from functions.api.http.paging import fitting
from functions.api.rules.rule_evaluation_runs import look, members_of, standing_of
from functions.api.worker.lease_guard import WRITE_TRIES
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import CommandRecord, ControlRecord, Job, RulesRecord, RuleStateRecord
from functions.domain.rules import steering as rules

T = TypeVar("T")

MAX_BATCH_RULES_BYTES = 256 * 1024
"""Of the different rule documents of one batch: each takes time to check, up to some seconds together."""


class RulesHistoryQuery(WireModel):
    """Query of `GET /job/{id}/rules/history`. Example: `?limit=20`"""

    limit: PageLimit = 20
    cursor: Cursor | None = None


class RulesCheck(WireModel):
    """Body of `POST /rules/check`. Example: `{"text": "rules: [{name: nan, when: not isfinite(loss), do: save}]"}`"""

    text: RulesText


def put_rules(context: Context, call: Call) -> RulesView:
    """Give a job its next revision of rules; a running training goes by it from its next heartbeats on."""
    body: RulesRequest = call.body
    job_of(context, call, call.path["id"])
    text = sound_rules(body.text, "text")
    watched = is_watched(text)

    def decide(job: Job) -> tuple[Transaction | None, RulesRecord | None]:
        newest = _newest(context, job)
        change = rules.put_rules(
            job,
            newest,
            text=text,
            if_revision=body.if_revision,
            key_id=call.principal.key_id,
            now=call.now,
            watched=watched,
            rule_state=context.jobs.read(RuleStateRecord, job.id) if watched or job.watched else None,
        )
        return change, newest if change is None else change.records(RulesRecord)[0]

    newest = _written(context, call, decide)
    if watched:
        look(context.jobs, context.leases, call.path["id"], "state", call.now)
    return _view(context, job_of(context, call, call.path["id"]), newest, call.now)


def show_rules(context: Context, call: Call) -> RulesView:
    """A job's newest rules, and what its worker said last of them."""
    job = job_of(context, call, call.path["id"])
    return _view(context, job, _newest(context, job), call.now)


def list_rules(context: Context, call: Call) -> RulesHistory:
    """Every revision of a job's rules, newest first."""
    query: RulesHistoryQuery = call.query
    job = job_of(context, call, call.path["id"])
    revisions, cursor = fitting(
        lambda limit: context.jobs.history(RulesRecord, job.id, limit=limit, cursor=query.cursor),
        lambda items: [_revision(item) for item in items],
        query.limit,
    )
    return RulesHistory(revisions=revisions, next_cursor=cursor)


def check_rules(_context: Context, call: Call) -> RulesChecked:
    """Say what is wrong with a rule document, or doubtful, without giving it to any job."""
    body: RulesCheck = call.body
    faults, warnings = _checked(body.text)
    return RulesChecked(faults=_shown(faults), warnings=_shown(warnings))


def give_command(context: Context, call: Call) -> Command:
    """Give a command to a training; with an Idempotency-Key a repeat answers with the same command."""
    body: CommandRequest = call.body
    key = call.headers.get("idempotency-key")
    key_sha256 = sha256(key.encode()).hexdigest() if key else None

    def decide(job: Job) -> tuple[Transaction | None, tuple[Job, CommandRecord]]:
        kept = context.jobs.commands(job.id)
        before = next((one for one in kept if key_sha256 is not None and one.key_sha256 == key_sha256), None)
        if before is not None:
            if _asked(before) != (body.kind, body.arguments, body.expires_in_s):
                raise Refusal(ErrorCode.IDEMPOTENCY_MISMATCH, field="idempotency-key")
            return None, (job, before)
        change = rules.add_command(job, kept, body, key_sha256=key_sha256, now=call.now)
        return change, (change.job, change.records(CommandRecord)[0])

    job, command = _written(context, call, decide)
    return rules.command_view(job, command, call.now)


def list_commands(context: Context, call: Call) -> CommandList:
    """The commands that a job was given, and what became of them, newest first."""
    job = job_of(context, call, call.path["id"])
    kept = context.jobs.commands(job.id) if job.commands_seq else []
    return CommandList(commands=[rules.command_view(job, one, call.now) for one in reversed(kept)])


def sound_rules(text: str, field: str) -> str:
    """The text, or nothing where it is blank. Refuses it with all that is wrong."""
    if not text.strip():
        return ""
    faults, _ = _checked(text)
    if faults:
        first = faults[0]
        place = f"line {first.line}, column {first.column}: {first.field}".rstrip(": ")
        more = f" And {len(faults) - 1} more: see 'problems'." if len(faults) > 1 else ""
        detail = f"{place}: {first.reason}. {first.remedy}{more}"
        raise Refusal(ErrorCode.INVALID_RULES, detail, field=field, problems=faults)
    return text


def require_quick(texts: Iterable[str | None]) -> None:
    """Refuse more rules in one call than can be checked in its time."""
    size_bytes = sum(len(text.encode()) for text in {text for text in texts if text})
    if size_bytes > MAX_BATCH_RULES_BYTES:
        raise Refusal(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"The rules of these jobs have {size_bytes} bytes, equal ones counted once; at most "
            f"{MAX_BATCH_RULES_BYTES} are allowed in one batch.",
            field="jobs",
        )


@lru_cache(maxsize=64)
def _checked(text: str, silence_s: int | None = None) -> tuple[tuple[Fault, ...], tuple[Fault, ...]]:
    """Faults and warnings. `silence_s`: how old heartbeats can become, where that is known."""
    if not text.strip():
        return (), ()
    # Here: a function that starts cold and checks no rules does without the language.
    from baton.contract.rules.document.loader import load

    loaded = load(text, max_silence_s=silence_s)
    if loaded.rules is None:
        return tuple(loaded.faults), tuple(loaded.warnings)
    from functions.domain.rules.rule_evaluation import control_plane_rules, find_size_faults

    return tuple(find_size_faults(control_plane_rules(text))), tuple(loaded.warnings)


@lru_cache(maxsize=64)
def is_watched(text: str) -> bool:
    """Whether the control plane evaluates some of these rules, which are sound."""
    if not text.strip():
        return False
    from functions.domain.rules.rule_evaluation import control_plane_rules

    return bool(control_plane_rules(text).rules)


def _written(context: Context, call: Call, decide: Callable[[Job], tuple[Transaction | None, T]]) -> T:
    """What is decided on the job, once its change is written; anew whenever somebody else wrote in between."""
    for _ in range(WRITE_TRIES):
        change, decided = decide(job_of(context, call, call.path["id"]))
        if change is None:
            return decided
        try:
            context.jobs.apply(change)
        except (WriteConflict, FenceBroken):
            # The attempt ended between the two reads: what it was told is for the next one.
            continue
        return decided
    raise Refusal(ErrorCode.CONFLICT, "The job is being changed by others all the time.")


def _asked(command: CommandRecord) -> tuple[object, ...]:
    return command.kind, command.arguments, command.expires_at - command.issued_at


def _newest(context: Context, job: Job) -> RulesRecord | None:
    return context.jobs.read(RulesRecord, job.id, job.rules_revision) if job.rules_revision else None


def _view(context: Context, job: Job, newest: RulesRecord | None, now: int) -> RulesView:
    if newest is None:
        return RulesView()
    said = context.jobs.read(ControlRecord, job.id)
    silence_s = job.spec.policy.max_silence_s if "heartbeat.age" in newest.text else None
    return RulesView(
        newest=_revision(newest),
        warnings=_shown(_checked(newest.text, silence_s)[1]),
        acknowledged=Acknowledged.model_validate(said.model_dump()) if said is not None else None,
        control_plane=_control_planes(context, job, now),
    )


def _control_planes(context: Context, job: Job, now: int) -> ControlPlaneRules | None:
    found = standing_of(context.jobs, job)
    if found is None:
        return None
    from functions.domain.rules.rule_evaluation import describe_rules

    rule_state, rules_here = found
    return ControlPlaneRules(
        revision=rule_state.revision,
        at=rule_state.at,
        next_check_at=rule_state.next_at,
        statuses=list(describe_rules(rules_here, rule_state, job.id, members_of(context.jobs, job, rules_here, now))),
    )


def _revision(record: RulesRecord) -> RulesRevision:
    return RulesRevision.model_validate(record, from_attributes=True)


def _shown(faults: Iterable[Fault]) -> list[DocumentFault]:
    return [DocumentFault(**fault._asdict()) for fault in faults]
