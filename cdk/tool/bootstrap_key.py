"""The first key of a deployment: made with the rights of whoever deploys, for nobody has a key yet."""

from __future__ import annotations

import re
import time

from botocore.exceptions import BotoCoreError, ClientError

from baton.contract.names import Scope
from cdk.stage import Stage, StageError
from functions.api.admin.keys import new_key
from functions.domain.errors import StorageUnavailable
from functions.handlers.wiring import SystemRandomness
from functions.storage.clients import dynamodb_client
from functions.storage.dynamodb.tokens import DynamoTokenStore

TENANT_NAME = r"[a-z0-9][a-z0-9-]{0,31}"
"""A tenant's name begins its objects' keys and its jobs' partitions."""


class NotIssuedError(Exception):
    """The key could not be stored; the message says why."""


def issue_admin_key(stage: Stage, tenant: str) -> str:
    """Store a key of scope `admin` for a tenant; the whole key, which nobody can read again.

    Raises:
        StageError: That is no tenant's name.
        NotIssuedError: The stage is not deployed, or AWS refused.
    """
    if not re.fullmatch(TENANT_NAME, tenant):
        raise StageError(f"tenant: {tenant!r} is no tenant's name. Use lower-case letters, digits, dashes.")
    key, whole = new_key(
        SystemRandomness(),
        tenant=tenant,
        name="first key",
        scopes=[Scope.ADMIN],
        now=int(time.time()),
        expires_at=None,
    )
    try:
        DynamoTokenStore(dynamodb_client(), stage.prefix).put_key(key)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code == "ResourceNotFoundException":
            raise NotIssuedError(f"stage {stage.name!r} is not deployed in this account and region.") from error
        raise NotIssuedError(f"DynamoDB refused: {error}") from error
    except (BotoCoreError, StorageUnavailable) as error:
        raise NotIssuedError(f"DynamoDB cannot be reached: {error}") from error
    return whole
