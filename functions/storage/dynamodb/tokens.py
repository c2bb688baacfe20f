"""Store API keys and transfer tokens in DynamoDB, as digests only."""

from __future__ import annotations

from botocore.exceptions import ClientError

from baton.contract.names import KeyKind
from functions.domain import table_keys
from functions.domain.access.api_keys import ApiKey
from functions.domain.errors import WriteConflict
from functions.domain.ports import ResultPage
from functions.domain.records import TransferGrant
from functions.storage.dynamodb.api_keys import DynamoKeyReader, document, from_item
from functions.storage.dynamodb.items.attribute_values import Item, number
from functions.storage.dynamodb.items.documents import dump, load
from functions.storage.dynamodb.reads import get_item, query
from functions.storage.failures import error_code, failures_translated
from functions.storage.paging import keys_list, page

KEY_RETENTION_S = 30 * 86_400
"""TTL of an API key after its expiry, so that the API can answer "expired" instead of "unknown"."""

GRANT_RETENTION_S = 86_400
SESSION_RETENTION_S = 3600
"""TTL of links, sessions and tokens after their expiry: each sign-in leaves a session in the list of keys. The session
must outlive its link, whose second use meets the session's record."""


class DynamoTokenStore(DynamoKeyReader):
    """TokenStore over a low-level DynamoDB client."""

    def put_key(self, key: ApiKey) -> None:
        self._put_key(key, "attribute_not_exists(pk)")

    def list_keys(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[ApiKey]:
        listed = keys_list(tenant)
        position = listed.position(cursor)
        start: Item | None = None
        if position is not None:
            created_at, key_id = int(position[0]), str(position[1])
            start = {
                "tenant": {"S": tenant},
                "created_sk": {"S": table_keys.created_sk(created_at, key_id)},
                "pk": {"S": table_keys.api_key_pk(key_id)},
            }
        items = query(
            self._client,
            self._table,
            limit + 1,
            start,
            IndexName="keys_by_tenant",
            KeyConditionExpression="tenant = :tenant",
            ExpressionAttributeValues={":tenant": {"S": tenant}},
        )
        found = [from_item(item) for item in items]
        return page(found, limit, listed, lambda key: (key.created_at, key.id))

    def replace_key(self, key: ApiKey) -> None:
        unrevoked = "" if key.revoked_at is not None else " AND attribute_not_exists(revoked_at)"
        self._put_key(key, f"attribute_exists(pk){unrevoked}")

    def put_grant(self, grant: TransferGrant) -> None:
        item = {
            "pk": {"S": table_keys.grant_pk(grant.token_sha256)},
            "purpose": {"S": grant.purpose},
            "expires_at": number(grant.expires_at),
            "ttl": number(grant.expires_at + GRANT_RETENTION_S),
            "doc": {"S": dump(grant)},
        }
        with failures_translated():
            self._client.put_item(TableName=self._table, Item=item)

    def get_grant(self, token_sha256: str) -> TransferGrant | None:
        item = self._item(table_keys.grant_pk(token_sha256))
        return load(TransferGrant, item["doc"]["S"]) if item else None

    def redeem(self, token_sha256: str, now: int) -> TransferGrant | None:
        try:
            with failures_translated():
                answer = self._client.delete_item(
                    TableName=self._table,
                    Key={"pk": {"S": table_keys.grant_pk(token_sha256)}},
                    ConditionExpression="purpose = :download AND expires_at > :now",
                    ExpressionAttributeValues={":download": {"S": "download"}, ":now": number(now)},
                    ReturnValues="ALL_OLD",
                )
        except ClientError as error:
            if error_code(error) == "ConditionalCheckFailedException":
                return None
            raise
        return load(TransferGrant, answer["Attributes"]["doc"]["S"])

    def _put_key(self, key: ApiKey, condition: str) -> None:
        item: Item = {
            "pk": {"S": table_keys.api_key_pk(key.id)},
            "doc": {"S": document(key)},
        }
        if key.listed:
            item["tenant"] = {"S": key.tenant}
            item["created_sk"] = {"S": table_keys.created_sk(key.created_at, key.id)}
        if key.revoked_at is not None:
            item["revoked_at"] = number(key.revoked_at)
        if key.expires_at is not None:
            lasting = key.kind in (None, KeyKind.SHARE)
            item["ttl"] = number(key.expires_at + (KEY_RETENTION_S if lasting else SESSION_RETENTION_S))
        try:
            with failures_translated():
                self._client.put_item(TableName=self._table, Item=item, ConditionExpression=condition)
        except ClientError as error:
            if error_code(error) == "ConditionalCheckFailedException":
                raise WriteConflict from error
            raise

    def _item(self, pk: str) -> Item | None:
        return get_item(self._client, self._table, {"pk": {"S": pk}})
