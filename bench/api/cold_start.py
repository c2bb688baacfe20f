"""Measure the CPU time of a cold start before the first event: loading a handler in a fresh process.

Compared with what a plain handler of this kind loads: boto3, one client, the router of Powertools. Both in the same
run, in turns, and of each the quickest of several: others on the machine can only make a process slower.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.figures import Figure
from functions import handlers as rooms

TARGET_RATIO = 1.5
LARGEST = 10
NOT_HANDLERS = frozenset(("startup", "wiring"))
TYPICAL = """
import boto3
boto3.client("dynamodb")
from aws_lambda_powertools.event_handler import APIGatewayHttpResolver
APIGatewayHttpResolver()
"""
SETTINGS = {
    "BATON_TABLE_PREFIX": "cold-",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_PRINT_CPU_TIME = """
import os, time
os.write(1, str(time.process_time()).encode())
os._exit(0)
"""
"""Prints the CPU time of the process in seconds and ends it without cleanup, because processes of Lambda do not end."""

_LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| (\s*)(\S+)")


@dataclass(frozen=True)
class Loaded:
    """Line of the import-time tree: a module, its time without and with its imports."""

    module: str
    self_ms: float
    total_ms: float


def handlers() -> list[str]:
    """List the names of all handlers."""
    names = (path.stem for path in Path(rooms.__path__[0]).glob("*.py"))
    return sorted(name for name in names if not name.startswith("_") and name not in NOT_HANDLERS)


def loading(handler: str) -> str:
    """Write a program that loads a handler."""
    return f"import functions.handlers.{handler}\n"


def cpu_seconds(programs: Mapping[str, str], rounds: int) -> dict[str, list[float]]:
    """Measure the CPU time of each program in a process of its own, in turns; the first round only warms up."""
    found: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(rounds + 1):
        for name, program in programs.items():
            taken_s = float(_run([sys.executable, "-c", program + _PRINT_CPU_TIME]).stdout)
            if turn:
                found[name].append(taken_s)
    return found


def modules_of(handler: str) -> frozenset[str]:
    """List the modules that a handler loads."""
    output = _run([sys.executable, "-c", f"{loading(handler)}import sys; print(*sys.modules)"]).stdout
    return frozenset(output.split())


def clients_of(handler: str) -> list[str]:
    """List the services for which a handler creates a client before the first event."""
    count = """
import botocore.session
create, created = botocore.session.Session.create_client, []
def counted(session, service, *rest, **settings):
    created.append(service)
    return create(session, service, *rest, **settings)
botocore.session.Session.create_client = counted
"""
    return _run([sys.executable, "-c", f"{count}{loading(handler)}print(*created)"]).stdout.split()


def largest(handler: str) -> list[Loaded]:
    """List the modules with the longest time of their own, by `python -X importtime`."""
    output = _run([sys.executable, "-X", "importtime", "-c", loading(handler)]).stderr
    lines = [Loaded(found[4], int(found[1]) / 1000, int(found[2]) / 1000) for found in _LINE.finditer(output)]
    return sorted(lines, key=lambda line: line.self_ms, reverse=True)[:LARGEST]


def measure(*, rounds: int) -> list[Figure]:
    """Measure one figure for each handler; the details have the ten largest modules."""
    found = cpu_seconds({"": TYPICAL, **{name: loading(name) for name in handlers()}}, rounds)
    return [
        Figure(
            name=f"cold start: {name}",
            unit="ms",
            rounds=[min(found[name]) * 1000],
            baseline_name="boto3, a client, a router",
            baseline=[min(found[""]) * 1000],
            at_most=TARGET_RATIO,
            details={
                "each": f"CPU time, quickest of {rounds}, in turns",
                "largest_ms": {line.module: round(line.self_ms, 1) for line in largest(name)},
            },
        )
        for name in handlers()
    ]


def tree(figures: Sequence[Figure]) -> str:
    """Format the largest modules of each handler for a terminal."""
    lines = []
    for figure in figures:
        sizes = figure.details["largest_ms"].items()
        lines += [f"{figure.name}, ms of its largest modules:", *(f"  {ms:6.1f}  {module}" for module, ms in sizes)]
    return "\n".join(lines)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "AWS_"))}
    return subprocess.run(command, env={**kept, **SETTINGS}, capture_output=True, text=True, check=True)
