"""Read documents that users write, and format their faults."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, NoReturn

from baton.contract.errors import Fault
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count


def read_text(file: Path, kind: str, max_bytes: int, stream: BinaryIO | None = None) -> str:
    """Read the text of a file or stream. `kind` names the expected content ("a recipe"). Raises CliError."""
    try:
        with nullcontext(stream) if stream is not None else file.open("rb") as opened:
            data = opened.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise CliError(f"{file} is too large for {kind}: at most {max_bytes} bytes")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is not UTF-8 text") from error


def format_fault(file: Path, fault: Fault) -> str:
    """Return `rules.yaml:3:11: rules.0.when: there is no function 'mena'. Did you mean mean?`."""
    place = f":{fault.line}:{fault.column}" if fault.line is not None else ""
    field = f"{fault.field}: " if fault.field else ""
    return f"{file}{place}: {field}{fault.reason}. {fault.remedy}".rstrip()


def raise_faults(file: Path, faults: Sequence[Fault]) -> NoReturn:
    """Raise CliError with all faults."""
    found = [format_fault(file, fault) for fault in faults]
    raise CliError(f"{file} has {count(len(found), 'fault')}", problems=found)


def require_no_faults(file: Path, faults: Sequence[Fault]) -> None:
    """Raise CliError with the faults, if any."""
    if faults:
        raise_faults(file, faults)
