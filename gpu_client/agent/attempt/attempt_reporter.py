"""Report the end of the attempt to the control plane: complete, fail or release, repeated until accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TypeVar

from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.job import FailureClass
from baton.contract.worker.calls import (
    CompleteRequest,
    DeclaredArtifact,
    FailRequest,
    ReleaseRequest,
    SaladIdentity,
    WorkItem,
)
from baton.contract.worker.control import EndedBy
from gpu_client.agent.attempt.outage_tolerance import LeasedCalls
from gpu_client.agent.control.channel_messages import TrainingProgress
from gpu_client.agent.control.control_relay import ControlRelay, RuleExit, encode_rule_exit
from gpu_client.agent.process.failures import AttemptFailure, ExitStatus

_Request = TypeVar("_Request", CompleteRequest, FailRequest, ReleaseRequest)

MAX_MESSAGE_CHARS = 1024
MAX_RELEASE_MESSAGE_CHARS = 512
MAX_LOG_LINES = 50
MAX_LOG_LINE_CHARS = 2000


class AttemptOutcome(StrEnum):
    """End of an attempt, as the agent sees it."""

    COMPLETE = "complete"
    FAILED = "failed"
    RELEASED = "released"
    CANCELED = "canceled"
    LOST = "lost"


class AttemptReporter:
    """Sender of the attempt's report. `flush` runs before each try, because a job takes no log lines after its end.

    All methods raise the errors of `LeasedCalls.call_with_retry`.
    """

    def __init__(
        self,
        item: WorkItem,
        identity: SaladIdentity,
        calls: LeasedCalls,
        flush: Callable[[], object],
        control: ControlRelay,
    ) -> None:
        self._item = item
        self._identity = identity.model_dump()
        self._calls = calls
        self._flush = flush
        self._control = control

    def complete(
        self, artifacts: Sequence[DeclaredArtifact], progress: TrainingProgress | None, goodput: Goodput | None = None
    ) -> None:
        """Report the job as complete.

        Raises NotStoredYet or DigestMismatch if an artifact differs from its declaration.
        """
        request = CompleteRequest(
            **self._identity,
            job_id=self._item.id,
            artifacts=list(artifacts),
            step=progress.step if progress else None,
            metrics=progress.metrics or None if progress else None,
            goodput=goodput,
            **self._get_ended_by(),
        )
        token = self._item.lease_token
        self._calls.call_with_retry(
            "complete", lambda client: (self._flush(), client.complete(token, self._add_control_report(request)))
        )

    def fail(
        self, failure: AttemptFailure, status: ExitStatus | None, tail: Sequence[str], goodput: Goodput | None = None
    ) -> None:
        """Report the failure, the exit status and the last lines."""
        request = FailRequest(
            **self._identity,
            job_id=self._item.id,
            failure_class=failure.failure_class,
            exit_code=status.code if status else None,
            signal=status.signal if status else None,
            message=_truncate(failure.reason, MAX_MESSAGE_CHARS),
            log_tail=[_truncate(line, MAX_LOG_LINE_CHARS) for line in tail[-MAX_LOG_LINES:]],
            goodput=goodput,
            **self._get_ended_by(failure.failure_class is FailureClass.STOPPED_BY_RULE),
        )
        token = self._item.lease_token
        self._calls.call_with_retry(
            "fail", lambda client: (self._flush(), client.fail(token, self._add_control_report(request)))
        )

    def release(self, reason: str, message: str, goodput: Goodput | None = None) -> None:
        """Release the job; `reason` is "pause" or "sigterm"."""
        request = ReleaseRequest(
            **self._identity,
            job_id=self._item.id,
            reason=reason,
            message=_truncate(message, MAX_RELEASE_MESSAGE_CHARS),
            goodput=goodput,
        )
        self._hand_back(request)

    def leave_by_rule(self, by_rule: RuleExit, goodput: Goodput | None = None) -> None:
        """Release the job for a rule. Raises RollbackRefused if the control plane does not permit the rollback."""
        request = ReleaseRequest(
            **self._identity,
            job_id=self._item.id,
            reason=by_rule.kind,
            message=_truncate(by_rule.reason, MAX_RELEASE_MESSAGE_CHARS),
            goodput=goodput,
            by_rule=encode_rule_exit(by_rule),
        )
        self._hand_back(request)

    def _hand_back(self, request: ReleaseRequest) -> None:
        token = self._item.lease_token
        self._calls.call_with_retry(
            "release", lambda client: (self._flush(), client.release(token, self._add_control_report(request)))
        )

    def _get_ended_by(self, stopped: bool = False) -> dict[str, EndedBy]:
        """Return the rule that ends the job. `stopped`: a refused rollback also counts as the end."""
        rule_exit = self._control.rule_exit
        by_rule = rule_exit is not None and (stopped or rule_exit.kind == "stop")
        return {"ended_by": rule_exit.ended_by} if rule_exit is not None and by_rule else {}

    def _add_control_report(self, request: _Request) -> _Request:
        """Add the rule decisions and results that no heartbeat has carried."""
        return request.model_copy(update={"control": self._control.report()})


def _truncate(text: str, max_chars: int) -> str:
    """Return the first `max_chars` characters without lone surrogates, which a file name in an error may contain."""
    return text[:max_chars].encode("utf-8", "replace").decode()
