"""Read the account at a provider: from a document, from a key on standard input, from answers at a terminal.

An account is never an argument, because every user of the machine sees the arguments of a program.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_origin

import typer
from pydantic import BaseModel, SecretStr, ValidationError

from baton.contract.base import WireModel
from baton.contract.document_models import validate_document
from baton.contract.fleets.providers import (
    ACCOUNTS,
    Account,
    Ec2Account,
    RunpodAccount,
    SaladAccount,
    SshAccount,
    VastAccount,
)
from baton.contract.names import ProviderName
from baton.contract.yaml_documents import MAX_DOCUMENT_BYTES, read_document
from gpu_client.cli.core.documents import raise_faults, read_text
from gpu_client.cli.core.errors import CliError

_NAMES = "Use up to 128 visible ASCII characters."
STDIN = Path("standard input")


class AccountDocument(WireModel):
    """Document with accounts by provider. Example: `{"vast": {"api_key": "..."}}`"""

    vast: VastAccount | None = None
    salad: SaladAccount | None = None
    runpod: RunpodAccount | None = None
    ec2: Ec2Account | None = None
    ssh: SshAccount | None = None


def find_provider(name: str) -> ProviderName:
    """Return the provider of a name. Raises CliError."""
    found = next((provider for provider in ACCOUNTS if provider == name), None)
    if found is None:
        remedy = f"Providers with an account: {', '.join(ACCOUNTS)}."
        raise CliError(f"{name[:40]!r} is not a provider with an account", remedy)
    return found


def read_account(provider: ProviderName, file: Path | None) -> Account:
    """Read an account from a file, standard input or a terminal. Raises CliError."""
    if file is not None:
        return _parse(provider, file, read_text(file, "a document with accounts", MAX_DOCUMENT_BYTES))
    if sys.stdin is None:
        raise CliError("there is no standard input", "Give a document with --file.")
    if sys.stdin.isatty():
        return _ask(provider)
    text = read_text(STDIN, "an account", MAX_DOCUMENT_BYTES, sys.stdin.buffer)
    key = text.strip()
    if not key:
        raise CliError(f"no account at {provider} was given", f"Redirect a file: baton fleet login {provider} < FILE")
    required = [name for name, field in ACCOUNTS[provider].model_fields.items() if field.is_required()]
    if len(required) == 1 and not any(character.isspace() for character in key):
        return _validate(provider, {required[0]: key})
    return _parse(provider, STDIN, text)


def _parse(provider: ProviderName, file: Path, text: str) -> Account:
    document = read_document(text)
    if not document.faults and not (isinstance(document.value, dict) and document.value.get(provider)):
        required = [name for name, field in ACCOUNTS[provider].model_fields.items() if field.is_required()]
        fields = ", ".join(f"{name}: ..." for name in required)
        document.fault((), f"the document has no account at {provider}", f"Write '{provider}: {{{fields}}}'.")
    found = None if document.faults else validate_document(document, AccountDocument, kind="accounts", names=_NAMES)
    account: Account | None = getattr(found, provider, None)
    if account is None:
        raise_faults(file, sorted(document.faults, key=lambda fault: (fault.line or 0, fault.column or 0)))
    return account


def _ask(provider: ProviderName) -> Account:
    """Ask for the required fields of an account; a secret is not shown."""
    values: dict[str, Any] = {}
    for name, field in ACCOUNTS[provider].model_fields.items():
        if not field.is_required():
            continue
        if provider == "ssh":
            raise CliError("an account of ssh has a private key and hosts", "Write them into a document: --file FILE")
        several = get_origin(field.annotation) is list
        label = f"{provider} {name.replace('_', ' ')}{' (separated by commas)' if several else ''}"
        answer = str(typer.prompt(label, hide_input=field.annotation is SecretStr, err=True)).strip()
        values[name] = [part.strip() for part in answer.split(",")] if several else answer
    return _validate(provider, values)


def _validate(provider: ProviderName, values: dict[str, Any]) -> Account:
    model: type[BaseModel] = ACCOUNTS[provider]
    try:
        account: Any = model.model_validate(values)
    except ValidationError as error:
        # The error has no cause, because pydantic's text quotes the values.
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CliError(f"{provider}: {place}: {first['msg']}", "Correct the value, then repeat the command.") from None
    found: Account = account
    return found
