"""A real OpenSSH server on loopback, with a home of its own for each port: each port is one host of a test."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kits.network.ports import free_port
from tests.kits.waiting import soon

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin") if shutil.which("ssh-keygen") else None
MISSING = "OpenSSH is not installed: apt-get install openssh-server openssh-client"
_PRIVILEGE_SEPARATION = Path("/run/sshd")
"""Directory that an sshd of root requires; the packages of Debian create it at the boot only."""

# Program that a host runs as `python`: the fault in the file `fault-<operation>`, then the interpreter of the tests.
_PYTHON = """#!/bin/sh
if [ "$1" = -m ]; then {agent}; fi
if [ "$3" = create ]; then cat /proc/[0-9]*/cmdline > "$HOME/commands" 2> /dev/null; fi
fault=$(cat "$HOME/fault-$3" 2> /dev/null) && rm "$HOME/fault-$3"
case "$fault" in
    dropped) kill -9 $PPID; exit 1 ;;
    lost) {python} "$@" | {{ head -n 1; cat > /dev/null; }}; kill -9 $PPID; exit 1 ;;
    snatched) mkdir -p "$HOME/.baton/machine/other"; {python} "$@"; rm -r "$HOME/.baton/machine"; exit 0 ;;
    ignored) exec {python} "$1" "$2" state ;;
esac
exec {python} "$@"
"""


@dataclass(frozen=True)
class ServedHost:
    """A host: a port of the server and a home."""

    port: int
    home: Path

    @property
    def python(self) -> str:
        return str(self.home / "python")

    def inject(self, operation: str, fault: str) -> None:
        """Let the next call of an operation meet a fault of `_PYTHON`."""
        (self.home / f"fault-{operation}").write_text(fault)

    @property
    def commands(self) -> str:
        """Return the command lines of all processes of this computer during the last create."""
        return (self.home / "commands").read_bytes().replace(b"\0", b" ").decode(errors="replace")


class SshServer:
    """sshd as a process of this user, for `count` hosts. agent: shell command in place of the agent."""

    def __init__(self, directory: Path, count: int, agent: str) -> None:
        assert SSHD is not None, MISSING
        if os.geteuid() == 0:
            _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        self.directory = directory
        self.private_key = _generate_key(directory / "user")
        _generate_key(directory / "host")
        self.host_key = " ".join((directory / "host.pub").read_text().split()[:2])
        self.user = getpass.getuser()
        self.hosts = [ServedHost(port, directory / f"home-{port}") for port in (free_port() for _ in range(count))]
        for host in self.hosts:
            host.home.mkdir()
            python = Path(host.python)
            python.write_text(_PYTHON.format(python=shlex.quote(sys.executable), agent=agent))
            python.chmod(0o700)
        config = directory / "sshd_config"
        config.write_text(_config(directory, self.hosts))
        self._log = directory / "sshd.log"
        self._process = subprocess.Popen([SSHD, "-D", "-f", config, "-E", self._log], stdin=subprocess.DEVNULL)
        soon(self._listens, what=f"sshd, see {self._log}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _listens(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        return self._log.exists() and self._log.read_text().count("Server listening") == len(self.hosts)


def _generate_key(path: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path], check=True)
    return path.read_text()


def _config(directory: Path, hosts: Sequence[ServedHost]) -> str:
    lines = [
        "ListenAddress 127.0.0.1",
        *[f"Port {host.port}" for host in hosts],
        f"HostKey {directory / 'host'}",
        f"AuthorizedKeysFile {directory / 'user.pub'}",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "StrictModes no",
        "UsePAM no",
        "PidFile none",
        "MaxStartups 100",
        # OpenSSH's first choice costs both sides three times the rest of a connection.
        "KexAlgorithms curve25519-sha256",
    ]
    for host in hosts:
        lines += [f"Match LocalPort {host.port}", f"    SetEnv HOME={host.home}"]
    return "\n".join(lines) + "\n"
