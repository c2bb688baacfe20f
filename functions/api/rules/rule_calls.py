"""The submitter's calls for rules and commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import sha256
from typing import TypeVar

from baton.contract.base import Cursor, PageLimit, WireModel
from baton.contract.errors import ErrorCode, Fault
from baton.contract.jobs.rule_calls import (
    Acknowledged,
    ControlPlaneRules,
    DocumentFault,
    RulesChecked,
    RulesHistory,
    RulesRequest,
    RulesRevision,
    RulesView,
)
from baton.contract.worker.control import Command, CommandList, CommandRequest, RulesText
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.http.paging import read_fitting_page
from functions.api.rules.rule_evaluation_runs import evaluate_job, read_members, read_rule_state
from functions.api.worker.lease_guard import WRITE_TRIES
from functions.api.worlds.seat_settlement import settle_job
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import CommandRecord, ControlRecord, Job, RulesRecord, RuleStateRecord
from functions.domain.rules import steering as rules
from functions.domain.rules.elastic_rules import require_for_nodes

T = TypeVar("T")

MAX_BATCH_RULES_BYTES = 256 * 1024
"""Limit of all distinct rule documents of a batch: the check of so many bytes takes up to some seconds."""


class RulesHistoryQuery(WireModel):
    """Query of `GET /job/{id}/rules/history`. Example: `?limit=20`"""

    limit: PageLimit = 20
    cursor: Cursor | None = None


class RulesCheck(WireModel):
    """Body of `POST /rules/check`. Example: `{"text": "rules: [{name: nan, when: not isfinite(loss), do: save}]"}`"""

    text: RulesText


def put_rules(context: Context, call: ApiCall) -> RulesView:
    """Store a job's next revision of rules; a running training applies the revision from its next heartbeats on."""
    body: RulesRequest = call.body
    require_job(context, call, call.path["id"])
    text = require_sound_rules(body.text, "text")
    watched = has_control_plane_rules(text)

    def decide(job: Job) -> tuple[Transaction | None, RulesRecord | None]:
        if job.spec.nodes is not None:
            require_for_nodes(text, "text")
        newest = _read_newest(context, job)
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

    newest = _apply(context, call, decide)
    if watched:
        evaluate_job(context.jobs, context.leases, call.path["id"], "state", call.now)
    return _view(context, require_job(context, call, call.path["id"]), newest, call.now)


def show_rules(context: Context, call: ApiCall) -> RulesView:
    """Show a job's newest rules, and the worker's last report about the rules."""
    job = require_job(context, call, call.path["id"])
    return _view(context, job, _read_newest(context, job), call.now)


def list_rules(context: Context, call: ApiCall) -> RulesHistory:
    """List every revision of a job's rules, newest first."""
    query: RulesHistoryQuery = call.query
    job = require_job(context, call, call.path["id"])
    revisions, cursor = read_fitting_page(
        lambda limit: context.jobs.history(RulesRecord, job.id, limit=limit, cursor=query.cursor),
        lambda items: [_view_revision(item) for item in items],
        query.limit,
    )
    return RulesHistory(revisions=revisions, next_cursor=cursor)


def check_rules(_context: Context, call: ApiCall) -> RulesChecked:
    """Check a rule document without a job; return its faults and warnings."""
    body: RulesCheck = call.body
    faults, warnings = _check_text(body.text)
    return RulesChecked(faults=_view_faults(faults), warnings=_view_faults(warnings))


def list_warnings(text: str, silence_s: int) -> list[DocumentFault]:
    """List the warnings about the rules of a job. `silence_s`: the highest age of a heartbeat."""
    return _view_faults(_check_text(text, silence_s)[1])


def give_command(context: Context, call: ApiCall) -> Command:
    """Give a command to a training; with an Idempotency-Key a repeat answers with the same command."""
    body: CommandRequest = call.body
    key = call.headers.get("idempotency-key")
    key_sha256 = sha256(key.encode()).hexdigest() if key else None

    def decide(job: Job) -> tuple[Transaction | None, tuple[Job, CommandRecord]]:
        commands = context.jobs.commands(job.id)
        before = next((one for one in commands if key_sha256 is not None and one.key_sha256 == key_sha256), None)
        if before is not None:
            if _request_identity(before) != (body.kind, body.arguments, body.expires_in_s):
                raise Refusal(ErrorCode.IDEMPOTENCY_MISMATCH, field="idempotency-key")
            return None, (job, before)
        change = rules.add_command(job, commands, body, key_sha256=key_sha256, now=call.now)
        return change, (change.job, change.records(CommandRecord)[0])

    job, command = _apply(context, call, decide)
    return rules.command_view(job, command, call.now)


def list_commands(context: Context, call: ApiCall) -> CommandList:
    """List a job's commands and their results, newest first."""
    job = require_job(context, call, call.path["id"])
    commands = context.jobs.commands(job.id) if job.commands_seq else []
    return CommandList(commands=[rules.command_view(job, one, call.now) for one in reversed(commands)])


