"""The house stands as drawn: imports point one way, and no room is a junk room.

    handlers -> api -> domain <- storage          agent -> transport, checkpoints -> contract

Every import counts, also those inside functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("baton", "functions", "gpu_client", "cdk")
MAX_LINES = 600

MAY_IMPORT: dict[str, set[str]] = {
    "baton.contract": set(),
    # Lazy exports for users' scripts; nothing of the product imports them but the examples.
    "baton": {"gpu_client.controller.knobs", "gpu_client.ring", "gpu_client.training"},
    "functions.domain.access": {
        "baton.contract",
        "functions.domain.errors",
        "functions.domain.record_base",
    },
    "functions.domain.jobs": {
        "baton.contract",
        "functions.domain.errors",
        "functions.domain.keys",
        "functions.domain.record_base",
        "functions.domain.records",
    },
    "functions.domain.checkpoints": {
        "baton.contract",
        "functions.domain.errors",
        "functions.domain.jobs",
        "functions.domain.record_base",
        "functions.domain.records",
    },
    "functions.domain.rules": {
        "baton.contract",
        "functions.domain.errors",
        "functions.domain.jobs",
        "functions.domain.records",
    },
    "functions.domain.records": {"baton.contract", "functions.domain.keys", "functions.domain.record_base"},
    "functions.domain": {"baton.contract"},
    "functions.recipes": {"baton.contract"},
    "functions.storage.dynamodb.items": {"baton.contract", "functions.domain"},
    "functions.storage.dynamodb": {
        "baton.contract",
        "functions.domain",
        "functions.storage.failures",
        "functions.storage.paging",
        "functions.storage.tables",
    },
    "functions.storage.s3": {
        "baton.contract",
        "functions.domain",
        "functions.storage.failures",
        "functions.storage.paging",
    },
    "functions.storage": {"baton.contract", "functions.domain"},
    # Every package uses the request, the errors and the pages; none of them knows a call.
    "functions.api.http": {"baton.contract", "functions.domain"},
    # Conditional writes: the packages below the worker's calls prove leases, too.
    "functions.api.worker.lease_guard": {"baton.contract", "functions.domain", "functions.api.http"},
    "functions.api.admin": {"baton.contract", "functions.domain", "functions.api.http"},
    "functions.api.rules": {
        "baton.contract",
        "functions.domain",
        "functions.api.http",
        "functions.api.worker.lease_guard",
    },
    "functions.api.operations": {"baton.contract", "functions.domain", "functions.api.rules"},
    "functions.api.jobs": {
        "baton.contract",
        "functions.domain",
        "functions.api.http",
        "functions.api.rules",
        "functions.api.worker.lease_guard",
        "functions.recipes",
    },
    "functions.api.objects": {
        "baton.contract",
        "functions.domain",
        "functions.api.http",
        "functions.api.worker.lease_guard",
    },
    "functions.api.checkpoints": {
        "baton.contract",
        "functions.domain",
        "functions.api.http",
        "functions.api.objects.declared_uploads",
        "functions.api.operations.sweeper",
        "functions.api.worker.lease_guard",
    },
    "functions.api.worker": {
        "baton.contract",
        "functions.domain",
        "functions.api.checkpoints",
        "functions.api.http",
        "functions.api.jobs",
        "functions.api.objects",
        "functions.api.operations",
        "functions.api.rules",
    },
    "functions.api.routes": {
        "baton.contract",
        "functions.domain",
        "functions.api.admin",
        "functions.api.checkpoints",
        "functions.api.http",
        "functions.api.jobs",
        "functions.api.objects",
        "functions.api.rules",
        "functions.api.worker",
    },
    "functions.api": set(),
    "functions.publishing": {"baton.contract", "functions.domain", "functions.storage"},
    "functions.webhooks": {"baton.contract", "functions.domain", "functions.publishing", "functions.storage"},
    "functions.handlers": {
        "baton.contract",
        "functions.domain",
        "functions.recipes",
        "functions.api",
        "functions.publishing",
        "functions.storage",
        "functions.webhooks",
    },
    # The emulator's environment holds ministack and nothing of the product.
    "functions.local.emulated": set(),
    "functions.local.gateway": {
        "baton.contract",
        "functions.api",
        "functions.domain",
        "functions.local.lambda_context",
        "functions.local.lifecycle",
    },
    "functions.local.triggers": {
        "functions.domain",
        "functions.local.lambda_context",
        "functions.local.lifecycle",
        "functions.storage",
    },
    "functions.local": {"baton.contract", "functions"},
    # Connections, answers of the object store, local files: knows neither limits nor the control plane.
    "gpu_client.transport.net": {"baton.contract", "gpu_client.transport.errors", "gpu_client.transport.retry"},
    "gpu_client.transport.limits": {"gpu_client.transport.errors", "gpu_client.transport.net"},
    "gpu_client.transport.transfer": {
        "baton.contract",
        "gpu_client.transport.errors",
        "gpu_client.transport.limits",
        "gpu_client.transport.net",
        "gpu_client.transport.retry",
    },
    "gpu_client.transport.api": {
        "baton.contract",
        "gpu_client.transport.errors",
        "gpu_client.transport.limits",
        "gpu_client.transport.net",
        "gpu_client.transport.retry",
        "gpu_client.transport.transfer",
    },
    "gpu_client.transport.errors": {"baton.contract"},
    "gpu_client.transport.retry": {"baton.contract"},
    "gpu_client.transport": {"baton.contract"},
    "gpu_client.checkpoints.format": {"baton.contract", "gpu_client.transport"},
    "gpu_client.checkpoints.local": {"baton.contract", "gpu_client.transport", "gpu_client.checkpoints.format"},
    "gpu_client.checkpoints.save": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.checkpoints.format",
        "gpu_client.checkpoints.local",
    },
    "gpu_client.checkpoints.restore": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.checkpoints.format",
        "gpu_client.checkpoints.local",
    },
    "gpu_client.checkpoints": set(),
    # The example to copy imports what a user's script imports.
    "gpu_client.training.digits": {"baton"},
    # Code inside the training process knows neither the agent nor the network.
    "gpu_client.training.errors": set(),
    "gpu_client.training.protocol": set(),
    "gpu_client.training.channel": {"gpu_client.training.protocol"},
    # Agreement between ranks serves any training; therefore the package does not know the session.
    "gpu_client.training.distributed": {"gpu_client.training.errors"},
    "gpu_client.training.checkpoint": {
        "baton.contract",
        "gpu_client.training.channel",
        "gpu_client.training.distributed",
        "gpu_client.training.errors",
        "gpu_client.training.protocol",
    },
    "gpu_client.training.session": {
        "baton.contract",
        "gpu_client.controller",
        "gpu_client.training.channel",
        "gpu_client.training.checkpoint",
        "gpu_client.training.distributed",
        "gpu_client.training.errors",
        "gpu_client.training.protocol",
    },
    "gpu_client.training.integrations": {
        "baton.contract",
        "gpu_client.controller.knobs",
        "gpu_client.training.checkpoint",
        "gpu_client.training.errors",
        "gpu_client.training.session",
    },
    "gpu_client.training.dreambooth.data": {
        # The check of a mask, which the dataset validation shares.
        "gpu_client.datasets.images",
        "gpu_client.training.dreambooth.config",
        "gpu_client.training.dreambooth.errors",
        "gpu_client.training.errors",
        "gpu_client.training.integrations.batch_sampler",
    },
    "gpu_client.training.dreambooth.model": {
        "gpu_client.training.checkpoint",
        "gpu_client.training.dreambooth.config",
        "gpu_client.training.dreambooth.data",
        "gpu_client.training.dreambooth.errors",
    },
    "gpu_client.training.dreambooth.sampling": {
        "baton.contract",
        "gpu_client.training.dreambooth.config",
        "gpu_client.training.dreambooth.data",
        "gpu_client.training.dreambooth.model",
        "gpu_client.training.errors",
        "gpu_client.training.integrations.batch_sampler",
        "gpu_client.training.session",
    },
    # The parameters, their errors, and the comparison with the settings of a checkpoint.
    "gpu_client.training.dreambooth": {
        "gpu_client.training.checkpoint",
        "gpu_client.training.dreambooth.data",
        "gpu_client.training.errors",
    },
    "gpu_client.training.dreambooth_lora": {"gpu_client.controller.knobs", "gpu_client.training"},
    "gpu_client.training": set(),
    "gpu_client.controller": {"baton.contract"},
    "gpu_client.agent.app.settings": {"baton.contract"},
    "gpu_client.agent.app.shutdown": set(),
    "gpu_client.agent.app": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.agent.attempt",
        "gpu_client.agent.health",
        "gpu_client.agent.outage_backoff",
        "gpu_client.agent.workspace",
    },
    "gpu_client.agent.attempt": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.checkpoints",
        "gpu_client.agent.app.settings",
        "gpu_client.agent.app.shutdown",
        "gpu_client.agent.control",
        "gpu_client.agent.io",
        "gpu_client.agent.polled_event",
        "gpu_client.agent.process",
        "gpu_client.agent.outage_backoff",
        "gpu_client.agent.workspace",
    },
    "gpu_client.agent.process": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.checkpoints",
        # The exit codes that a trainer explains itself by.
        "gpu_client.training.protocol",
        "gpu_client.agent.io",
        "gpu_client.agent.workspace",
    },
    "gpu_client.agent.control": {
        "baton.contract",
        "gpu_client.checkpoints",
        # The format of the messages between the two processes.
        "gpu_client.training.protocol",
        # The utilization of the GPUs.
        "gpu_client.controller.hardware_sampler",
    },
    "gpu_client.agent.io": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.checkpoints",
        "gpu_client.agent.polled_event",
        "gpu_client.agent.outage_backoff",
        "gpu_client.agent.workspace",
    },
    # The layout of the shared memory.
    "gpu_client.agent.workspace": {
        "baton.contract",
        "gpu_client.checkpoints",
        "gpu_client.training.protocol",
        "gpu_client.transport.net.files",
    },
    # The entry point, the health check, and what all rooms of the agent import.
    "gpu_client.agent": {"baton.contract", "gpu_client.transport", "gpu_client.agent.app"},
    # The stack is made from the same tables and routes that the functions use.
    "cdk.stage": {"functions"},
    "cdk.bundling": {"cdk.stage"},
    "cdk.resources": {"baton.contract", "functions", "cdk.bundling", "cdk.stage"},
    # Runs without aws_cdk, whose import starts Node.
    "cdk.tool": {"baton.contract", "functions", "cdk.NODE", "cdk.stage"},
    "cdk": {"baton.contract", "functions"},
    # Looks at files, wherever they are: on the machine that pushes them, and on the one that trains.
    "gpu_client.datasets": set(),
    # One file beside a worker of the original orchestrator, in an image that has nothing else of ours.
    "gpu_client.original_relay": set(),
    # Runs by itself while the image is built.
    "gpu_client.requirements": set(),
    # Looks at what trainings reported, wherever that was written down.
    "gpu_client.backtest": {"baton.contract"},
    # Translates rule files of other systems; the command line alone imports it, so Lambda does not load it.
    "gpu_client.importers": {"baton.contract"},
    # A generator that runs as a job reports its progress to a session.
    "gpu_client.ring.generate": {"gpu_client.ring", "gpu_client.training"},
    # Generators and trainings on any machine use a ring, with and without the rest of the product.
    "gpu_client.ring.errors": set(),
    "gpu_client.ring.settings": set(),
    # Bytes and documents: pure, knows neither stores nor processes.
    "gpu_client.ring.format": {"gpu_client.ring.errors", "gpu_client.ring.settings"},
    "gpu_client.ring.store": {
        "baton.contract",
        "gpu_client.ring.errors",
        "gpu_client.ring.format",
        "gpu_client.transport",
    },
    "gpu_client.ring.core": {
        "gpu_client.ring.errors",
        "gpu_client.ring.format",
        "gpu_client.ring.settings",
        "gpu_client.ring.store",
    },
    "gpu_client.ring.reading": {
        "gpu_client.ring.core",
        "gpu_client.ring.errors",
        "gpu_client.ring.format",
        "gpu_client.ring.store",
    },
    "gpu_client.ring.generating": {
        "gpu_client.ring.core",
        "gpu_client.ring.errors",
        "gpu_client.ring.format",
        "gpu_client.ring.settings",
        "gpu_client.ring.store",
    },
    "gpu_client.ring.tools": {
        "gpu_client.ring.core",
        "gpu_client.ring.errors",
        "gpu_client.ring.format",
        "gpu_client.ring.generating",
        "gpu_client.ring.reading",
        "gpu_client.ring.settings",
        "gpu_client.ring.store",
    },
    "gpu_client.ring.wirehead_clean": {"gpu_client.ring.errors", "gpu_client.ring.core", "gpu_client.ring.tools"},
    "gpu_client.ring": set(),
    "gpu_client.cli.core": {"baton.contract", "gpu_client.transport"},
    "gpu_client.cli.admin": {"baton.contract", "gpu_client.transport", "gpu_client.cli.core"},
    "gpu_client.cli.ring": {"baton.contract", "gpu_client.transport", "gpu_client.ring", "gpu_client.cli.core"},
    "gpu_client.cli.data": {"baton.contract", "gpu_client.transport", "gpu_client.datasets", "gpu_client.cli.core"},
    "gpu_client.cli.jobs": {"baton.contract", "gpu_client.transport", "gpu_client.cli.core", "gpu_client.cli.data"},
    "gpu_client.cli.insight": {"baton.contract", "gpu_client.transport", "gpu_client.cli.core", "gpu_client.cli.jobs"},
    "gpu_client.cli.rules_recipes": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.backtest",
        "gpu_client.importers",
        "gpu_client.cli.admin",
        "gpu_client.cli.core",
        "gpu_client.cli.data",
        "gpu_client.cli.insight",
        "gpu_client.cli.jobs",
    },
    # The program and its entry point import the commands; no command imports the program.
    "gpu_client.cli": {"gpu_client.transport"},
}
"""What each room may import of the product, besides itself."""

THIRD_PARTY: dict[str, set[str]] = {
    "baton.contract": {"pydantic", "pydantic_core"},
    # Whoever reads a document that people write has YAML installed; it is loaded with the first text.
    "baton.contract.documents": {"yaml"},
    # Evaluated at every training step, and in Lambda: nothing at all from outside.
    "baton.contract.rules": set(),
    # Whoever reads or renders a recipe has these installed; whoever only runs one loads neither (see below).
    "baton.contract.recipes": {"pydantic", "pydantic_core", "yaml", "jinja2"},
    "functions.domain": {"pydantic", "pydantic_core"},
}
"""Rooms that take from outside only what is named here (and the standard library)."""

FORBIDDEN: dict[str, set[str]] = {
    # Clock, chance, environment and the network are handed in.
    "functions.domain": {
        "asyncio", "datetime", "os", "pathlib", "random", "secrets",
        "socket", "subprocess", "threading", "time", "uuid",
    },
    # Step, time and metrics are handed in: the same stream gives the same decisions on every machine.
    "baton.contract.rules": {
        "asyncio", "baton.contract.base", "datetime", "importlib", "os", "pathlib", "pickle", "random", "secrets",
        "socket", "subprocess", "sys", "threading", "time", "uuid",
    },
    # No AWS credential and no AWS library on a GPU machine; none behind the stores' backs either.
    "functions.api": {"boto3", "botocore", "awscrt"},
    "functions.handlers": {"botocore", "awscrt"},
    "functions.recipes": {"boto3", "botocore"},
    "gpu_client": {"boto3", "botocore", "aws_lambda_powertools"},
    # An unchanged training image has no HTTP client of ours.
    "gpu_client.training": {"requests", "urllib3", "pydantic_settings", "psutil"},
}  # fmt: skip


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, and the line."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            # `from gpu_client import agent` imports gpu_client.agent.
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def top_of(module: str) -> str:
    return module.partition(".")[0]


def room_of(module: str) -> str | None:
    return next((room for room in MAY_IMPORT if within(module, room)), None)


def edge_is_allowed(importer: str, imported: str) -> bool:
    """True unless the edge points upward, or out of the product into tests, benches or the demo."""
    top = top_of(imported)
    if top not in PRODUCT:
        return top not in ("bench", "demo", "tests")
    room = room_of(importer)
    if room is None:
        # `functions/__init__.py`, and rooms without a rule: they import nothing of the product.
        return False
    return within(imported, room) or any(within(imported, target) for target in MAY_IMPORT[room])


@pytest.mark.parametrize("package", PRODUCT)
def test_imports_point_one_way(package: str) -> None:
    upward = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in sources(package)
        for imported, line in imports_of(path)
        if not edge_is_allowed(module_of(path), imported)
    ]
    assert upward == []


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("functions.api.worker.worker_calls", "functions.domain.jobs.transitions", True),
        ("functions.storage.dynamodb.jobs", "functions.domain.ports", True),
        ("functions.domain.jobs.transitions", "baton.contract.work", True),
        ("functions.domain.jobs.transitions", "functions.domain.checkpoints.commit", False),
        ("functions.domain.checkpoints.commit", "functions.domain.jobs.transitions", True),
        ("functions.domain.rules.scaling", "functions.domain.checkpoints.commit", False),
        ("functions.domain.records", "functions.domain.jobs.leases", False),
        ("functions.domain.ports", "functions.domain.jobs.leases", True),
        ("functions.domain.jobs.transitions", "functions.storage.dynamodb.jobs", False),
        ("functions.domain.jobs.transitions", "functions.api.http.context", False),
        ("functions.api.worker.worker_calls", "functions.storage.dynamodb.jobs", False),
        ("functions.api.worker.worker_calls", "functions.handlers.worker", False),
        ("functions.api.worker.worker_calls", "functions.api.checkpoints.retention", True),
        ("functions.api.checkpoints.retention", "functions.api.worker.lease_guard", True),
        ("functions.api.checkpoints.retention", "functions.api.worker.worker_calls", False),
        ("functions.api.worker.lease_guard", "functions.api.rules.rule_evaluation_runs", False),
        ("functions.api.rules.rule_calls", "functions.api.jobs.views", False),
        ("functions.api.jobs.job_calls", "functions.api.routes.submitter", False),
        ("functions.api.http.dispatch", "functions.api.routes.worker", False),
        ("functions.storage.dynamodb.jobs", "functions.api.http.context", False),
        ("functions.handlers.worker", "functions.local.gateway.http_gateway", False),
        ("functions.local.stack", "functions.handlers.worker", True),
        ("functions.local.gateway.http_gateway", "gpu_client.transport.api.http", False),
        ("functions.local.gateway.http_gateway", "functions.local.triggers.schedule", False),
        ("functions.local.triggers.stream_feed", "functions.local.gateway.http_gateway", False),
        ("functions.local.emulated.tables", "functions.storage.tables", False),
        ("functions.local.stack", "functions.local.triggers.schedule", True),
        ("cdk.stack", "cdk.resources.alarms", True),
        ("cdk.resources.functions", "cdk.bundling.code", True),
        ("cdk.resources.functions", "cdk.tool.command_line", False),
        ("cdk.tool.command_line", "cdk.resources.access", False),
        ("gpu_client.agent.app.worker_loop", "functions.domain.jobs.leases", False),
        ("gpu_client.agent.control.channel_server", "gpu_client.training.protocol", True),
        ("gpu_client.agent.control.channel_server", "gpu_client.training.protocol.Message", True),
        ("gpu_client.agent.control.channel_server", "gpu_client.training.session.session", False),
        ("gpu_client.agent.attempt.steps", "gpu_client.agent.io.committer", True),
        ("gpu_client.agent.io.committer", "gpu_client.agent.attempt.lease", False),
        ("gpu_client.agent.attempt.job_run", "gpu_client.agent.app.settings", True),
        ("gpu_client.agent.attempt.job_run", "gpu_client.agent.app.worker_loop", False),
        ("gpu_client.agent.workspace.slots", "gpu_client.agent.io.inputs", False),
        ("gpu_client.transport.api.http", "gpu_client.agent.app.worker_loop", False),
        ("gpu_client.transport.api.objects", "gpu_client.transport.transfer.manager", True),
        ("gpu_client.transport.transfer.manager", "gpu_client.transport.api.http", False),
        ("gpu_client.transport.net.connections", "gpu_client.transport.limits.channel", False),
        ("gpu_client.checkpoints.local.watcher", "gpu_client.agent.app.worker_loop", False),
        ("gpu_client.checkpoints.local.watcher", "gpu_client.transport.api.http", True),
        ("gpu_client.checkpoints.local.watcher", "gpu_client.checkpoints.save.checkpoint_commit", False),
        ("gpu_client.checkpoints.save.artifacts", "gpu_client.checkpoints.local.directory_files", True),
        ("gpu_client.checkpoints.save.artifacts", "gpu_client.checkpoints.restore.checkpoint_restore", False),
        ("gpu_client.checkpoints.format.packing", "gpu_client.checkpoints.local.chunk_cache", False),
        ("gpu_client.training.session.session", "gpu_client.transport.api.http", False),
        ("gpu_client.training.session.session", "gpu_client.training.distributed.process_group", True),
        ("gpu_client.training.distributed.process_group", "gpu_client.training.session.session", False),
        ("gpu_client.training.distributed.rank_consensus", "gpu_client.controller.steering", False),
        ("gpu_client.training.checkpoint.checkpoint_writer", "gpu_client.training.session.session", False),
        ("gpu_client.training.session.session", "gpu_client.training.integrations.hf_callback", False),
        ("gpu_client.training.dreambooth.data.pictures", "gpu_client.training.dreambooth.model.lora", False),
        ("gpu_client.ring.generate", "gpu_client.training.Session", True),
        ("gpu_client.ring.generating.generation_loop", "gpu_client.training.Session", False),
        ("gpu_client.ring.format.objects", "gpu_client.ring.store.protocol", False),
        ("gpu_client.ring.store.memory", "gpu_client.ring.core.ring", False),
        ("gpu_client.ring.core.ring", "gpu_client.ring.store.uri", True),
        ("gpu_client.ring.core.maintenance", "gpu_client.ring.reading.reader", False),
        ("gpu_client.ring.generating.writer", "gpu_client.ring.reading.reader", False),
        ("gpu_client.ring.reading.reader", "gpu_client.ring.tools.status", False),
        ("gpu_client.ring.tools.status", "gpu_client.ring.reading.reader", True),
        ("baton.contract.jobs", "functions.domain.jobs.transitions", False),
        ("baton.contract.jobs", "baton.contract.base", True),
        ("baton.contract.rules.document.loader", "gpu_client.importers.ibm.trainer_controller", False),
        ("gpu_client.agent.app.worker_loop", "gpu_client.importers.ibm.trainer_controller", False),
        ("gpu_client.cli.rules_recipes.rules", "gpu_client.importers.ibm.trainer_controller", True),
        ("gpu_client.cli.core.session", "gpu_client.cli.jobs.show", False),
        ("gpu_client.cli.jobs.watch", "gpu_client.cli.insight.report", False),
        ("gpu_client.cli.insight.report", "gpu_client.cli.jobs.goodput", True),
        ("gpu_client.cli.ring.commands", "gpu_client.cli.main", False),
        ("gpu_client.cli.main", "gpu_client.cli.ring.commands", True),
        ("gpu_client", "gpu_client.agent", False),
        ("baton", "gpu_client.training.session.session", True),
        ("baton.contract.jobs", "gpu_client.training.session.session", False),
        ("gpu_client.training.session.session", "baton.Session", False),
        ("functions.api.worker.worker_calls", "tests.kits.api.factories", False),
        ("functions.api.worker.worker_calls", "bench.harness.figures", False),
        ("functions.storage.dynamodb.jobs", "tests.twins.cloud", False),
        ("functions.storage.dynamodb.items.job_items", "functions.storage.paging", False),
        ("functions.storage.s3.objects", "functions.storage.dynamodb.reads", False),
        ("functions.storage.dynamodb.jobs", "functions.storage.paging", True),
    ],
)
def test_the_walk_can_fail(importer: str, imported: str, allowed: bool) -> None:
    assert edge_is_allowed(importer, imported) is allowed


def test_every_room_has_a_rule() -> None:
    rooms = {
        module for path in sources(*PRODUCT) if (module := module_of(path)) not in PRODUCT and room_of(module) is None
    }
    assert rooms == set(), "say in MAY_IMPORT what the new room may import"


@pytest.mark.parametrize("room", THIRD_PARTY)
def test_rooms_that_take_little_from_outside(room: str) -> None:
    allowed = {*THIRD_PARTY[room], *PRODUCT, *sys.stdlib_module_names}
    inner = [other for other in THIRD_PARTY if other.startswith(f"{room}.")]
    taken = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in sources(room.replace(".", "/"))
        if not any(within(module_of(path), other) for other in inner)
        for imported, line in imports_of(path)
        if top_of(imported) not in allowed
    ]
    assert taken == []


def printed_by(program: str, **environment: str) -> list[str]:
    """The lines of a program in a process of its own."""
    line = [sys.executable, "-c", program]
    found = subprocess.run(line, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return found.stdout.splitlines()


def test_recipes_cost_those_nothing_who_read_none() -> None:
    """Neither a cold start nor a GPU machine that runs a plan loads the template engine or YAML."""
    program = (
        "import baton.contract.work, functions.api.http.route, gpu_client.agent.attempt.steps, sys; "
        "print({'jinja2', 'yaml', 'baton.contract.recipes.model'} & set(sys.modules)); "
        "import baton.contract.recipes.rendering, baton.contract.recipes.lint; "
        "print({'jinja2', 'yaml'} & set(sys.modules))"
    )
    assert printed_by(program) == ["set()", "set()"]


def test_rings_cost_those_nothing_who_have_none() -> None:
    """Only the function that serves them loads their store, their calls and their models."""
    program = (
        "import sys, functions.handlers.wiring as wiring, functions.api.routes.worker, functions.api.routes.transfer; "
        "context = wiring.build_context({}); "
        "print(context.rings, [name for name in sys.modules if name.endswith('rings')]); "
        "import gpu_client.agent.attempt.steps, gpu_client.ring.core.ring; "
        "names = {name.removeprefix('gpu_client.ring.store.') for name in sys.modules}; "
        "print({'s3', 's3_client', 'control_plane'} & names)"
    )
    assert printed_by(program, AWS_DEFAULT_REGION="us-east-1") == ["None []", "set()"]


def test_rules_cost_a_training_process_nothing_but_themselves() -> None:
    """Evaluating them loads no library at all; reading a document loads YAML, and nothing more."""
    program = (
        "import sys; before = set(sys.modules); import baton.contract.rules.engine.evaluator; "
        "foreign = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "print(sorted(foreign), 'baton.contract.documents' in sys.modules); "
        "import baton.contract.rules.document.loader; baton.contract.rules.document.loader.load('rules: []'); "
        "print(sorted({'pydantic', 'numpy', 'torch', 'jinja2', 'yaml'} & set(sys.modules)))"
    )
    assert printed_by(program) == ["['baton'] False", "['yaml']"]


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_that_never_touch(room: str) -> None:
    touched = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in sources(room.replace(".", "/"))
        for imported, line in imports_of(path)
        if any(within(imported, forbidden) for forbidden in FORBIDDEN[room])
    ]
    assert touched == []


@pytest.mark.parametrize("word", ["util", "utils", "utilities", "helper", "helpers", "misc", "common"])
def test_no_junk_rooms(word: str) -> None:
    found = [
        path
        for top in (*PRODUCT, "bench", "demo", "tests")
        for path in (ROOT / top).rglob(f"{word}*")
        if path.stem == word
    ]
    assert [str(path.relative_to(ROOT)) for path in found] == []


def test_no_file_is_too_long_to_read() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*PRODUCT, "demo")}
    too_long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert too_long == {}


def test_every_folder_says_what_it_is() -> None:
    folders = {path.parent for path in sources(*PRODUCT)}
    assert sorted(str(f.relative_to(ROOT)) for f in folders if not (f / "README.md").is_file()) == []


def test_class_names_are_unique() -> None:
    """One name means one thing: a traceback, a log line or a search names the class without its module."""
    homes: dict[str, list[str]] = {}
    for path in sources(*PRODUCT, "demo"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
