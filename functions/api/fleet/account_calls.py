"""The calls about accounts at providers: check and store, list, remove. No answer contains a secret."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pydantic import ValidationError

from baton.contract.errors import ErrorCode
from baton.contract.fleets.providers import Account, ProviderPage, ProviderView
from baton.contract.names import ProviderName
from functions.api.fleet.store import fleet_time, require_store
from functions.api.http.context import ApiCall, Context, NoContent
from functions.domain.errors import Refusal
from functions.fleet.accounts import AccountsUnreadable, CachedAccounts, SecretsFull, StoredAccount, StoredAccounts
from functions.fleet.drivers.configured import build_driver
from functions.fleet.drivers.protocol import Driver, ProviderRefused, ProviderUnavailable
from functions.fleet.store import DamagedRecord

MOST_NAMED = 8
"""Machines that a refusal names."""


def put_vast(context: Context, call: ApiCall) -> ProviderView:
    """Check an account at Vast.ai, then store the account in place of an earlier one."""
    return _put(context, call, "vast")


def put_salad(context: Context, call: ApiCall) -> ProviderView:
    """Check an account at SaladCloud, then store the account in place of an earlier one."""
    return _put(context, call, "salad")


def put_runpod(context: Context, call: ApiCall) -> ProviderView:
    """Check an account at RunPod, then store the account in place of an earlier one."""
    return _put(context, call, "runpod")


def put_ec2(context: Context, call: ApiCall) -> ProviderView:
    """Check an access key for Amazon EC2, then store the key in place of an earlier one."""
    return _put(context, call, "ec2")


def put_ssh(context: Context, call: ApiCall) -> ProviderView:
    """Check hosts that accept an SSH key, then store hosts and key in place of earlier ones."""
    return _put(context, call, "ssh")


def list_providers(context: Context, call: ApiCall) -> ProviderPage:
    """List the stored accounts as of their last check."""
    stored = _read(require_accounts(context))
    return ProviderPage(providers=[stored[name].view for name in sorted(stored)])


def remove(context: Context, call: ApiCall) -> NoContent:
    """Remove an account; refused while machines of this deployment run there, or may begin to: they could not be ended.

    An account that its provider refuses by now is removed in any case, because no machine can be ended with it.
    """
    provider, accounts = call.path["provider"], require_accounts(context)
    stored = next((name for name in _read(accounts) if name == provider), None)
    if stored is None:
        raise Refusal(ErrorCode.PROVIDER_NOT_FOUND, f"No account at {provider[:40]} is stored.", field="provider")
    listed = _list_machines(context, context.drivers.get(stored))
    if listed is not None:
        left = listed | _recorded_machines(context, stored)
        if left:
            remedy = "Stop the fleets and wait until the machines are gone."
            raise Refusal(ErrorCode.CONFLICT, f"{_name(left)} at {stored}.", field="provider", remedy=remedy)
        _require_no_renting(context, stored)
    accounts.remove(stored)
    return NoContent()


def _put(context: Context, call: ApiCall, provider: ProviderName) -> ProviderView:
    accounts, now = require_accounts(context), fleet_time(context, call)
    account: Account = call.body
    driver = build_driver(provider, account, now=lambda: float(now))
    with refusals_translated(provider):
        report = driver.examine(_prefix(context))
    before = _read(accounts).get(provider)
    if before is not None and before.account != account:
        # Hosts of one's own are no account: another list of them hides only machines that the present list names.
        other = provider != "ssh" and report.account != before.view.account
        _require_same_machines(context, provider, driver, other=other)
    view = ProviderView(
        provider=provider,
        account=report.account,
        balance_usd=report.balance_usd,
        problems=list(report.problems),
        checked_at=now,
    )
    with changes_refused():
        accounts.put(provider, StoredAccount(account=account, view=view))
    return view


def _require_same_machines(context: Context, provider: ProviderName, driver: Driver, *, other: bool) -> None:
    """Refuse an account that does not list the machines of the present one.

    The controller would take the absence of the machines for their end, while the present account is billed for them.
    other: the provider names another account, not another key of the same one. Then also a machine that the present
    account does not list yet would be lost, and one that a controller rents before it has noticed the change.
    """
    present = _list_machines(context, context.drivers.get(provider))
    recorded = _recorded_machines(context, provider) if other else set()
    wanted = (present or set()) | recorded
    found = (_list_machines(context, driver) or set()) if wanted else set()
    if present and present <= found:
        return  # Both list the same machines, therefore both are the same account.
    hidden = wanted - found
    if hidden:
        remedy = "Stop the fleets first."
        if present is None:
            remedy = f"{remedy} If nothing of them is left: baton fleet logout {provider}, then log in again."
        detail = f"{_name(hidden)} in the present account at {provider} and not in this one."
        raise Refusal(ErrorCode.CONFLICT, detail, remedy=remedy)
    if other and present is not None:
        _require_no_renting(context, provider)


def _list_machines(context: Context, driver: Driver | None) -> set[str] | None:
    """Return the tokens of this deployment's machines; None for an account that its provider refuses by now."""
    if driver is None:
        return set()
    with refusals_translated(driver.name), suppress(ProviderRefused):
        return {one.token for one in driver.inventory(_prefix(context), 0).sightings}
    return None


