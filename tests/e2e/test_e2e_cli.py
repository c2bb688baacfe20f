"""Test the READMEs' commands for a new user, typed word for word: from `make local` to the fetched result."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.contract.jobs.job import JobState
from gpu_client.transport.api.client import BatonClient
from tests.kits.stack.stack import ROOT, clean_environment
from tests.kits.waiting import until

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

ADDRESS = "http://127.0.0.1:8787"
"""Address of the stack on the pages; the test's stack takes a free port."""


def blocks(page: str, heading: str) -> list[str]:
    """The indented commands of a section, block by block."""
    section = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"(?:^ {4}.*\n(?:\n(?= {4}))?)+", section, re.MULTILINE)
    assert found, f"{page} has no section {heading!r} with commands"
    return [re.sub(r"^ {4}", "", block, flags=re.MULTILINE) for block in found]


@dataclass
class Terminals:
    """Shells in the repository's root, with a home directory of their own."""

    home: Path
    url: str = ""

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in clean_environment().items() if not name.startswith("XDG_")}
        return {**kept, "HOME": str(self.home), "TMPDIR": str(self.home / "tmp")}

    def open(self, script: str, log: str, stdin: str = "") -> subprocess.Popen[str]:
        """A terminal in which these lines are typed; it ends with the first that fails."""
        file = self.home / f"{log}.sh"
        file.write_text(script.replace(ADDRESS, self.url) if self.url else script)
        answers = self.home / f"{log}.in"
        answers.write_text(stdin)
        with (self.home / f"{log}.out").open("w") as out, answers.open() as typed:
            return subprocess.Popen(
                ["bash", "-eu", "-o", "pipefail", file],
                cwd=ROOT,
                env=self.environment,
                stdin=typed,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def said(self, log: str) -> str:
        return (self.home / f"{log}.out").read_text()


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    (tmp_path / "tmp").mkdir()
    yield Terminals(tmp_path)


def close(*processes: subprocess.Popen[str]) -> None:
    """Ctrl-C in each terminal, then close it."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(60)
                raise


@pytest.mark.parametrize(
    ("page", "heading", "shown"),
    [
        ("README.md", "Use it", ["no worker has claimed it", "complete, 1 attempt", "hello\n", '"state":"complete"']),
        (
            "gpu_client/cli/README.md",
            "From login to fetch",
            [
                "valid; scopes: submit, worker, admin",
                "1 file (23 B) sent to letters/",
                "letters/a.txt",
                "no worker has claimed it. It is the first job of its queue.",
                "complete, 1 attempt",
                "read 23 characters",
                "The job completed",
                "TO WHOM IT MAY CONCERN\n",
            ],
        ),
    ],
)
def test_the_page_works_as_it_is_written(
    page: str, heading: str, shown: list[str], terminals: Terminals, tmp_path: Path
) -> None:
    first, *rest = blocks(page, heading)
    assert first == "make local\n"
    (worker,) = [block for block in rest if "gpu_client.agent" in block]
    user = [block for block in rest if block != worker]

    # the environments are there: a test does not install anything
    ready = "make --no-print-directory -o .venv/.ready -o .emulator/.ready local"
    place = f'ARGS="--port 0 --state-dir {tmp_path / "state"} --sweep-interval-s 1"'
    control_plane = terminals.open(first.replace("make local", f"{ready} {place}"), "local")
    opened = [control_plane]
    try:
        until(
            lambda: "Ctrl-C stops it" in terminals.said("local") or control_plane.poll() is not None,
            what="the local control plane",
        )
        told = terminals.said("local")
        address = re.search(r"running at (http://\S+)", told)
        admin_key = re.search(r"admin +key +(baton_\S+)", told)
        assert address, told
        assert admin_key, told
        terminals.url, key = address[1], admin_key[1]
        at_the_desk = terminals.open("\n".join(user), "user", stdin=key + "\n")
        opened.append(at_the_desk)
        with BatonClient(terminals.url, key) as client:
            until(lambda: client.jobs(status=JobState.PENDING).jobs or at_the_desk.poll() is not None, what="the job")
            until(
                lambda: "no worker has claimed it" in terminals.said("user") or at_the_desk.poll() is not None,
                what="the explanation",
            )
            opened.append(terminals.open(worker, "worker"))
            assert at_the_desk.wait(240) == 0, terminals.said("user") + terminals.said("worker")
            assert opened[-1].wait(60) == 0, terminals.said("worker")
            assert [job.state for job in client.jobs().jobs] == [JobState.COMPLETE]
    finally:
        close(*reversed(opened))
    for part in shown:
        assert part in terminals.said("user")
    for log in ("user", "worker"):
        assert key.split("_", 2)[2] not in terminals.said(log), "a key was shown"
        assert "Traceback" not in terminals.said(log)
