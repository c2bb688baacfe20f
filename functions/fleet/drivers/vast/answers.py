"""Judge Vast.ai's answers: what a create has made, which refusals hit the whole account, and the text of an error.

Vast.ai's errors lack `error`, `msg` or the JSON form at times, therefore marks in the text count as well as codes.
"""

from __future__ import annotations

from functions.fleet.drivers.protocol import (
    Ambiguous,
    Created,
    CreateResult,
    NotCreated,
    ProviderRefused,
    ProviderUnavailable,
    RefusalKind,
)
from functions.fleet.drivers.provider_http import ProviderAnswer

TOO_MANY_CALLS = 429
PERMISSIONS = "instance_read, instance_write, misc, billing_read and user_read"
NEW_KEY = (
    f"create a key with {PERMISSIONS} alone at cloud.vast.ai/manage-keys and store it with `baton fleet login vast`"
)
GONE = ("no_such_ask", "404/3603", "410/3907")
"""Marks of an ask that another renter has taken; the status is 404, 410 or 400."""
REFUSALS: tuple[tuple[str, RefusalKind, str], ...] = (
    ("spend_rate_limit", RefusalKind.QUOTA, "wait, or ask Vast.ai for a higher limit of spending"),
    ("credit", RefusalKind.CREDIT, "add credit at cloud.vast.ai/billing"),
    ("missing_billing", RefusalKind.CREDIT, "add credit at cloud.vast.ai/billing"),
    ("auth_error", RefusalKind.KEY, NEW_KEY),
    ("image", RefusalKind.IMAGE, "name an image in the fleet that Vast.ai's hosts can pull"),
    ("invalid_args", RefusalKind.INVALID, "Vast.ai no longer accepts this form of request: update Baton"),
)
"""Marks of refusals that hit every offer, with the remedy; the first that occurs in the answer counts."""


def outcome(answer: ProviderAnswer) -> CreateResult:
    """Return what a create's answer proves. A contract in any answer exists, also in that of a refusal."""
    body = answer.body if isinstance(answer.body, dict) else {}
    contract = body.get("new_contract")
    handle = str(contract) if isinstance(contract, int) and contract > 0 else None
    problem = problem_of(answer)
    if answer.ok and handle and body.get("success") is not False:
        return Created(handle=handle)
    if handle:
        return NotCreated(reason=f"Vast.ai made a contract that does not run: {problem}", handle=handle)
    text = answer.text.lower()
    gone = any(mark in text for mark in GONE)
    # An HTML page or an empty body comes from something between us and Vast.ai.
    clean = 400 <= answer.status < 500 and answer.status not in (408, TOO_MANY_CALLS) and (bool(body) or gone)
    if not clean:
        return Ambiguous(reason=f"PUT /api/v0/asks/: {problem}")
    if gone:
        return NotCreated(reason=f"another renter has taken the offer: {problem}")
    if answer.status == 401:
        return NotCreated(reason=f"{problem}; {NEW_KEY}", kind=RefusalKind.KEY)
    for mark, kind, remedy in REFUSALS:
        if mark in text:
            return NotCreated(reason=f"{problem}; {remedy}", kind=kind)
    if answer.status == 403:
        return NotCreated(reason=f"{problem}; {NEW_KEY}", kind=RefusalKind.PERMISSION)
    return NotCreated(reason=problem)


def accepted(answer: ProviderAnswer, call: str) -> bool:
    """Return True for an answer of success. Raises ProviderRefused, ProviderUnavailable."""
    if answer.ok and not (isinstance(answer.body, dict) and answer.body.get("success") is False):
        return True
    if answer.status == 403:
        raise ProviderRefused(RefusalKind.PERMISSION, f"{call}: {problem_of(answer)}; {NEW_KEY}")
    raise ProviderUnavailable(f"{call}: {problem_of(answer)}")


def problem_of(answer: ProviderAnswer) -> str:
    """Return status, code and text of an answer in one line."""
    body = answer.body if isinstance(answer.body, dict) else {}
    texts = [str(body[name]) for name in ("error", "msg", "message", "detail") if body.get(name)]
    detail = ": ".join(texts) or (answer.text if answer.body is None else "")
    return f"{answer.status} {' '.join(detail.split())[:200]}".strip()
