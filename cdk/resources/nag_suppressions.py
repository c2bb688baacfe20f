"""What cdk-nag finds and we keep, each with the reason. Anything else that it finds stops the synthesis."""

from __future__ import annotations

from typing import cast

from aws_cdk import Acknowledgment, CfnElement, Stack, Validations
from constructs import Construct, IConstruct

RUNTIME = "Python 3.13 is the newest that our tests can run on; a newer one comes when they can."
ACCESS_LOGS = (
    "A log of every GET and PUT would cost more than the requests. Who may read is decided by the API, which logs each"
    " call with its key; CloudTrail's data events can be switched on where the law asks for more."
)
OBJECTS = (
    "Tenants and jobs come and go while the stack stands, so a role cannot name their prefixes. The function puts the"
    " tenant of the key before every object key, and signs URLs for single objects only."
)
VERSIONS = "Made by CDK's schedule target: it may invoke the versions of the one function it names."
DEAD_LETTERS = "This is where dead letters end: an alarm tells of them, and somebody looks."
HEALTH = "GET /health says nothing but that the service lives, to whoever looks after it."


def acknowledge(construct: IConstruct, rule: str, reason: str) -> None:
    """Keep one finding of cdk-nag on one construct and what is below it."""
    Validations.of(construct).acknowledge(Acknowledgment(id=f"AwsSolutions::AwsSolutions-{rule}", reason=reason))


def acknowledge_wildcard(role: IConstruct, owner: Construct, suffix: str, reason: str) -> None:
    """Keep that a role's policy names `<ARN of owner><suffix>`, which ends with a wildcard."""
    stack = Stack.of(owner)
    logical_id = stack.resolve(stack.get_logical_id(cast(CfnElement, owner.node.default_child)))
    acknowledge(role, f"IAM5[Resource::<{logical_id}.Arn>{suffix}]", reason)
