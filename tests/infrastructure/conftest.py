"""Fixtures: the template, synthesized once in ten seconds and without a bundle; the tool in this process."""

from __future__ import annotations

import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import pytest
from aws_cdk import App
from aws_cdk.assertions import Template

import cdk  # noqa: F401 - before aws_cdk: it says which Node runs it
from cdk.app import build
from cdk.tool import command_line

NO_BUNDLING = {"aws:cdk:bundling-stacks": []}


def template_of(**context: str) -> dict[str, Any]:
    """Synthesize the CloudFormation template for the given settings."""
    app = App(context={**NO_BUNDLING, "stage": "test", **context})
    return Template.from_stack(build(app)).to_json()


@pytest.fixture(scope="session")
def template() -> dict[str, Any]:
    return template_of()


def of_type(template: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Return the resources of a type by logical id."""
    return {name: made for name, made in template["Resources"].items() if made["Type"] == kind}


def run_here(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the tool in this process, without other AWS settings than these: a process of its own starts for a second."""
    said, complained = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(complained):
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in {"AWS_EC2_METADATA_DISABLED": "true", **environment}.items():
            patch.setenv(name, value)
        code = command_line.main(list(arguments))
    return subprocess.CompletedProcess(arguments, code, said.getvalue(), complained.getvalue())
