"""Command line of `python -m cdk`: checks, then the pinned CDK command line on the Node of the environment.

`--stage NAME` and `-c name=value` are the settings in cdk/stage.py; unknown arguments go to the CDK command line.
`admin-key` prints a key of scope `admin`, with which `POST /keys` creates all others. `check-store` tries the stage's
own object store; `deploy` runs the same check first.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NotConnectedError

from baton.contract.names import OPERATOR_TENANT
from cdk import NODE
from cdk.stage import READY_SHARDS_TAG, SETTINGS, StageSettings, StageSettingsError
from cdk.tool.bootstrap_key import NotIssuedError, issue_admin_key
from cdk.tool.npm import NpmError, install_locked
from cdk.tool.store_check import StoreError, require_store
from functions.storage.tables import JOBS

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
TOOLS = ROOT / ".cdk"
"""Folder of the installed command line and of its output for each stage; ignored by git."""
CLI = TOOLS / "node_modules" / "aws-cdk" / "bin" / "cdk"
COMMANDS = ("synth", "diff", "deploy", "destroy", "bootstrap", "admin-key", "check-store")
USAGE_ERROR = 2
INTERRUPTED = 130
AWS_CONFIG = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2})


class ToolError(Exception):
    """A command cannot run; the message contains the remedy."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status, or 2 after one line about a missing requirement."""
    parser = argparse.ArgumentParser(prog="python -m cdk", description="Deploy Baton to an AWS account.")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--stage", default="dev", help="name of the deployment (default: dev)")
    parser.add_argument(
        "-c",
        "--context",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the stage, see cdk/README.md",
    )
    parser.add_argument(
        "--tenant",
        default=OPERATOR_TENANT,
        help=f"tenant of the key that admin-key creates (default: {OPERATOR_TENANT}, which operates the deployment)",
    )
    given, rest = parser.parse_known_args(arguments)
    try:
        context = {"stage": given.stage, **_context(given.context)}
        stage = StageSettings.from_context(context)
        if result := prepare(given.command, stage, given.tenant):
            sys.stdout.write(f"{result}\n")
            return 0
    except (StageSettingsError, ToolError, NotIssuedError, StoreError) as error:
        sys.stderr.write(f"baton: {error}\n")
        return USAGE_ERROR
    return run(given.command, stage.name, context, rest)


def prepare(command: str, stage: StageSettings, tenant: str) -> str:
    """Check the requirements of a command; return the output of a command that needs no CDK, else "".

    Raises StageSettingsError, ToolError, NotIssuedError, StoreError.
    """
    if command != "synth":
        require_account()
    if command == "admin-key":
        return issue_admin_key(stage, tenant)
    if command == "deploy":
        require_no_fewer_shards(stage)
    if command in ("deploy", "check-store"):
        require_store(stage)
    if command == "check-store":
        return "The object store is usable." if stage.has_own_store else "The stage uses buckets of AWS."
    if command == "destroy":
        require_deployed(stage)
    install()
    return ""


def run(command: str, stage: str, context: dict[str, str], more: list[str]) -> int:
    """Run one command of the CDK command line; a deployment writes its outputs to `.cdk/<stage>.json`."""
    # Each stage has its own folder, so that several stages can be deployed at the same time.
    line = [str(NODE), str(CLI), command, "--output", str(TOOLS / "out" / stage)]
    if command != "bootstrap" or not any(argument.startswith("aws://") for argument in more):
        # A bootstrap of named accounts and regions needs no stack, whose synthesis takes ten seconds.
        line += ["--app", f'"{sys.executable}" -m cdk.app']
    for name, value in context.items():
        line += ["--context", f"{name}={value}"]
    if command == "synth":
        line += ["--quiet"]
    if command == "deploy":
        # Tables outlive a destroyed stack and a failed first deployment; the next deployment adopts the tables.
        line += ["--outputs-file", str(TOOLS / f"{stage}.json"), "--import-existing-resources"]
    environment = {**os.environ, "JSII_NODE": str(NODE), "CDK_DISABLE_CLI_TELEMETRY": "1"}
    remedy = f"repeat `python -m cdk {command} --stage {stage}` to continue"
    try:
        status = subprocess.run([*line, "--no-notices", *more], cwd=ROOT, env=environment, check=False).returncode
    except KeyboardInterrupt:
        sys.stderr.write(f"baton: interrupted. AWS completes the operation in progress; {remedy}.\n")
        return INTERRUPTED
    if status:
        sys.stderr.write(
            f"baton: {command} of stage {stage!r} failed for the reason above. After the repair, {remedy}.\n"
        )
    return status


