"""The pinned CDK command line, on the Node of the environment; and the first key.

`--stage NAME` and `-c name=value` set what cdk/stage.py describes; whatever else is given goes to the CDK command line.
`admin-key` prints a key of scope `admin`, with which `POST /keys` makes all others. `check-store` tries the stage's own
object store; `deploy` does that too, and goes no further with one that fails.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NotConnectedError

from cdk import NODE
from cdk.stage import READY_SHARDS_TAG, Stage, StageError
from cdk.tool.bootstrap_key import NotIssuedError, issue_admin_key
from cdk.tool.npm import NpmError, install_locked
from cdk.tool.store_check import StoreError, require_store
from functions.storage.tables import JOBS

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
TOOLS = ROOT / ".cdk"
"""The command line is installed here; it and its output, a folder for each stage, are ignored by git."""
CLI = TOOLS / "node_modules" / "aws-cdk" / "bin" / "cdk"
COMMANDS = ("synth", "diff", "deploy", "destroy", "bootstrap", "admin-key", "check-store")
USAGE_ERROR = 2
INTERRUPTED = 130
PATIENCE = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2})


class ToolError(Exception):
    """Cannot go on; the message says what to do about it."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit status, or 2 with one line when something is missing."""
    parser = argparse.ArgumentParser(prog="python -m cdk", description="The deployable stack.")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--stage", default="dev", help="name of the deployment (default: dev)")
    parser.add_argument("-c", "--context", action="append", default=[], metavar="NAME=VALUE", help="see cdk/stage.py")
    parser.add_argument("--tenant", default="default", help="whose key admin-key makes (default: default)")
    given, rest = parser.parse_known_args(arguments)
    try:
        context = {"stage": given.stage, **_context(given.context)}
        stage = Stage.from_context(context)
        if said := prepare(given.command, stage, given.tenant):
            sys.stdout.write(f"{said}\n")
            return 0
    except (StageError, ToolError, NotIssuedError, StoreError) as error:
        sys.stderr.write(f"baton: {error}\n")
        return USAGE_ERROR
    return run(given.command, stage.name, context, rest)


def prepare(command: str, stage: Stage, tenant: str) -> str:
    """See to what a command needs; what to print instead of going on, if that was all. Raises the errors above."""
    if command != "synth":
        require_account()
    if command == "admin-key":
        return issue_admin_key(stage, tenant)
    if command == "deploy":
        require_no_fewer_shards(stage)
    if command in ("deploy", "check-store"):
        require_store(stage)
    if command == "check-store":
        return "The object store may be used." if stage.has_own_store else "The buckets are AWS's."
    if command == "destroy":
        require_deployed(stage)
    install()
    return ""


def run(command: str, stage: str, context: dict[str, str], more: list[str]) -> int:
    """Hand one command to the CDK command line, with the outputs of a deployment in `.cdk/<stage>.json`."""
    # Each stage has a folder of its own: while one is deployed the others can be.
    line = [str(NODE), str(CLI), command, "--app", f'"{sys.executable}" -m cdk.app']
    line += ["--output", str(TOOLS / "out" / stage)]
    for name, value in context.items():
        line += ["--context", f"{name}={value}"]
    if command == "synth":
        line += ["--quiet"]
    if command == "deploy":
        # Tables outlive a stack that is destroyed, and a first deployment that failed: the next one takes them over.
        line += ["--outputs-file", str(TOOLS / f"{stage}.json"), "--import-existing-resources"]
    environment = {**os.environ, "JSII_NODE": str(NODE), "CDK_DISABLE_CLI_TELEMETRY": "1"}
    again = f"`python -m cdk {command} --stage {stage}` again goes on from where it is"
    try:
        status = subprocess.run([*line, "--no-notices", *more], cwd=ROOT, env=environment, check=False).returncode
    except KeyboardInterrupt:
        sys.stderr.write(f"baton: interrupted. AWS ends what it had begun; {again}.\n")
        return INTERRUPTED
    if status:
        sys.stderr.write(
            f"baton: {command} of stage {stage!r} failed for the reason above; once it is mended, {again}.\n"
        )
    return status