def _recorded_machines(context: Context, provider: str) -> set[str]:
    """Return the ids of the machines that the provider may bill, also of those that its list does not name yet."""
    store = require_store(context)
    damaged: list[DamagedRecord] = []
    found: set[str] = set()
    for fleet in store.fleets(damaged=damaged):
        try:
            machines = store.machines(fleet.tenant, fleet.spec.name)
        except DamagedRecord as error:
            damaged.append(error)
        else:
            found |= {one.id for one in machines if one.provider == provider and one.billed}
    if damaged:
        raise Refusal(ErrorCode.CONFLICT, f"{damaged[0]}; the provider {provider} may have machines of that record.")
    return found


def _require_no_renting(context: Context, provider: str) -> None:
    """Refuse while a fleet may rent at the provider: a controller uses the accounts that it read minutes ago."""
    fleets = require_store(context).fleets()
    renting = sorted(one.spec.name for one in fleets if not one.stopped and provider in one.spec.providers)
    if renting:
        remedy = "First stop the fleet, or name other providers in its document."
        raise Refusal(
            ErrorCode.CONFLICT, f"The fleet {renting[0]} rents at {provider}.", field="provider", remedy=remedy
        )


def _name(tokens: set[str]) -> str:
    """Return `the machines a, b run`."""
    verb = "the machine {} runs" if len(tokens) == 1 else "the machines {} run"
    return verb.format(", ".join(sorted(tokens)[:MOST_NAMED]))


def _prefix(context: Context) -> str:
    return f"{require_store(context).deployment()}-"


@contextmanager
def refusals_translated(provider: str) -> Iterator[None]:
    """Raise Refusal in place of a driver's exception."""
    try:
        yield
    except ProviderRefused as error:
        reason = str(error).removeprefix(f"{error.kind}: ").removesuffix(".")
        # The refusal of a key names the command that stores another one.
        remedy = "" if "baton fleet login" in reason else None
        raise Refusal(ErrorCode(error.kind.value), f"{provider}: {reason}.", remedy=remedy) from error
    except ProviderUnavailable as error:
        detail = f"{provider} cannot be reached from the control plane: {error}."
        raise Refusal(ErrorCode.PROVIDER_UNAVAILABLE, detail) from error
    except ValidationError as error:
        raise Refusal(ErrorCode.PROVIDER_UNAVAILABLE, f"{provider}: {error}.") from error


def _read(accounts: CachedAccounts) -> StoredAccounts:
    """Return all accounts; refuse the call if the store's document is damaged."""
    with secrets_readable():
        return accounts.read()


@contextmanager
def secrets_readable() -> Iterator[None]:
    """Raise Refusal if the store's document is damaged."""
    try:
        yield
    except AccountsUnreadable as error:
        raise Refusal(ErrorCode.CONFLICT, f"{error}; delete it, then store all accounts again.") from error


@contextmanager
def changes_refused() -> Iterator[None]:
    """Raise Refusal if the store has no room for a change."""
    try:
        yield
    except SecretsFull as error:
        raise Refusal(ErrorCode.CONFLICT, f"{error}; remove an unused account or login.") from error


def require_accounts(context: Context) -> CachedAccounts:
    """Return the accounts; refuse the call in a deployment without a place for them."""
    if context.accounts is None:
        detail = "This deployment has no place for accounts; deploy the newest version of Baton."
        raise Refusal(ErrorCode.CONFLICT, detail)
    return context.accounts