def require_sound_rules(text: str, field: str) -> str:
    """Return the rule text, "" for a blank text; refuse a faulty text with all faults."""
    if not text.strip():
        return ""
    faults, _ = _check_text(text)
    if faults:
        first = faults[0]
        place = f"line {first.line}, column {first.column}: {first.field}".rstrip(": ")
        more = f" And {len(faults) - 1} more: see 'problems'." if len(faults) > 1 else ""
        detail = f"{place}: {first.reason}. {first.remedy}{more}"
        raise Refusal(ErrorCode.INVALID_RULES, detail, field=field, problems=faults)
    return text


def require_checkable(texts: Iterable[str | None]) -> None:
    """Refuse more rules in one call than the call has time to check."""
    size_bytes = sum(len(text.encode()) for text in {text for text in texts if text})
    if size_bytes > MAX_BATCH_RULES_BYTES:
        raise Refusal(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"The rules of these jobs have {size_bytes} bytes, equal texts counted once; a batch may have at most "
            f"{MAX_BATCH_RULES_BYTES} bytes of rules.",
            field="jobs",
        )


@lru_cache(maxsize=64)
def _check_text(text: str, silence_s: int | None = None) -> tuple[tuple[Fault, ...], tuple[Fault, ...]]:
    """Return faults and warnings of a rule text. `silence_s`: the highest age of a heartbeat, if known."""
    if not text.strip():
        return (), ()
    # Imported here, so that a cold start does not load the rule language.
    from baton.contract.rules.document.loader import load

    loaded = load(text, max_silence_s=silence_s)
    if loaded.rules is None:
        return tuple(loaded.faults), tuple(loaded.warnings)
    from functions.domain.rules.rule_evaluation import control_plane_rules, find_size_faults

    return tuple(find_size_faults(control_plane_rules(text))), tuple(loaded.warnings)


@lru_cache(maxsize=64)
def has_control_plane_rules(text: str) -> bool:
    """Return True if the control plane evaluates some of these sound rules."""
    if not text.strip():
        return False
    from functions.domain.rules.rule_evaluation import control_plane_rules

    return bool(control_plane_rules(text).rules)


def _apply(context: Context, call: ApiCall, decide: Callable[[Job], tuple[Transaction | None, T]]) -> T:
    """Decide and write; return the decided value. Decides again after a conflicting write."""
    for _ in range(WRITE_TRIES):
        job = require_job(context, call, call.path["id"])
        if job.spec.nodes is not None:
            # The change notifies the leases of the attempts that the job knows.
            job = settle_job(context.jobs, job.id, call.now) or job
        change, decided = decide(job)
        if change is None:
            return decided
        try:
            context.jobs.apply(change)
        except (WriteConflict, FenceBroken):
            # Another call changed the job, or the attempt ended, therefore decide again on the present job.
            continue
        return decided
    raise Refusal(ErrorCode.CONFLICT, f"Other calls changed the job during all {WRITE_TRIES} tries.")


def _request_identity(command: CommandRecord) -> tuple[object, ...]:
    return command.kind, command.arguments, command.expires_at - command.issued_at


def _read_newest(context: Context, job: Job) -> RulesRecord | None:
    return context.jobs.read(RulesRecord, job.id, job.rules_revision) if job.rules_revision else None


def _view(context: Context, job: Job, newest: RulesRecord | None, now: int) -> RulesView:
    if newest is None:
        return RulesView()
    acknowledged = context.jobs.read(ControlRecord, job.id)
    silence_s = job.spec.policy.max_silence_s if "heartbeat.age" in newest.text else None
    return RulesView(
        newest=_view_revision(newest),
        warnings=_view_faults(_check_text(newest.text, silence_s)[1]),
        acknowledged=None if acknowledged is None else Acknowledged.model_validate(acknowledged.model_dump()),
        control_plane=_view_control_plane(context, job, now),
    )


def _view_control_plane(context: Context, job: Job, now: int) -> ControlPlaneRules | None:
    found = read_rule_state(context.jobs, job)
    if found is None:
        return None
    from functions.domain.rules.rule_evaluation import describe_rules

    rule_state, rules_here = found
    return ControlPlaneRules(
        revision=rule_state.revision,
        at=rule_state.at,
        next_check_at=rule_state.next_at,
        statuses=list(describe_rules(rules_here, rule_state, job.id, read_members(context.jobs, job, rules_here, now))),
    )


def _view_revision(record: RulesRecord) -> RulesRevision:
    return RulesRevision.model_validate(record, from_attributes=True)


def _view_faults(faults: Iterable[Fault]) -> list[DocumentFault]:
    return [DocumentFault(**fault._asdict()) for fault in faults]
