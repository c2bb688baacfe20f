"""The calls of the fleets' doctor."""

from __future__ import annotations

from baton.contract.errors import ErrorCode
from baton.contract.fleets.doctor import DoctorReport, FixAnswer, FixRequest
from functions.api.fleet.fleet_calls import view_machine
from functions.api.fleet.store import fleet_time, require_store
from functions.api.http.context import ApiCall, Context
from functions.domain.errors import Refusal
from functions.fleet.accounts import AccountsUnreadable
from functions.fleet.records import STRAYS_NAME, STRAYS_TENANT

SHOWN_STRAYS = 100


def examine_fleets(context: Context, call: ApiCall) -> DoctorReport:
    """Examine all providers, machines and the controller: strays, leftovers, refused accounts, late ticks."""
    from functions.fleet import doctor

    now = fleet_time(context, call)
    try:
        if context.accounts is not None:
            # The drivers may be those of the accounts before the damage.
            context.accounts.read()
        found = doctor.examine(require_store(context), context.drivers, now)
    except AccountsUnreadable as error:
        raise _unreadable(error) from error
    strays = require_store(context).ended(STRAYS_TENANT, STRAYS_NAME, limit=SHOWN_STRAYS)
    return DoctorReport(
        providers=list(found.providers),
        findings=list(found.findings),
        strays=[view_machine(one) for one in strays],
        at=now,
    )


def fix_findings(context: Context, call: ApiCall) -> FixAnswer:
    """Fix findings of an earlier examination that still exist; foreign machines are never touched."""
    from functions.fleet import doctor

    body: FixRequest = call.body
    try:
        outcomes = doctor.fix(require_store(context), context.drivers, body.findings, fleet_time(context, call))
    except AccountsUnreadable as error:
        raise _unreadable(error) from error
    return FixAnswer(outcomes=outcomes)


def _unreadable(error: AccountsUnreadable) -> Refusal:
    return Refusal(ErrorCode.CONFLICT, f"{error}; delete it, then store all accounts again.")
