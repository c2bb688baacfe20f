"""npm of the environment's Node: installs what a lock file names."""

from __future__ import annotations

import subprocess
from pathlib import Path

from cdk import NODE

NPM = NODE.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
RETRIES = ("--fetch-retries=2", "--fetch-retry-mintimeout=500", "--fetch-retry-maxtimeout=2000")
"""npm waits for more than a minute in all by default, also where no repetition helps: for a certificate."""
MAX_REASON_CHARS = 500
_NOISE = ("code ", "errno ", "A complete log of this run")


class NpmError(Exception):
    """npm could not install; the message is one line with npm's reason."""


def install_locked(directory: Path) -> None:
    """Install what `package-lock.json` in `directory` names into its `node_modules`. Raises NpmError."""
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
    """Return npm's reason in one line, and the remedy if it is a certificate."""
    lines = [line.removeprefix("npm error").strip() for line in stderr.splitlines()]
    reason = "; ".join(line for line in lines if line and not line.startswith(_NOISE))[:MAX_REASON_CHARS]
    if "certificate" not in reason:
        return reason or "npm gave no reason"
    return (
        f"{reason}. Node takes the certificate authorities of the system,"
        " or those that SSL_CERT_FILE or SSL_CERT_DIR names: add yours to one of them."
    )
