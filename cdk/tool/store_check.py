"""Check of the stage's own object store before a deployment."""

from __future__ import annotations

from botocore.exceptions import BotoCoreError, ClientError

from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from cdk.stage import DEFAULT_STORE_REGION, StageSettings
from functions.domain.errors import StorageUnavailable
from functions.storage.clients import s3_client
from functions.storage.s3.objects import S3ObjectStore
from functions.storage.s3.store_conformance import missing_of_multipart, missing_promises
from functions.storage.s3.store_secret import StoreSecretError, read_secret


class StoreError(Exception):
    """The store is unusable; the message contains the reason."""


def require_store(stage: StageSettings) -> None:
    """Try the operations of workers and functions on the store; no effect without a store of the stage's own.

    Raises:
        StoreError: The secret, a bucket or the store is missing, or the store breaks a promise that Baton relies on.
    """
    if not stage.has_own_store:
        return
    access_key_id, secret_access_key = _credentials(stage.s3_secret)
    client = s3_client(
        stage.s3_endpoint,
        region=stage.s3_region or DEFAULT_STORE_REGION,
        aws_access_key_id=access_key_id,
        aws_secret_access_key=secret_access_key,
    )
    buckets = {DATA_BUCKET: stage.data_bucket, CHECKPOINTS_BUCKET: stage.checkpoints_bucket}
    objects = S3ObjectStore(client, client, buckets)
    for bucket, physical_name in buckets.items():
        place = f"s3_endpoint: {stage.s3_endpoint}, bucket {physical_name}"
        try:
            missing = missing_promises(objects, bucket)
            missing_multipart = missing_of_multipart(objects, bucket) if stage.s3_multipart and not missing else []
        except ClientError as error:
            raise StoreError(f"{place}: refused: {error}") from error
        except (StorageUnavailable, BotoCoreError, OSError) as error:
            raise StoreError(f"{place}: cannot be reached: {error}") from error
        if missing:
            raise StoreError(f"{place}: {'; '.join(missing)}. Checkpoints would not be safe there.")
        if missing_multipart:
            raise StoreError(
                f"{place}: {'; '.join(missing_multipart)}. The store cannot take large files in parts. "
                "Use -c s3_multipart=false: each large file is then one upload."
            )


def _credentials(secret: str) -> tuple[str, str]:
    try:
        return read_secret(secret)
    except StoreSecretError as error:
        raise StoreError(f"s3_secret: {error}") from error
    except ClientError as error:
        raise StoreError(f"s3_secret: Secrets Manager refused to read {secret!r}: {error}") from error
    except BotoCoreError as error:
        raise StoreError(f"s3_secret: Secrets Manager cannot be reached: {error}") from error
