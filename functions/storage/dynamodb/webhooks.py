"""Store webhooks and their deliveries in DynamoDB."""

from __future__ import annotations

from typing import Any

from functions.domain import table_keys
from functions.domain.ports import ResultPage
from functions.domain.webhooks import Delivery, Webhook
from functions.storage.dynamodb.items.attribute_values import Item, number
from functions.storage.dynamodb.items.documents import dump, load
from functions.storage.dynamodb.reads import get_item, query
from functions.storage.failures import failures_translated
from functions.storage.paging import deliveries_list, page
from functions.storage.tables import WEBHOOKS

DELIVERY_RETENTION_S = 30 * 86_400
MAX_FOUND = 100
"""Webhooks of a tenant that one query reads, far more than the API allows."""


class DynamoWebhookStore:
    """WebhookStore over a low-level DynamoDB client."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = WEBHOOKS.name(prefix)

    def put(self, webhook: Webhook) -> None:
        self._put({**_key(webhook.tenant, webhook.id), "doc": {"S": dump(webhook)}})

    def get(self, tenant: str, webhook_id: str) -> Webhook | None:
        item = get_item(self._client, self._table, _key(tenant, webhook_id))
        return load(Webhook, item["doc"]["S"]) if item else None

    def of_tenant(self, tenant: str) -> list[Webhook]:
        items = query(
            self._client,
            self._table,
            MAX_FOUND,
            KeyConditionExpression="pk = :pk",
            ExpressionAttributeValues={":pk": {"S": table_keys.webhooks_pk(tenant)}},
            ConsistentRead=True,
        )
        return [load(Webhook, item["doc"]["S"]) for item in items]

    def delete(self, tenant: str, webhook_id: str) -> bool:
        with failures_translated():
            answer = self._client.delete_item(
                TableName=self._table, Key=_key(tenant, webhook_id), ReturnValues="ALL_OLD"
            )
        return bool(answer.get("Attributes"))

    def record(self, delivery: Delivery) -> None:
        self._put(
            {
                "pk": {"S": table_keys.deliveries_pk(delivery.webhook_id)},
                "sk": {"S": table_keys.delivery_sk(*delivery.place)},
                "ttl": number(delivery.last_at + DELIVERY_RETENTION_S),
                "doc": {"S": dump(delivery)},
            }
        )

    def deliveries(self, webhook_id: str, *, limit: int, cursor: str | None = None) -> ResultPage[Delivery]:
        listed = deliveries_list(webhook_id)
        position = listed.position(cursor)
        partition = {"S": table_keys.deliveries_pk(webhook_id)}
        start: Item | None = None
        if position is not None:
            at, job_id, seq = int(position[0]), str(position[1]), int(position[2])
            start = {"pk": partition, "sk": {"S": table_keys.delivery_sk(at, job_id, seq)}}
        items = query(
            self._client,
            self._table,
            limit + 1,
            start,
            KeyConditionExpression="pk = :pk",
            ExpressionAttributeValues={":pk": partition},
            ConsistentRead=True,
            ScanIndexForward=False,
        )
        return page(
            [load(Delivery, item["doc"]["S"]) for item in items], limit, listed, lambda delivery: delivery.place
        )

    def _put(self, item: Item) -> None:
        with failures_translated():
            self._client.put_item(TableName=self._table, Item=item)


def _key(tenant: str, webhook_id: str) -> Item:
    return {"pk": {"S": table_keys.webhooks_pk(tenant)}, "sk": {"S": webhook_id}}
