"""Fixtures: the template of the stack, synthesized once and without a bundle."""

from __future__ import annotations

from typing import Any

import pytest
from aws_cdk import App
from aws_cdk.assertions import Template

import cdk  # noqa: F401 - before aws_cdk: it says which Node runs it
from cdk.app import build

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
