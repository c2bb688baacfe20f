"""Ctrl-C while the program loads: one line, and exit code 130."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

INTERRUPTED_WHILE_LOADING = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "loads", "says"),
    [
        ("gpu_client.cli", "typer", "baton: interrupted\n"),
        ("gpu_client.agent", "pydantic_settings", "baton: interrupted\n"),
        ("functions.local", "functions.local.stack", "baton: interrupted\n"),
        ("cdk", "botocore.session", "baton: interrupted before anything was changed.\n"),
    ],
)
def test_a_program_that_is_interrupted_while_it_loads_says_so_in_one_line(program: str, loads: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_LOADING, program, loads],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", says)