def require_account() -> None:
    """Credentials that AWS takes and a region, from where AWS's tools look for them. Raises ToolError."""
    session = botocore.session.get_session()
    try:
        credentials = session.get_credentials()
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    except BotoCoreError as error:
        raise ToolError(f"AWS's settings cannot be used: {error}") from error
    if credentials is None:
        raise ToolError("no AWS credentials. Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.")
    if not region:
        raise ToolError("no AWS region. Set AWS_REGION, or `region` in the profile.")
    partitions = session.get_available_partitions()
    known = [name for partition in partitions for name in session.get_available_regions("lambda", partition)]
    if region not in known:
        raise ToolError(f"{region!r} is no AWS region with Lambda. Use one of {', '.join(known)}.")
    # Our own clients look at this name only, the CDK command line at both.
    os.environ["AWS_DEFAULT_REGION"] = region
    try:
        session.create_client("sts", region_name=region, config=PATIENCE).get_caller_identity()
    except ClientError as error:
        raise ToolError(f"AWS refuses these credentials: {error.response['Error'].get('Message') or error}") from error
    except (HTTPClientError, NotConnectedError) as error:
        raise ToolError(f"AWS cannot be reached: {error}") from error
    except BotoCoreError as error:
        raise ToolError(f"AWS's settings cannot be used: {error}") from error


def require_deployed(stage: Stage) -> None:
    """The stage's stack, whole or in part. Raises ToolError: destroying what is not there looks like success."""
    cloud = botocore.session.get_session().create_client("cloudformation", config=PATIENCE)
    try:
        cloud.describe_stacks(StackName=f"baton-{stage.name}")
    except ClientError as error:
        if "does not exist" in str(error):
            raise ToolError(f"stage {stage.name!r} is not deployed in this account and region.") from error
        raise ToolError(f"CloudFormation refused: {error}") from error
    except BotoCoreError as error:
        raise ToolError(f"CloudFormation cannot be reached: {error}") from error


def require_no_fewer_shards(stage: Stage) -> None:
    """At least the `ready_shards` that the stage's jobs have been spread over. Raises ToolError.

    Jobs stay in their partition, and workers look for them in the first `ready_shards` only.
    """
    tables = botocore.session.get_session().create_client("dynamodb", config=PATIENCE)
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
    spread = tags.get(READY_SHARDS_TAG, "1")
    if not spread.isdecimal():
        raise ToolError(
            f"tag {READY_SHARDS_TAG} of {arn} is {spread!r}. Set the number of partitions that jobs lie in."
        )
    if stage.ready_shards < int(spread):
        raise ToolError(
            f"ready_shards: stage {stage.name!r} has jobs in {spread} partitions; with {stage.ready_shards} no worker"
            f" would find those of the others. Use -c ready_shards={spread} or more."
        )


def install() -> None:
    """The pinned command line, as the lock file says; does nothing when it is there. Raises ToolError."""
    TOOLS.mkdir(exist_ok=True)
    # One at a time: `npm ci` begins by removing what another command would be running, or installing.
    with (TOOLS / "installing").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
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
    # Last: what was interrupted before is begun anew.
    installed.write_text(lock)


def _context(given: list[str]) -> dict[str, str]:
    names = [field.name for field in fields(Stage) if field.name != "name"]
    context = {}
    for item in given:
        name, sign, value = item.partition("=")
        if not sign:
            raise StageError(f"-c {item}: is not NAME=VALUE.")
        # CDK's own settings have a colon in their names.
        if name not in names and ":" not in name:
            raise StageError(f"-c {item}: there is no setting {name!r}. Use one of {', '.join(names)}.")
        context[name] = value
    return context
