"""Define what `baton fleet doctor` finds, and what it does about a finding."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from baton.contract.base import AnswerModel, EpochSeconds, WireModel
from baton.contract.fleets.fleet import MachineView


class FindingCode(StrEnum):
    """Stable name of a kind of finding."""

    STRAY_MACHINE = "stray_machine"
    """A machine with a token of this deployment that no record explains."""
    LINGERING_MACHINE = "lingering_machine"
    """A machine that its provider still lists ten minutes after it was to end."""
    LEFTOVER = "leftover"
    """A disk or a stopped contract of this deployment that the provider bills."""
    FOREIGN_MACHINES = "foreign_machines"
    """Machines of the same account that carry no token of this deployment; Baton never touches them."""
    ACCOUNT_REFUSED = "account_refused"
    """The provider does not accept the stored account any more."""
    ACCOUNT_PROBLEM = "account_problem"
    """A permission that the key lacks or should not have, or a limit that is reached."""
    ACCOUNT_MISSING = "account_missing"
    """A fleet names a provider of which no account is stored."""
    STATUS_UNKNOWN = "status_unknown"
    """A provider gives machines a status that Baton does not know; the machines count as running."""
    BALANCE_LOW = "balance_low"
    """The prepaid credit lasts for two hours of the present spending at most."""
    PROVIDER_SILENT = "provider_silent"
    """The provider did not answer, so nothing follows about its machines."""
    DAMAGED_RECORD = "damaged_record"
    """A record of a fleet cannot be read, so that nobody looks after the fleet's machines."""
    CONTROLLER_LATE = "controller_late"
    """No tick of the fleets' controller has succeeded for five minutes."""


class DoctorFinding(AnswerModel):
    """DoctorFinding of the doctor.

    Example: `{"id": "stray_machine/vast/123", "code": "stray_machine", "provider": "vast", "detail": "...", ...}`
    """

    id: str
    """Code, provider and the provider's id, by which a fix is ordered."""
    code: FindingCode
    provider: str = ""
    detail: str
    """Description of the finding and its remedy."""
    fix: str = ""
    """Effect of a fix; empty if the doctor can do nothing."""


class DoctorReport(AnswerModel):
    """Findings about all fleets and providers of the deployment, the urgent ones first.

    Example: `{"providers": ["vast"], "findings": [], "strays": [], "at": 1700000000}`
    """

    providers: list[str]
    """Providers that were examined."""
    findings: list[DoctorFinding]
    strays: list[MachineView] = []
    """Ended machines that no record explained and whose fleet is unknown, with receipts, the newest first."""
    at: EpochSeconds
    """Time of the examination by the fleets' clock."""


class FixRequest(WireModel):
    """Findings to fix.

    Example: `{"findings": ["stray_machine/vast/123"]}`
    """

    findings: Annotated[list[Annotated[str, Field(min_length=1, max_length=512)]], Field(min_length=1)]


class FixOutcome(AnswerModel):
    """Outcome of one fix.

    Example: `{"id": "stray_machine/vast/123", "fixed": true, "detail": "the provider ends the machine"}`
    """

    id: str
    fixed: bool
    later: bool = False
    """True if the provider's shortest interval between two calls is not over; the same call does it a moment later."""
    detail: str


class FixAnswer(AnswerModel):
    """Outcomes of the fixes, in the order of the request.

    Example: `{"outcomes": []}`
    """

    outcomes: list[FixOutcome]
