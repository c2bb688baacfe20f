"""The code keeps to `rooms.py`: imports point one way, files are short, and class names are unique."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.rooms import FORBIDDEN, MAY_IMPORT, THIRD_PARTY

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("baton", "functions", "gpu_client", "cdk", "console")
MAX_LINES = 600


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    """Return every module that a file imports, and the line."""
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
    """True unless the edge points upward, or out of the product into tests, benches, the demo or fakes."""
    top = top_of(imported)
    if top not in PRODUCT:
        return top == top_of(importer) or top not in ("bench", "demo", "fakes", "tests")
    room = room_of(importer)
    if room is None:
        # `functions/__init__.py`, and rooms without a rule: they import nothing of the product.
        return False
    return within(imported, room) or any(within(imported, target) for target in MAY_IMPORT[room])


@pytest.mark.parametrize("package", [*PRODUCT, "fakes"])
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
        ("functions.domain.jobs.transitions", "baton.contract.worker.calls", True),
        ("functions.domain.jobs.transitions", "functions.domain.checkpoints.commit", False),
        ("functions.domain.checkpoints.commit", "functions.domain.jobs.transitions", True),
        ("functions.domain.rules.scaling", "functions.domain.checkpoints.commit", False),
        ("functions.domain.records", "functions.domain.jobs.lease_fence", False),
        ("functions.domain.ports", "functions.domain.jobs.lease_fence", True),
        ("functions.domain.jobs.transitions", "functions.storage.dynamodb.jobs", False),
        ("functions.domain.jobs.transitions", "functions.api.http.context", False),
        ("functions.api.worker.worker_calls", "functions.storage.dynamodb.jobs", False),
        ("functions.api.worker.worker_calls", "functions.handlers.worker", False),
        ("functions.api.worker.worker_calls", "functions.api.checkpoints.retention_runner", True),
        ("functions.api.checkpoints.retention_runner", "functions.api.worker.lease_guard", True),
        ("functions.api.checkpoints.retention_runner", "functions.api.worker.worker_calls", False),
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
        ("gpu_client.agent.app.worker_loop", "functions.domain.jobs.lease_fence", False),
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
        ("gpu_client.transport.net.connections", "gpu_client.transport.limits.transfer_channel", False),
        ("gpu_client.checkpoints.local.foreign_checkpoint_watcher", "gpu_client.agent.app.worker_loop", False),
        ("gpu_client.checkpoints.local.foreign_checkpoint_watcher", "gpu_client.transport.api.http", True),
        (
            "gpu_client.checkpoints.local.foreign_checkpoint_watcher",
            "gpu_client.checkpoints.save.checkpoint_commit",
            False,
        ),
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
        ("baton.contract.jobs.job", "functions.domain.jobs.transitions", False),
        ("baton.contract.jobs.job", "baton.contract.base", True),
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
        ("baton.contract.jobs.job", "gpu_client.training.session.session", False),
        ("gpu_client.training.session.session", "baton.Session", False),
        ("functions.api.worker.worker_calls", "tests.kits.api.factories", False),
        ("functions.api.worker.worker_calls", "bench.harness.figures", False),
        ("functions.storage.dynamodb.jobs", "tests.twins.cloud", False),
        ("functions.fleet.drivers.salad.driver", "fakes.salad.api", False),
        ("fakes.salad.api", "functions.fleet.drivers.salad.driver", False),
        ("fakes.salad.api", "fakes.server", True),
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
    """A cold start and a GPU machine that runs a plan load neither the template engine nor YAML."""
    program = (
        "import baton.contract.worker.calls, functions.api.http.route, gpu_client.agent.attempt.steps, sys; "
        "print({'jinja2', 'yaml', 'baton.contract.recipes.model'} & set(sys.modules)); "
        "import baton.contract.recipes.rendering, baton.contract.recipes.lint; "
        "print({'jinja2', 'yaml'} & set(sys.modules))"
    )
    assert printed_by(program) == ["set()", "set()"]


def test_rings_cost_those_nothing_who_have_none() -> None:
    """Only the function that serves rings loads the rings' store, calls and models."""
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
        "import sys; before = set(sys.modules); import baton.contract.rules.engine.rule_evaluator; "
        "foreign = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "print(sorted(foreign), 'baton.contract.yaml_documents' in sys.modules); "
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
        if path.stem == word and "node_modules" not in path.parts
    ]
    assert [str(path.relative_to(ROOT)) for path in found] == []


def test_no_file_is_too_long_to_read() -> None:
    pages = [path for path in (ROOT / "console" / "src").rglob("*") if path.suffix in (".js", ".css")]
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in [*sources(*PRODUCT, "demo"), *pages]
    }
    too_long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert too_long == {}


def test_every_folder_says_what_it_is() -> None:
    folders = {path.parent for path in sources(*PRODUCT, "fakes")}
    assert sorted(str(f.relative_to(ROOT)) for f in folders if not (f / "README.md").is_file()) == []


def test_class_names_are_unique() -> None:
    """Each class name of the product, the demo and the fakes is unique: a traceback or a log line omits the module."""
    homes: dict[str, list[str]] = {}
    for path in sources(*PRODUCT, "demo", "fakes"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_names_of_test_files_are_unique() -> None:
    """pytest imports the files of folders without `__init__.py` by their names alone."""
    found: dict[str, Path] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if not (path.parent / "__init__.py").exists():
            assert path.name not in found, f"{path} and {found[path.name]} have one name: rename either"
            found[path.name] = path