def require_account() -> None:
    """Check credentials and region in the places that AWS's tools read. Raises ToolError."""
    session = botocore.session.get_session()
    try:
        credentials = session.get_credentials()
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    except BotoCoreError as error:
        raise ToolError(f"the AWS settings are unusable: {error}") from error
    if credentials is None:
        raise ToolError("no AWS credentials. Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.")
    if not region:
        raise ToolError("no AWS region. Set AWS_REGION, or `region` in the profile.")
    partitions = session.get_available_partitions()
    known = [name for partition in partitions for name in session.get_available_regions("lambda", partition)]
    if region not in known:
        raise ToolError(f"{region!r} is no AWS region with Lambda. Use one of {', '.join(known)}.")
    # Baton's clients read this variable only, the CDK command line reads both.
    os.environ["AWS_DEFAULT_REGION"] = region
    try:
        session.create_client("sts", region_name=region, config=AWS_CONFIG).get_caller_identity()
    except ClientError as error:
        raise ToolError(f"AWS refuses these credentials: {error.response['Error'].get('Message') or error}") from error
    except (HTTPClientError, NotConnectedError) as error:
        raise ToolError(f"AWS cannot be reached: {error}") from error
    except BotoCoreError as error:
        raise ToolError(f"the AWS settings are unusable: {error}") from error


def require_deployed(stage: StageSettings) -> None:
    """Check that the stack exists, at least in part. Raises ToolError; CDK reports success for a missing stack."""
    cloud = botocore.session.get_session().create_client("cloudformation", config=AWS_CONFIG)
    try:
        cloud.describe_stacks(StackName=f"baton-{stage.name}")
    except ClientError as error:
        if "does not exist" in str(error):
            raise ToolError(f"stage {stage.name!r} is not deployed in this account and region.") from error
        raise ToolError(f"CloudFormation refused: {error}") from error
    except BotoCoreError as error:
        raise ToolError(f"CloudFormation cannot be reached: {error}") from error


def require_no_fewer_shards(stage: StageSettings) -> None:
    """Check that `ready_shards` covers every partition with jobs of the stage. Raises ToolError.

    Jobs stay in their partition, and workers query the first `ready_shards` partitions only.
    """
    tables = botocore.session.get_session().create_client("dynamodb", config=AWS_CONFIG)
    try:
        arn = tables.describe_table(TableName=JOBS.name(stage.prefix))["Table"]["TableArn"]
        pages = tables.get_paginator("list_tags_of_resource").paginate(ResourceArn=arn)
        tags = {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}
    except tables.exceptions.ResourceNotFoundException:
        return
    except ClientError as error:
        raise ToolError(f"DynamoDB refused: {error}") from error
    except BotoCoreError as error:
        raise ToolError(f"DynamoDB cannot be reached: {error}") from error
    used = tags.get(READY_SHARDS_TAG, "1")
    if not used.isdecimal():
        raise ToolError(f"tag {READY_SHARDS_TAG} of {arn} is {used!r}. Set the number of partitions that contain jobs.")
    if stage.ready_shards < int(used):
        raise ToolError(
            f"ready_shards: stage {stage.name!r} has jobs in {used} partitions; with {stage.ready_shards} no worker"
            f" would find the jobs of the other partitions. Use -c ready_shards={used} or more."
        )


def install() -> None:
    """Install the command line of the lock file, unless installed. Raises ToolError."""
    TOOLS.mkdir(exist_ok=True)
    # `npm ci` first removes the installed files, which another command may be running or installing, hence the lock.
    with (TOOLS / "installing").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install()


def _install() -> None:
    lock = (HERE / "package-lock.json").read_text()
    installed = TOOLS / "installed-lock.json"
    if CLI.exists() and installed.exists() and installed.read_text() == lock:
        return
    (TOOLS / "package.json").write_text((HERE / "package.json").read_text())
    (TOOLS / "package-lock.json").write_text(lock)
    try:
        install_locked(TOOLS)
    except NpmError as error:
        raise ToolError(f"the CDK command line could not be installed from npm: {error}") from error
    # Written last, so that an interrupted installation starts again.
    installed.write_text(lock)


def _context(given: list[str]) -> dict[str, str]:
    context = {}
    for item in given:
        name, sign, value = item.partition("=")
        if not sign:
            raise StageSettingsError(f"-c {item}: is not NAME=VALUE.")
        # The names of CDK's own settings contain a colon.
        if name not in SETTINGS and ":" not in name:
            raise StageSettingsError(f"-c {item}: there is no setting {name!r}. Use one of {', '.join(SETTINGS)}.")
        context[name] = value
    return context
