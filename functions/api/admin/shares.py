"""The call that shares one job by a link."""

from __future__ import annotations

from baton.contract.admin.keys import KeyView
from baton.contract.admin.shares import ShareCreated, ShareRequest
from baton.contract.errors import ErrorCode
from baton.contract.names import KEY_PREFIX
from functions.api.http.context import ApiCall, Context, require_job
from functions.domain.access.sessions import derive_share
from functions.domain.errors import Refusal


def share_job(context: Context, call: ApiCall) -> ShareCreated:
    """Issue a key that reads one job until its expiry, as a link to the console."""
    body: ShareRequest = call.body or ShareRequest()
    job = require_job(context, call, call.path["id"])
    caller = context.tokens.get_key(call.principal.key_id)
    # A link that a session makes outlives the session, but not the key that signed in.
    opener = context.tokens.get_key(caller.parent) if caller and caller.parent else caller
    if opener is None:
        raise Refusal(ErrorCode.KEY_UNKNOWN, "The key that makes the call was deleted.", field="x-api-key")
    key_id, secret = context.random.key_id(), context.random.token()
    share = derive_share(opener, job.id, key_id=key_id, secret=secret, now=call.now, life_s=body.expires_in_s)
    context.tokens.put_key(share)
    whole = f"{KEY_PREFIX}_{share.id}_{secret}"
    view = KeyView.model_validate(share, from_attributes=True)
    return ShareCreated(url=f"{call.origin}/console#share={whole}&job={job.id}", key=whole, **view.model_dump())
