"""The calls about logins at container registries: store, list, remove. No answer contains a password.

A login serves the fleets of its own tenant alone, because it opens the tenant's private images.
"""

from __future__ import annotations

from baton.contract.errors import ErrorCode
from baton.contract.fleets.registries import RegistryLogin, RegistryPage, RegistryView
from functions.api.fleet.account_calls import changes_refused, require_accounts, secrets_readable
from functions.api.fleet.store import fleet_time
from functions.api.http.context import ApiCall, Context, NoContent
from functions.domain.errors import Refusal
from functions.fleet.accounts import StoredLogin

MAX_LOGINS = 20
"""Logins of a tenant; all tenants share one secret."""


def put_registry(context: Context, call: ApiCall) -> RegistryView:
    """Store a login in place of an earlier one at the registry. The first machine is the first to use the login."""
    accounts, registry = require_accounts(context), call.path["registry"]
    login: RegistryLogin = call.body
    with secrets_readable():
        known = accounts.logins(call.tenant)
    if registry not in known and len(known) >= MAX_LOGINS:
        detail = f"The tenant has {MAX_LOGINS} logins at registries, the maximum; remove an unused one."
        raise Refusal(ErrorCode.CONFLICT, detail, field="registry")
    stored = StoredLogin(login=login, stored_at=fleet_time(context, call))
    with changes_refused():
        accounts.put_login(call.tenant, registry, stored)
    return _view(registry, stored)


def list_registries(context: Context, call: ApiCall) -> RegistryPage:
    """List the registries at which the tenant's machines log in."""
    with secrets_readable():
        found = require_accounts(context).logins(call.tenant)
    return RegistryPage(registries=[_view(name, found[name]) for name in sorted(found)])


def remove_registry(context: Context, call: ApiCall) -> NoContent:
    """Remove a login. Machines that have pulled their image go on; new ones pull without a login."""
    accounts, registry = require_accounts(context), call.path["registry"]
    with secrets_readable():
        known = accounts.logins(call.tenant)
    if registry not in known:
        raise Refusal(ErrorCode.REGISTRY_NOT_FOUND, f"No login at {registry} is stored.", field="registry")
    with changes_refused():
        accounts.remove_login(call.tenant, registry)
    return NoContent()


def _view(registry: str, stored: StoredLogin) -> RegistryView:
    return RegistryView(registry=registry, username=stored.login.username, stored_at=stored.stored_at)
