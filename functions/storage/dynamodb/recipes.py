"""Store tenants' recipes in DynamoDB."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError

from functions.domain import table_keys
from functions.domain.ports import ResultPage
from functions.domain.records import RecipeEntry, StoredRecipe
from functions.storage.dynamodb.items.attribute_values import Item
from functions.storage.dynamodb.items.documents import dump, load
from functions.storage.dynamodb.reads import get_item, query
from functions.storage.failures import error_code, failures_translated
from functions.storage.paging import page, recipes_list
from functions.storage.tables import RECIPES


class DynamoRecipeStore:
    """RecipeStore over a low-level DynamoDB client."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = RECIPES.name(prefix)

    def add(self, recipe: StoredRecipe) -> bool:
        item = {
            **_key(recipe.tenant, recipe.name, recipe.version),
            "doc": {"S": dump(recipe)},
            "document": {"S": recipe.document},
        }
        try:
            with failures_translated():
                self._client.put_item(TableName=self._table, Item=item, ConditionExpression="attribute_not_exists(pk)")
        except ClientError as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise
            return False
        return True

    def get(self, tenant: str, name: str, version: int) -> StoredRecipe | None:
        item = get_item(self._client, self._table, _key(tenant, name, version))
        if item is None:
            return None
        entry = load(RecipeEntry, item["doc"]["S"])
        return StoredRecipe(**entry.model_dump(), document=item["document"]["S"])

    def list(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[RecipeEntry]:
        listed = recipes_list(tenant)
        position = listed.position(cursor)
        start = None if position is None else _key(tenant, str(position[0]), int(position[1]))
        items = query(
            self._client,
            self._table,
            limit + 1,
            start,
            KeyConditionExpression="pk = :pk",
            ExpressionAttributeValues={":pk": {"S": table_keys.recipes_pk(tenant)}},
            ProjectionExpression="doc",
            ConsistentRead=True,
        )
        found = [load(RecipeEntry, item["doc"]["S"]) for item in items]
        return page(found, limit, listed, lambda entry: (entry.name, entry.version))


def _key(tenant: str, name: str, version: int) -> Item:
    return {"pk": {"S": table_keys.recipes_pk(tenant)}, "sk": {"S": table_keys.recipe_sk(name, version)}}
