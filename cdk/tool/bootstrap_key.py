"""The first admin key of a deployment, stored with the deployer's AWS credentials, since no API key exists yet."""

from __future__ import annotations

import re
import time

from botocore.exceptions import BotoCoreError, ClientError

from baton.contract.names import Scope
from cdk.stage import StageSettings, StageSettingsError
from functions.api.admin.keys import generate_key
from functions.domain.errors import StorageUnavailable
from functions.handlers.wiring import SystemRandomness
from functions.storage.clients import dynamodb_client
from functions.storage.dynamodb.tokens import DynamoTokenStore

TENANT_NAME = r"[a-z0-9][a-z0-9-]{0,31}"
"""Pattern of a tenant's name, which is part of object keys and of partition keys."""


class NotIssuedError(Exception):
    """The key could not be stored; the message contains the reason."""


def issue_admin_key(stage: StageSettings, tenant: str) -> str:
    """Store a key of scope `admin` for a tenant; return the key, which cannot be read again.

    Raises:
        StageSettingsError: The name of the tenant is invalid.
        NotIssuedError: The stage is not deployed, or AWS refused the request.
    """
    if not re.fullmatch(TENANT_NAME, tenant):
        raise StageSettingsError(f"tenant: {tenant!r} is no valid tenant name. Use lower-case letters, digits, dashes.")
    record, key = generate_key(
        SystemRandomness(),
        tenant=tenant,
        name="first key",
        scopes=[Scope.ADMIN],
        now=int(time.time()),
        expires_at=None,
    )
    try:
        DynamoTokenStore(dynamodb_client(), stage.prefix).put_key(record)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code == "ResourceNotFoundException":
            raise NotIssuedError(f"stage {stage.name!r} is not deployed in this account and region.") from error
        raise NotIssuedError(f"DynamoDB refused: {error}") from error
    except (BotoCoreError, StorageUnavailable) as error:
        raise NotIssuedError(f"DynamoDB cannot be reached: {error}") from error
    return key
