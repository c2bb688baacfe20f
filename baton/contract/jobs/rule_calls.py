"""The calls that set, check and read the rule documents of a job."""

from __future__ import annotations

from baton.contract.base import AnswerModel, Epoch, EpochSeconds, Step, WireModel
from baton.contract.worker.control import Revision, RulesInForce, RuleStatus, RulesText


class RulesRevision(RulesInForce):
    """Revision of a job's rules.

    Example: `{"revision": 2, "text": "rules: []", "created_at": 1790000000, "created_by": "k1"}`
    """

    created_at: EpochSeconds
    created_by: str | None = None
    """Id of the API key."""


class RulesRequest(WireModel):
    """Body of `PUT /job/{id}/rules`: the next revision.

    Example: `{"text": "rules: [{name: nan, when: not isfinite(loss), do: {stop: failed}}]", "if_revision": 1}`
    """

    text: RulesText
    if_revision: Revision | None = None
    """Revision that must be the newest one; otherwise the call fails with 409 `conflict`."""


class DocumentFault(AnswerModel):
    """Fault or warning in a rule document.

    Example: `{"field": "rules.0.when", "reason": "there is no function 'mena'", "remedy": "Did you mean mean?",
    "line": 3, "column": 11, "code": "unknown_function"}`
    """

    field: str
    reason: str
    remedy: str = ""
    line: int | None = None
    column: int | None = None
    code: str = ""


class RulesChecked(AnswerModel):
    """Answer of `POST /rules/check`: without faults a job can have them. Example: `{"faults": [], "warnings": []}`"""

    faults: list[DocumentFault] = []
    warnings: list[DocumentFault] = []


class Acknowledged(AnswerModel):
    """Last report of the worker about the rules in force.

    Example: `{"revision": 2, "epoch": 1, "step": 120, "at": 1790000000, "statuses": []}`
    """

    revision: Revision
    """Newest revision that the worker has received."""
    epoch: Epoch
    step: Step | None = None
    """Step from which the revision is in force; None if it is not in force yet, or was rejected."""
    at: EpochSeconds
    rejected: Revision | None = None
    reason: str = ""
    """Reason for the rejection."""
    statuses: list[RuleStatus] = []


class ControlPlaneRules(AnswerModel):
    """State of the rules that the control plane evaluates, because they read values that only the control plane has.

    Example: `{"revision": 2, "at": 1790000000, "next_check_at": 1790000050, "statuses": []}`
    """

    revision: Revision
    """Revision of `statuses`."""
    at: EpochSeconds | None = None
    """Time of the last evaluation; None before the first one."""
    next_check_at: EpochSeconds | None = None
    """Latest time of the next evaluation, exact to a minute; None if the job has ended."""
    statuses: list[RuleStatus] = []


class RulesView(AnswerModel):
    """Answer of `GET` and `PUT /job/{id}/rules`.

    Example: `{"newest": {"revision": 2, "text": "rules: []", "created_at": 1790000000}, "warnings": []}`
    """

    newest: RulesRevision | None = None
    """Newest revision; None if the job has no rules."""
    warnings: list[DocumentFault] = []
    acknowledged: Acknowledged | None = None
    """Last report of the worker; None before the first report."""
    control_plane: ControlPlaneRules | None = None
    """Rules that the control plane evaluates; None if there are none."""


class RulesHistory(AnswerModel):
    """All revisions, newest first. Example: `{"revisions": [], "next_cursor": null}`"""

    revisions: list[RulesRevision]
    next_cursor: str | None = None
