"""The stage's own object store, looked at before anything is deployed that would trust it."""

from __future__ import annotations

from botocore.exceptions import BotoCoreError, ClientError

from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from cdk.stage import DEFAULT_STORE_REGION, Stage
from functions.domain.errors import StorageUnavailable
from functions.storage.clients import s3_client
from functions.storage.s3.objects import S3ObjectStore
from functions.storage.s3.store_conformance import missing_of_multipart, missing_promises
from functions.storage.s3.store_secret import StoreSecretError, read_secret


class StoreError(Exception):
    """The store cannot be used; the message says what is wrong with it."""


def require_store(stage: Stage) -> None:
    """Do with the store what workers and functions will do. Nothing to do where the stage has none of its own.

    Raises:
        StoreError: The secret, a bucket or the store is not there, or the store does not keep what it is trusted with.
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
            lacking = missing_of_multipart(objects, bucket) if stage.s3_multipart and not missing else []
        except ClientError as error:
            raise StoreError(f"{place}: refused: {error}") from error
        except (StorageUnavailable, BotoCoreError, OSError) as error:
            raise StoreError(f"{place}: cannot be reached: {error}") from error
        if missing:
            raise StoreError(f"{place}: {'; '.join(missing)}. Checkpoints would not be safe there.")
        if lacking:
            raise StoreError(
                f"{place}: {'; '.join(lacking)}. Large files cannot go up in parts there. "
                "Use -c s3_multipart=false: each is then one upload."
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
