"""Run the program `host.py` on a machine by one call of OpenSSH.

The driver sends program, request and secrets over the standard input, since every user of a computer can read the
arguments of processes. It sends them after the greeting of the machine's interpreter: without a greeting, certainly
nothing has happened.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import IO, Any

from baton.contract.fleets.providers import SshHost
from functions.fleet.drivers.protocol import ProviderRefused, RefusalKind
from functions.fleet.drivers.provider_http import AnswerLost, CallNotSent

CONNECT_S = 10
CALL_S = 15.0
"""Longest call, so that a call ends within the time that the controller leaves for it."""
MAX_ANSWER_BYTES = 1024 * 1024
_SSH_FAILED, _KILLED = 255, -signal.SIGKILL
"""Exit codes of OpenSSH without a connection and after `timeout_s`; every other one is that of the interpreter."""
MAX_BANNER_LINES = 100
"""Lines that a machine's shell may print before the greeting."""
_GREETING = b"baton-ssh-host"
_LOADER = (
    "import sys;sys.path.pop(0);b=sys.stdin.buffer;"
    f"print({_GREETING.decode()!r},flush=True);exec(compile(b.read(int(b.readline())),'<ssh_host>','exec'))"
)
_PROGRAM = resources.files("functions.fleet.drivers.ssh").joinpath("host.py").read_bytes()
_ALIAS = "baton-host"
"""Name of the only host in the file of known hosts, whatever its address."""
_OPTIONS = {
    "BatchMode": "yes",
    "ClearAllForwardings": "yes",
    "ConnectTimeout": CONNECT_S,
    "ConnectionAttempts": 1,
    "ControlPath": "none",
    "GlobalKnownHostsFile": "/dev/null",
    "HostKeyAlias": _ALIAS,
    "IdentitiesOnly": "yes",
    "IdentityAgent": "none",
    "LogLevel": "ERROR",
    "PreferredAuthentications": "publickey",
    "RequestTTY": "no",
    "ServerAliveCountMax": 2,
    "ServerAliveInterval": 5,
    "StrictHostKeyChecking": "yes",
    "UpdateHostKeys": "no",
}
NO_CLIENT = (
    "this control plane has no OpenSSH client (AWS Lambda has none): run a control plane on your own computer with "
    "`make local`, or start the agent by hand as docs/providers says"
)


class HostUnfit(CallNotSent):
    """The host cannot be used as the account describes it; waiting does not help."""


@contextmanager
def key_file(private_key: str) -> Iterator[Path]:
    """Yield a file with the key that exists while calls run. Raises ProviderRefused without an OpenSSH client."""
    if shutil.which("ssh") is None:
        raise ProviderRefused(RefusalKind.INVALID, NO_CLIENT)
    with tempfile.TemporaryDirectory(prefix="baton-ssh-") as directory:
        path = Path(directory) / "key"
        path.touch(mode=0o600)
        # OpenSSH refuses a key whose last line has no end.
        path.write_text(private_key.strip() + "\n")
        yield path


def call(
    host: SshHost,
    key: Path,
    operation: str,
    request: Mapping[str, Any] | None = None,
    *,
    bundle: bytes = b"",
    timeout_s: float = CALL_S,
) -> Any:
    """Return the answer of `operation`, as parsed JSON.

    Raises CallNotSent or HostUnfit if certainly nothing happened, AnswerLost if the operation may have happened.
    """
    if timeout_s <= 0:
        raise CallNotSent(f"{host.name}: no time is left for a connection")
    known_hosts = key.with_name(f"known_hosts-{threading.get_ident()}")
    known_hosts.write_text(f"{_ALIAS} {host.host_key}\n")
    options = {**_OPTIONS, "IdentityFile": key, "UserKnownHostsFile": known_hosts}
    arguments = [argument for name, value in options.items() for argument in ("-o", f"{name}={value}")]
    remote = f"exec {shlex.quote(host.python)} -c {shlex.quote(_LOADER)} {operation}"
    command = ["ssh", "-F", "none", *arguments, "-p", str(host.port), "-l", host.user, "--", host.address, remote]
    payload = b"%d\n%s%s\n%s" % (len(_PROGRAM), _PROGRAM, json.dumps(request or {}).encode(), bundle)
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            greeted = _reads_greeting(process.stdout)
            answer = _exchange(process.stdin, process.stdout, payload) if greeted else b""
            if answer:
                process.kill()
            status = process.wait()
        finally:
            process.kill()
            timer.cancel()
        said = _read_errors(errors)
    if not greeted:
        raise _explain(host, said, status)
    try:
        return json.loads(answer)
    except ValueError as error:
        reason = said.splitlines()[-1] if said else f"no answer within {timeout_s:.0f} s"
        raise AnswerLost(f"{host.name}: the call was sent, its outcome is unknown: {reason}") from error


def _reads_greeting(output: IO[bytes]) -> bool:
    """Read until the greeting; the machine's shell may print lines before. Return False without a greeting."""
    return any(output.readline(1024).strip() == _GREETING for _ in range(MAX_BANNER_LINES))


def _exchange(sent: IO[bytes], output: IO[bytes], payload: bytes) -> bytes:
    """Send the call and return the answer, one line; empty if the connection is lost."""
    try:
        sent.write(payload)
        sent.close()
    except BrokenPipeError:
        return b""
    return output.readline(MAX_ANSWER_BYTES)


def _read_errors(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read(4096).decode(errors="replace").strip()


def _explain(host: SshHost, said: str, status: int) -> CallNotSent:
    """Return why a host did not greet, with the remedy."""
    place = f"{host.name}: {host.user}@{host.address}:{host.port}"
    if status not in (_SSH_FAILED, _KILLED):
        remedy = "install Python 3.11 or newer, or name an interpreter as `python`"
        return HostUnfit(f"{place} cannot run {host.python}: {remedy}")
    if "Load key" in said:
        remedy = "store an OpenSSH key without a passphrase"
        return HostUnfit(f"{host.name}: OpenSSH cannot read the private key of the account: {remedy}")
    if "Permission denied" in said:
        remedy = f"append the public half to ~/.ssh/authorized_keys of {host.user} there"
        return HostUnfit(f"{place} refuses the key: {remedy}")
    if re.search("Host key verification failed|host key is known|IDENTIFICATION HAS CHANGED", said):
        scan = f"ssh-keyscan -p {host.port} {host.address}"
        return HostUnfit(f"{place} has another host key than the account says: compare `{scan}`")
    reason = said.splitlines()[-1] if said else f"no answer within {CALL_S:.0f} s"
    return CallNotSent(f"{place} cannot be reached: {reason}")
