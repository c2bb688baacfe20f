"""Documents that people write: read from a file, and their faults told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from baton.contract.errors import Fault
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count


def read_text(file: Path, what: str, max_bytes: int) -> str:
    """The text of a file that is to be `what` ("a recipe"). Raises CliError."""
    try:
        with file.open("rb") as opened:
            data = opened.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise CliError(f"{file} is larger than {what} can be ({max_bytes} bytes)")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is not UTF-8 text") from error


def told(file: Path, fault: Fault) -> str:
    """`rules.yaml:3:11: rules.0.when: there is no function 'mena'. Did you mean mean?`"""
    place = f":{fault.line}:{fault.column}" if fault.line is not None else ""
    field = f"{fault.field}: " if fault.field else ""
    return f"{file}{place}: {field}{fault.reason}. {fault.remedy}".rstrip()


def raise_faults(file: Path, faults: Sequence[Fault]) -> NoReturn:
    """Raises CliError with all that is wrong."""
    found = [told(file, fault) for fault in faults]
    raise CliError(f"{file} has {count(len(found), 'fault')}", problems=found)


def require_sound(file: Path, faults: Sequence[Fault]) -> None:
    """Raises CliError if anything is wrong."""
    if faults:
        raise_faults(file, faults)
