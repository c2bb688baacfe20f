"""The stack's template, synthesised once, without bundling the code."""

from __future__ import annotations

from typing import Any

import pytest
from aws_cdk import App
from aws_cdk.assertions import Template

import cdk  # noqa: F401 - before aws_cdk: it says which Node runs it
from cdk.app import build

NO_BUNDLING = {"aws:cdk:bundling-stacks": []}


def template_of(**context: str) -> dict[str, Any]:
    """The CloudFormation template with these settings."""
    app = App(context={**NO_BUNDLING, "stage": "test", **context})
    return Template.from_stack(build(app)).to_json()


@pytest.fixture(scope="session")
def template() -> dict[str, Any]:
    return template_of()


def of_type(template: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Resources of a type by logical id: the whole resource, `Properties` and policies."""
    return {name: made for name, made in template["Resources"].items() if made["Type"] == kind}
