"""The rooms of the product: what each room may import.

    handlers -> api -> domain <- storage          agent -> transport, checkpoints -> contract

The most specific row wins. Every import counts, also those inside functions and under TYPE_CHECKING.
`test_architecture.py` compares the tables with the code.
"""

from __future__ import annotations

MAY_IMPORT: dict[str, set[str]] = {
    "baton.contract": set(),
    # Lazy exports for users' scripts; nothing of the product imports them but the examples.
    "baton": {"gpu_client.controller.learning_rate", "gpu_client.ring", "gpu_client.training"},
    # Fakes of providers: they know the providers' formats alone.
    "fakes": set(),
    "functions.domain.access": {
        "baton.contract",
        "functions.domain.errors",
        "functions.domain.record_base",
    },
    "functions.domain.jobs": {
        "baton.contract",
        "functions.domain.errors",
        "functions.domain.table_keys",
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
        "functions.domain.worlds.seat_ids",
    },
    "functions.domain.worlds": {
        "baton.contract",
        "functions.domain.errors",
        "functions.domain.jobs",
        "functions.domain.record_base",
        "functions.domain.records",
        "functions.domain.seat_records",
    },
    "functions.domain.records": {
        "baton.contract",
        "functions.domain.table_keys",
        "functions.domain.record_base",
        "functions.domain.seat_records",
    },
    "functions.domain.seat_records": {"functions.domain.record_base"},
    "functions.domain": {"baton.contract"},
    "functions.recipes": {"baton.contract"},
    "functions.settings": {"baton.contract", "functions.domain"},
    "functions.fleet.drivers": {
        "baton.contract",
        "functions.domain",
        "functions.fleet.accounts",
        "functions.fleet.records",
    },
    "functions.fleet": {"baton.contract", "functions.domain"},
    "functions.storage.dynamodb.items": {"baton.contract", "functions.domain", "functions.fleet"},
    "functions.storage.dynamodb": {
        "baton.contract",
        "functions.domain",
        "functions.fleet",
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
    "functions.storage": {
        "baton.contract",
        "functions.domain",
        "functions.fleet.accounts",
        "functions.fleet.records",
    },
    # Every package uses the request, the errors and the pages; none of them knows a call.
    "functions.api.http": {
        "baton.contract",
        "functions.domain",
        "functions.fleet.accounts",
        "functions.fleet.drivers.protocol",
        "functions.fleet.store",
        "functions.settings",
    },
    # Conditional writes: the packages below the worker's calls prove leases, too.
    "functions.api.worker.lease_guard": {"baton.contract", "functions.domain", "functions.api.http"},
    "functions.api.fleet": {
        "baton.contract",
        "functions.domain",
        "functions.fleet",
        "functions.settings",
        "functions.api.http",
        "functions.api.admin.keys",
        # The requirements of a job that is planned before its submission.
        "functions.api.jobs.recipes",
    },
    "functions.api.machines": {
        "baton.contract",
        "functions.domain",
        "functions.fleet",
        "functions.settings",
        "functions.api.http",
        "functions.api.admin.keys",
        # The requirements of a job that is planned before its submission.
        "functions.api.jobs.recipes",
        "functions.api.fleet.store",
    },
    "functions.api.admin": {
        "baton.contract",
        "functions.domain",
        # The events that a webhook receives again.
        "functions.fleet.records",
        "functions.fleet.store",
        "functions.api.http",
    },
    "functions.api.rules": {
        "baton.contract",
        "functions.domain",
        "functions.api.http",
        "functions.api.worker.lease_guard",
        "functions.api.worlds.seat_settlement",
    },
    "functions.api.worlds": {
        "baton.contract",
        "functions.domain",
        "functions.api.http",
        "functions.api.worker.lease_guard",
    },
    "functions.api.operations": {"baton.contract", "functions.domain", "functions.api.rules", "functions.api.worlds"},
    "functions.api.jobs": {
        "baton.contract",
        "functions.domain",
        "functions.api.http",
        "functions.api.rules",
        "functions.api.worker.lease_guard",
        "functions.api.worlds",
        "functions.recipes",
        # The fleets of jobs that rent their own machines.
        "functions.fleet",
        "functions.api.fleet.store",
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
        "functions.api.objects.machine_access",
        "functions.api.operations.sweeper",
        "functions.api.worker.lease_guard",
        "functions.api.worlds.seat_settlement",
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
        "functions.api.worlds",
    },
    "functions.api.routes": {
        "baton.contract",
        "functions.domain",
        "functions.api.admin",
        "functions.api.checkpoints",
        "functions.api.fleet",
        "functions.api.http",
        "functions.api.machines",
        "functions.api.jobs",
        "functions.api.objects",
        "functions.api.rules",
        "functions.api.worker",
        "functions.api.worlds",
    },
    "functions.api": set(),
    "functions.publishing": {"baton.contract", "functions.domain", "functions.storage"},
    "functions.webhooks": {"baton.contract", "functions.domain", "functions.publishing", "functions.storage"},
    "functions.handlers": {
        "baton.contract",
        "functions.domain",
        "functions.fleet",
        "functions.recipes",
        "functions.settings",
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
    # Elastic training inside the training process: engines and codecs know neither rounds nor the session.
    "gpu_client.elastic.errors": set(),
    "gpu_client.elastic.outer_optimizer": set(),
    "gpu_client.elastic.parameters": {"baton.contract", "gpu_client.elastic.errors"},
    "gpu_client.elastic.codecs": {"gpu_client.elastic.errors"},
    "gpu_client.elastic.engines": {"baton.contract", "gpu_client.elastic.codecs", "gpu_client.elastic.errors"},
    "gpu_client.elastic.membership": {"baton.contract", "gpu_client.elastic.errors"},
    "gpu_client.elastic.recovery": {
        "baton.contract",
        "gpu_client.elastic.codecs",
        "gpu_client.elastic.engines",
        "gpu_client.elastic.errors",
        "gpu_client.elastic.outer_optimizer",
    },
    "gpu_client.elastic.rounds": {
        "baton.contract",
        "gpu_client.elastic.codecs",
        "gpu_client.elastic.engines",
        "gpu_client.elastic.errors",
        "gpu_client.elastic.outer_optimizer",
        "gpu_client.elastic.parameters",
        "gpu_client.elastic.membership",
        "gpu_client.elastic.recovery",
    },
    "gpu_client.elastic.data": {
        "baton.contract",
        "gpu_client.elastic.errors",
        "gpu_client.elastic.membership",
        "gpu_client.elastic.rounds",
    },
    # The script's outer loop, and its connections.
    "gpu_client.elastic": {
        "baton.contract",
        "gpu_client.elastic.codecs",
        "gpu_client.elastic.data",
        "gpu_client.elastic.engines",
        "gpu_client.elastic.errors",
        "gpu_client.elastic.machine",
        "gpu_client.elastic.membership",
        "gpu_client.elastic.recovery",
        "gpu_client.elastic.rounds",
    },
    # Processes of one machine, around the outer loop of a node.
    "gpu_client.elastic.machine": {
        "gpu_client.elastic.data",
        "gpu_client.elastic.errors",
        "gpu_client.elastic.outer",
        "gpu_client.elastic.parameters",
    },
    # The example to copy imports what a user's script imports.
    "gpu_client.training.digits": {"baton"},
    "gpu_client.training.byte_transformer": {"baton"},
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
        # Imported by the first call of `Session.shards`.
        "gpu_client.elastic.data",
        # Imported by the first call of `Session.elastic`.
        "gpu_client.elastic.node",
        "gpu_client.elastic.machine",
        "gpu_client.elastic.outer",
        "gpu_client.training.channel",
        "gpu_client.training.checkpoint",
        "gpu_client.training.distributed",
        "gpu_client.training.errors",
        "gpu_client.training.protocol",
    },
    "gpu_client.training.integrations": {
        "baton.contract",
        "gpu_client.controller.learning_rate",
        "gpu_client.elastic.data",
        "gpu_client.training.resumable_loader",
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
        "gpu_client.training.resumable_loader",
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
        "gpu_client.training.resumable_loader",
        "gpu_client.training.session",
    },
    # The parameters, their errors, and the comparison with the settings of a checkpoint.
    "gpu_client.training.dreambooth": {
        "gpu_client.training.checkpoint",
        "gpu_client.training.dreambooth.data",
        "gpu_client.training.errors",
    },
    "gpu_client.training.dreambooth_lora": {"gpu_client.controller.learning_rate", "gpu_client.training"},
    "gpu_client.training": set(),
    "gpu_client.controller": {"baton.contract"},
    "gpu_client.agent.app.own_machine": {"baton.contract"},
    "gpu_client.agent.app.settings": {"baton.contract"},
    "gpu_client.agent.app.shutdown": set(),
    "gpu_client.agent.app": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.agent.attempt",
        "gpu_client.agent.health",
        "gpu_client.agent.retry_pauses",
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
        "gpu_client.agent.retry_pauses",
        "gpu_client.agent.workspace",
    },
    "gpu_client.agent.process": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.checkpoints",
        # The exit codes that a trainer explains itself by.
        "gpu_client.training.protocol",
        # The provider's key to the machine, which no training inherits.
        "gpu_client.agent.app.own_machine",
        "gpu_client.agent.io",
        "gpu_client.agent.workspace",
    },
    # Sends the calls of a node to the control plane.
    "gpu_client.agent.control.world_relay": {
        "baton.contract",
        "gpu_client.agent.control.socket_directory",
        "gpu_client.transport",
    },
    "gpu_client.agent.control": {
        "baton.contract",
        "gpu_client.checkpoints",
        # The format of the messages between the two processes.
        "gpu_client.training.protocol",
        # The utilization of the GPUs.
        "gpu_client.controller.hardware_sampler",
        "gpu_client.agent.workspace",
    },
    "gpu_client.agent.io": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.checkpoints",
        "gpu_client.agent.polled_event",
        "gpu_client.agent.retry_pauses",
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
    "cdk.stage": {"baton.contract", "functions"},
    "cdk.bundling": {"cdk.stage"},
    "cdk.resources": {"baton.contract", "functions", "cdk.bundling", "cdk.stage"},
    # Runs without aws_cdk, whose import starts Node.
    "cdk.tool": {"baton.contract", "functions", "cdk.NODE", "cdk.stage"},
    "cdk": {"baton.contract", "functions"},
    "console": {"cdk.NODE", "cdk.tool.npm"},
    # Fetches data sets from the store and the Hugging Face Hub before a training.
    "gpu_client.datasets.prefetch": {"baton.contract", "gpu_client.transport"},
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
    # A plan reads the job file that `baton submit` takes.
    "gpu_client.cli.fleet": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.cli.core",
        "gpu_client.cli.jobs.submit",
    },
    "gpu_client.cli.ring": {"baton.contract", "gpu_client.transport", "gpu_client.ring", "gpu_client.cli.core"},
    # `baton fetch --checkpoint` restores a checkpoint as the agent does.
    "gpu_client.cli.data": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.datasets",
        "gpu_client.checkpoints.restore",
        "gpu_client.cli.core",
    },
    "gpu_client.cli.jobs": {
        "baton.contract",
        "gpu_client.transport",
        "gpu_client.cli.core",
        "gpu_client.cli.data",
        # The format of money and the words about machines.
        "gpu_client.cli.fleet.view",
        # The words about nodes of elastic jobs.
        "gpu_client.cli.world.view",
    },
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
    "gpu_client.cli.world": {"baton.contract", "gpu_client.transport", "gpu_client.cli.core"},
    # The program and its entry point import the commands; no command imports the program.
    "gpu_client.cli": {"gpu_client.transport"},
}
"""Modules of the product that each room may import, besides its own."""

THIRD_PARTY: dict[str, set[str]] = {
    "baton.contract": {"pydantic", "pydantic_core"},
    # Whoever reads a document that people write has YAML installed; it is loaded with the first text.
    "baton.contract.yaml_documents": {"yaml"},
    # Evaluated at every training step, and in Lambda: nothing at all from outside.
    "baton.contract.rules": set(),
    # Whoever reads or renders a recipe has these installed; whoever only runs one loads neither (see below).
    "baton.contract.recipes": {"pydantic", "pydantic_core", "yaml", "jinja2"},
    "functions.domain": {"pydantic", "pydantic_core"},
    # pip installs all of it without a compiler, on every system that has a wheel of torch.
    "gpu_client.elastic": {"torch", "numpy", "cryptography", "pydantic"},
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
    # A peer's bytes can make no object but the declared ones.
    "gpu_client.elastic": {"pickle", "marshal", "shelve"},
}  # fmt: skip
