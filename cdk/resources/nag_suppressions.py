"""Accepted findings of cdk-nag, each with a reason. Any other finding stops the synthesis."""

from __future__ import annotations

from typing import cast

from aws_cdk import Acknowledgment, CfnElement, Stack, Validations
from constructs import Construct, IConstruct

RUNTIME = "Python 3.13 is the newest version that the tests support."
ACCESS_LOGS = (
    "A log of every GET and PUT would cost more than the requests. The API decides the permission to read and logs each"
    " call with its key; CloudTrail's data events can be enabled if the law requires more."
)
OBJECTS = (
    "Tenants and jobs change during the life of the stack, so a role cannot name their prefixes. The function prefixes"
    " every object key with the tenant of the API key, and signs URLs for single objects only."
)
VERSIONS = "CDK's schedule target creates this permission to invoke the versions of one function."
DEAD_LETTERS = "A queue of dead letters has no further queue: an alarm reports its messages."
UNGUARDED = (
    "GET /health reports to monitoring only that the service is alive. The calls of the console's sessions verify a"
    " one-time code, a key or a cookie themselves, because a browser that signs in has no key for the authorizer. The"
    " console's files are the same for everyone and contain no data."
)


def acknowledge(construct: IConstruct, rule: str, reason: str) -> None:
    """Accept one finding of cdk-nag on a construct and its children."""
    Validations.of(construct).acknowledge(Acknowledgment(id=f"AwsSolutions::AwsSolutions-{rule}", reason=reason))


def acknowledge_wildcard(role: IConstruct, owner: Construct, suffix: str, reason: str) -> None:
    """Accept `<ARN of owner><suffix>`, which ends with a wildcard, in the policy of a role."""
    stack = Stack.of(owner)
    logical_id = stack.resolve(stack.get_logical_id(cast(CfnElement, owner.node.default_child)))
    acknowledge(role, f"IAM5[Resource::<{logical_id}.Arn>{suffix}]", reason)
