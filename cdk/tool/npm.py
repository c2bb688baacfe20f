"""npm on the Node of the environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

from cdk import NODE

NPM = NODE.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
RETRIES = ("--fetch-retries=2", "--fetch-retry-mintimeout=500", "--fetch-retry-maxtimeout=2000")
"""Fewer retries than npm's default of more than a minute, which also retries an untrusted certificate."""
MAX_REASON_CHARS = 500
_NOISE = ("code ", "errno ", "A complete log of this run")


class NpmError(Exception):
    """npm failed; the message is npm's reason in one line."""


def install_locked(directory: Path) -> None:
    """Install the packages of `package-lock.json` in `directory` into `node_modules`. Raises NpmError."""
    done = subprocess.run(
        [str(NODE), str(NPM), "ci", "--no-audit", "--no-fund", "--loglevel=error", *RETRIES],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NpmError(reason_in(done.stderr))


def reason_in(stderr: str) -> str:
    """Return npm's reason in one line, with the remedy for an untrusted certificate."""
    lines = [line.removeprefix("npm error").strip() for line in stderr.splitlines()]
    reason = "; ".join(line for line in lines if line and not line.startswith(_NOISE))[:MAX_REASON_CHARS]
    if "certificate" not in reason:
        return reason or "npm gave no reason"
    return (
        f"{reason}. Node trusts the certificate authorities of the system,"
        " or those in SSL_CERT_FILE or SSL_CERT_DIR: add yours to one of them."
    )
