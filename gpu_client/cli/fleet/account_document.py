"""Read an account or a login: from a document, from a key on standard input, from answers at a terminal.

No secret is ever an argument, because every user of the machine sees the arguments of a program.
"""

from __future__ import annotations

import re
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
from baton.contract.fleets.registries import RegistryLogin, RegistryName
from baton.contract.names import REGISTRY_PATTERN, ProviderName
from baton.contract.yaml_documents import MAX_DOCUMENT_BYTES, Document, read_document
from gpu_client.cli.core.documents import raise_faults, read_text
from gpu_client.cli.core.errors import CliError

_NAMES = "Use up to 128 visible ASCII characters."
STDIN = Path("standard input")


class AccountDocument(WireModel):
    """Document with accounts by provider, and logins by registry.

    Example: `{"vast": {"api_key": "..."}, "registries": {"ghcr.io": {"username": "acme", "password": "..."}}}`
    """

    vast: VastAccount | None = None
    salad: SaladAccount | None = None
    runpod: RunpodAccount | None = None
    ec2: Ec2Account | None = None
    ssh: SshAccount | None = None
    registries: dict[RegistryName, RegistryLogin] = {}


def is_registry(name: str) -> bool:
    """Return True for the host of a container registry, which no provider's name resembles."""
    return re.fullmatch(REGISTRY_PATTERN, name) is not None and (bool({".", ":"} & set(name)) or name == "localhost")


def find_provider(name: str) -> ProviderName:
    """Return the provider of a name. Raises CliError."""
    found = next((provider for provider in ACCOUNTS if provider == name), None)
    if found is None:
        remedy = f"Providers with an account: {', '.join(ACCOUNTS)}. A registry is named by its host, like ghcr.io."
        raise CliError(f"{name[:40]!r} is not a provider with an account", remedy)
    return found


def read_account(provider: ProviderName, file: Path | None) -> Account:
    """Read an account from a file, standard input or a terminal. Raises CliError."""
    text = _read_text(file)
    if text is None:
        return _ask(provider)
    if file is not None:
        return _parse(provider, file, text)
    key = text.strip()
    if not key:
        raise CliError(f"no account at {provider} was given", f"Redirect a file: baton fleet login {provider} < FILE")
    required = [name for name, field in ACCOUNTS[provider].model_fields.items() if field.is_required()]
    if len(required) == 1 and not any(character.isspace() for character in key):
        return _validate(provider, {required[0]: key})
    return _parse(provider, STDIN, text)


def read_login(registry: str, file: Path | None) -> RegistryLogin:
    """Read a login at a registry from a file, standard input or a terminal. Raises CliError."""
    text = _read_text(file)
    if text is None:
        username = str(typer.prompt(f"{registry} username", err=True)).strip()
        password = str(typer.prompt(f"{registry} password or token", hide_input=True, err=True)).strip()
        login: RegistryLogin = _check(RegistryLogin, registry, {"username": username, "password": password})
        return login
    document = read_document(text)
    found = document.value.get("registries") if isinstance(document.value, dict) else None
    if not document.faults and not (isinstance(found, dict) and found.get(registry)):
        detail = f"the document has no login at {registry}"
        document.fault((), detail, f"Write 'registries: {{{registry}: {{username: ..., password: ...}}}}'.")
    return _validate_document(document, file or STDIN).registries[registry]


def _read_text(file: Path | None) -> str | None:
    """Return the text of a file or of standard input; None for a terminal, which is asked. Raises CliError."""
    if file is not None:
        return read_text(file, "a document with accounts", MAX_DOCUMENT_BYTES)
    if sys.stdin is None:
        raise CliError("there is no standard input", "Give a document with --file.")
    if sys.stdin.isatty():
        return None
    return read_text(STDIN, "an account", MAX_DOCUMENT_BYTES, sys.stdin.buffer)


def _parse(provider: ProviderName, file: Path, text: str) -> Account:
    document = read_document(text)
    if not document.faults and not (isinstance(document.value, dict) and document.value.get(provider)):
        required = [name for name, field in ACCOUNTS[provider].model_fields.items() if field.is_required()]
        fields = ", ".join(f"{name}: ..." for name in required)
        document.fault((), f"the document has no account at {provider}", f"Write '{provider}: {{{fields}}}'.")
    account: Account = getattr(_validate_document(document, file), provider)
    return account


def _validate_document(document: Document, file: Path) -> AccountDocument:
    found = None if document.faults else validate_document(document, AccountDocument, kind="accounts", names=_NAMES)
    if found is None:
        raise_faults(file, sorted(document.faults, key=lambda fault: (fault.line or 0, fault.column or 0)))
    return found


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
    account: Account = _check(ACCOUNTS[provider], provider, values)
    return account


def _check(model: type[BaseModel], name: str, values: dict[str, Any]) -> Any:
    """Return the values as a model. Raises CliError, which names `name` and no value."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # The error has no cause, because pydantic's text quotes the values.
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CliError(f"{name}: {place}: {first['msg']}", "Correct the value, then repeat the command.") from None
