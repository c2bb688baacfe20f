"""Store addresses and keys by name, in a file that only its owner can read.

`$XDG_CONFIG_HOME/baton/profiles.json` (`~/.config` by default), mode 0600, replaced atomically. A file that other users
can read is an error. `BATON_API_URL` and `BATON_API_KEY` override the file.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpu_client.cli.core.errors import CliError

MAX_FILE_BYTES = 1024 * 1024
ProfileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class ConnectionProfile(BaseModel):
    """Address and key of an API. `price_per_hour`: price of one machine, in any currency."""

    model_config = ConfigDict(frozen=True)

    url: str
    api_key: Annotated[str, Field(repr=False)]
    price_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class ProfileFile(BaseModel):
    """All profiles, and the name of the default profile."""

    format: Literal[1] = 1
    current: str = "default"
    profiles: dict[ProfileName, ConnectionProfile] = {}


def profile_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the profile file."""
    base = environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification ignores relative paths.
    root = Path(base) if base.startswith("/") else _home(environ) / ".config"
    return root / "baton" / "profiles.json"


def state_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory for state that must survive an interruption."""
    base = environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else _home(environ) / ".local" / "state") / "baton"


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ["HOME"]) if environ.get("HOME") else Path.home()


def load_profiles(path: Path) -> ProfileFile:
    """Load the profiles, or an empty set without a file. Raises CliError for a damaged or readable-by-others file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return ProfileFile()
    except OSError as error:
        raise CliError(f"the profile file {path} cannot be read: {error.strerror}") from error
    try:
        _require_private(path, os.fstat(descriptor))
        data = os.read(descriptor, MAX_FILE_BYTES)
    finally:
        os.close(descriptor)
    try:
        return ProfileFile.model_validate_json(data)
    except ValidationError:
        # The error is not chained, because pydantic's message would quote the key.
        raise CliError(
            f"the profile file {path} is damaged", "Remove the file and store the key again with: baton login"
        ) from None


def _require_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise CliError(f"the profile file {path} is not a regular file")
    if found.st_uid not in (os.geteuid(), 0):
        raise CliError(f"the profile file {path} belongs to another user", "Remove the file, then run: baton login")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise CliError(
            f"the profile file {path} is accessible to other users of this machine (mode {mode:04o})",
            f"Restrict access with: chmod 600 {path} - and if another user may have read the key: baton keys rotate",
        )


def save_profiles(path: Path, profiles: ProfileFile) -> None:
    """Replace the file atomically, so that an interruption leaves the old or the new file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(profiles.model_dump_json(indent=1, exclude_none=True) + "\n")
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class NoProfileError(CliError):
    """Error of an unknown profile name."""


def choose_profile(environ: Mapping[str, str], name: str | None) -> ConnectionProfile:
    """Return the profile `name`, else the environment's profile, else the current profile.

    Raises NoProfileError if the profile does not exist, CliError if the environment is inconsistent.
    """
    url, key = ("", "") if name else (environ.get("BATON_API_URL", ""), environ.get("BATON_API_KEY", ""))
    if url and key:
        return ConnectionProfile(url=url, api_key=key)
    path = profile_path(environ)
    stored = load_profiles(path)
    wanted = name or environ.get("BATON_PROFILE") or stored.current
    found = stored.profiles.get(wanted)
    if found is None:
        known = ", ".join(sorted(stored.profiles))
        there = f"existing profiles: {known}" if known else "there are no profiles yet"
        if url or key:
            is_set, lacks = ("BATON_API_URL", "BATON_API_KEY") if url else ("BATON_API_KEY", "BATON_API_URL")
            raise NoProfileError(
                f"{is_set} is set without {lacks}, and there is no profile {wanted!r} in {path}",
                f"Set {lacks}, too - or create a profile with: baton login URL",
            )
        raise NoProfileError(
            f"no profile {wanted!r} in {path}; {there}",
            "Create one with: baton login URL - or set BATON_API_URL and BATON_API_KEY.",
        )
    if url and url.rstrip("/") != found.url:
        # The environment could name a foreign address, which must not receive the key of this profile.
        raise CliError(
            f"BATON_API_URL is set without BATON_API_KEY, and profile {wanted!r} is for {found.url}",
            "Set both variables or neither.",
        )
    return found.model_copy(update={"api_key": key}) if key else found
