"""Compare the patched Query with ministack's own on random tables, and measure its cost, in the emulator's environment.

`python -m tests.functional.local.ordered_indexes_check SEED QUERIES` prints one line of JSON: how many queries were
compared, how many pages and errors were among them, the first difference (null when there is none), and the seconds
that one Query(Limit=10) takes at 10 and at 10,000 items, patched and not.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import logging
import random
import statistics
import sys
import time
from typing import Any

from functions.local.emulated.indexes import OrderedIndexes
from functions.local.emulated.tables import run_to_completion

KEYS = ("a", "aa", "ab", "b", "ba", "ü", "z")
NUMBERS = ("-3", "0", "1", "1.5", "2", "10", "1000")
TABLE = {
    "TableName": "table",
    "BillingMode": "PAY_PER_REQUEST",
    "KeySchema": [{"AttributeName": "pk", "KeyType": "HASH"}, {"AttributeName": "sk", "KeyType": "RANGE"}],
    "AttributeDefinitions": [
        {"AttributeName": name, "AttributeType": kind}
        for name, kind in (("pk", "S"), ("sk", "N"), ("h", "S"), ("s", "S"), ("n", "N"), ("b", "B"))
    ],
}


def index(name: str, sort: str | None, projection: dict[str, Any]) -> dict[str, Any]:
    schema = [{"AttributeName": "h", "KeyType": "HASH"}]
    if sort:
        schema.append({"AttributeName": sort, "KeyType": "RANGE"})
    return {"IndexName": name, "KeySchema": schema, "Projection": projection}


INDEXES = [
    index("by_s", "s", {"ProjectionType": "KEYS_ONLY"}),
    index("by_n", "n", {"ProjectionType": "ALL"}),
    index("by_b", "b", {"ProjectionType": "INCLUDE", "NonKeyAttributes": ["x"]}),
    index("by_h", None, {"ProjectionType": "ALL"}),
]
SORT = {"by_s": "s", "by_n": "n", "by_b": "b", "by_h": None}


def second_copy() -> Any:
    """Import an unpatched copy of ministack's module."""
    spec = importlib.util.find_spec("ministack.services.dynamodb")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(module: Any, action: str, request: dict[str, Any]) -> tuple[int, Any]:
    headers = {"x-amz-target": f"DynamoDB_20120810.{action}"}
    status, _, body = run_to_completion(module.handle_request("POST", "/", headers, json.dumps(request).encode(), {}))
    return status, json.loads(body)


class Both:
    """The patched and the unpatched module with the same data."""

    def __init__(self, seed: int) -> None:
        from ministack.services import dynamodb

        self.random = random.Random(seed)
        self.plain = second_copy()
        self.patched = dynamodb
        OrderedIndexes(dynamodb).install()
        self.difference: Any = None
        self.compared = self.pages = self.errors = 0

    def write(self, action: str, request: dict[str, Any]) -> None:
        plain, patched = call(self.plain, action, request), call(self.patched, action, request)
        self.compare(action, request, plain, patched)

    def query(self, request: dict[str, Any]) -> None:
        """Compare a query and all its later pages."""
        for _ in range(50):
            plain, patched = call(self.plain, "Query", request), call(self.patched, "Query", request)
            self.compare("Query", request, plain, patched)
            self.compared += 1
            self.errors += plain[0] != 200
            cursor = plain[1].get("LastEvaluatedKey")
            if cursor is None:
                return
            self.pages += 1
            request = {**request, "ExclusiveStartKey": cursor}

    def compare(self, action: str, request: Any, plain: Any, patched: Any) -> None:
        if plain != patched and self.difference is None:
            self.difference = {"action": action, "request": request, "plain": plain, "patched": patched}

    def value(self, attribute: str) -> dict[str, str]:
        choose = self.random.choice
        if attribute == "sk":
            # Canonical only: as a table key, ministack takes 1e3 and 1000 for two items of the same place.
            return {"N": choose(NUMBERS)}
        if attribute == "n":
            return {"N": choose((*NUMBERS, "1e3", "0.50", "1E-2"))}
        if attribute == "b":
            return {"B": base64.b64encode(self.random.choice((b"\x00", b"\x00\xff", b"a", b"ab", b"\xff"))).decode()}
        return {"S": choose(("one", "two")) if attribute == "h" else choose(KEYS)}

    def key(self) -> dict[str, Any]:
        return {"pk": self.value("pk"), "sk": self.value("sk")}

    def item(self) -> dict[str, Any]:
        item = self.key() | {"x": {"N": str(self.random.randrange(100))}, "y": {"S": "y" * self.random.randrange(200)}}
        if self.random.random() < 0.08:
            item["y"] = {"S": "y" * 300_000}  # so that pages also end at 1 MB
        for attribute in ("h", "s", "n", "b"):
            if self.random.random() < 0.8:
                item[attribute] = self.value(attribute)
        return item

    def random_write(self) -> None:
        choice = self.random.random()
        if choice < 0.4:
            self.write("PutItem", {"TableName": "table", "Item": self.item()})
        elif choice < 0.65:
            self.write("UpdateItem", self.update())
        elif choice < 0.75:
            self.write("DeleteItem", {"TableName": "table", "Key": self.key()})
        elif choice < 0.85:
            puts = {json.dumps([item["pk"], item["sk"]]): item for item in (self.item() for _ in range(5))}
            writes = [{"PutRequest": {"Item": item}} for item in puts.values()]
            self.write("BatchWriteItem", {"RequestItems": {"table": writes}})
        else:
            update, put = self.update(), self.item()
            actions = [{"Update": update}]
            if update["Key"] != {"pk": put["pk"], "sk": put["sk"]}:
                condition = self.random.choice(("attribute_exists(pk)", "attribute_not_exists(pk)"))
                actions.append({"Put": {"TableName": "table", "Item": put, "ConditionExpression": condition}})
            self.write("TransactWriteItems", {"TransactItems": actions})

    def update(self) -> dict[str, Any]:
        attribute = self.random.choice(("h", "s", "n", "b", "x"))
        request: dict[str, Any] = {"TableName": "table", "Key": self.key()}
        if self.random.random() < 0.3:
            return {**request, "UpdateExpression": f"REMOVE {attribute}"}
        if attribute == "n" and self.random.random() < 0.5:
            return {**request, "UpdateExpression": "ADD n :v", "ExpressionAttributeValues": {":v": self.value("n")}}
        value = {"N": "7"} if attribute == "x" else self.value(attribute)
        return {**request, "UpdateExpression": f"SET {attribute} = :v", "ExpressionAttributeValues": {":v": value}}

    def random_query(self) -> None:
        name = self.random.choice(list(SORT))
        sort = SORT[name]
        request: dict[str, Any] = {
            "TableName": "table",
            "IndexName": name,
            "ExpressionAttributeValues": {":h": self.value("h")},
        }
        condition = self.random.choice(("h = :h", "#h = :h"))
        if "#h" in condition:
            request["ExpressionAttributeNames"] = {"#h": "h"}
        if sort and self.random.random() < 0.7:
            forms = [f"{sort} {op} :v" for op in ("=", "<", "<=", ">", ">=")]
            forms += [f"{sort} BETWEEN :v AND :w", f":v < {sort}", f":v = {sort}", f"{sort} between :v and :w"]
            if sort != "n":
                forms.append(f"begins_with({sort}, :v)")
            form = self.random.choice(forms)
            condition += f" AND {form}" if self.random.random() < 0.8 else ""
            if condition.endswith(form):
                request["ExpressionAttributeValues"][":v"] = self.value(sort)
                if ":w" in form:
                    request["ExpressionAttributeValues"][":w"] = self.value(sort)
                if self.random.random() < 0.2:
                    condition = form + " AND " + condition.split(" AND ")[0]
        request["KeyConditionExpression"] = condition
        self.add_options(request)
        self.query(request)

    def add_options(self, request: dict[str, Any]) -> None:
        chance = self.random.random
        if chance() < 0.8:
            request["Limit"] = self.random.choice((1, 2, 3, 5, 10, 50))
        if chance() < 0.5:
            request["ScanIndexForward"] = chance() < 0.5
        if chance() < 0.3:
            request["FilterExpression"] = "x > :x"
            request["ExpressionAttributeValues"][":x"] = {"N": "50"}
        option = chance()
        if option < 0.1:
            request["Select"] = "COUNT"
        elif option < 0.2:
            request["ProjectionExpression"] = "pk, x"
        elif option < 0.25:
            request["ReturnConsumedCapacity"] = "INDEXES"
        elif option < 0.3:
            # The old form, which is not narrowed.
            request["KeyConditions"] = {
                "h": {"ComparisonOperator": "EQ", "AttributeValueList": [request["ExpressionAttributeValues"][":h"]]}
            }
            for name in ("KeyConditionExpression", "FilterExpression", "ExpressionAttributeValues"):
                request.pop(name, None)
            request.pop("ExpressionAttributeNames", None)
        elif option < 0.33:
            request["ExclusiveStartKey"] = {
                **self.key(),
                "h": self.value("h"),
                **self.cursor_rest(request["IndexName"]),
            }

    def cursor_rest(self, name: str) -> dict[str, Any]:
        sort = SORT[name]
        return {sort: self.value(sort)} if sort else {}


def timing(module: Any, items: int) -> float:
    """Measure the median seconds of a Query(Limit=10) on a partition of a given size, between writes."""
    name = f"timing-{items}"
    status, answer = call(module, "CreateTable", {**TABLE, "TableName": name, "GlobalSecondaryIndexes": INDEXES})
    assert status == 200, answer
    for number in range(items):
        item = {
            "pk": {"S": f"p{number:06}"},
            "sk": {"N": "1"},
            "h": {"S": "one"},
            "s": {"S": f"{number * 7919 % items:06}"},
        }
        call(module, "PutItem", {"TableName": name, "Item": item})
    request = {
        "TableName": name,
        "IndexName": "by_s",
        "Limit": 10,
        "KeyConditionExpression": "h = :h",
        "ExpressionAttributeValues": {":h": {"S": "one"}},
    }
    seconds = []
    for number in range(6):
        moved = {"pk": {"S": f"p{number % items:06}"}, "sk": {"N": "1"}, "h": {"S": "one"}, "s": {"S": f"m{number}"}}
        call(module, "PutItem", {"TableName": name, "Item": moved})
        started = time.perf_counter()
        status, answer = call(module, "Query", request)
        seconds.append(time.perf_counter() - started)
        assert (status, answer["Count"]) == (200, 10)
    return statistics.median(seconds[1:])


def main(seed: int, queries: int) -> None:
    logging.disable(logging.CRITICAL)
    both = Both(seed)
    for module in (both.plain, both.patched):
        status, answer = call(module, "CreateTable", {**TABLE, "GlobalSecondaryIndexes": INDEXES})
        assert status == 200, answer
    while both.compared < queries and both.difference is None:
        for _ in range(both.random.randrange(4)):
            both.random_write()
        both.random_query()
    result = {
        "compared": both.compared,
        "pages": both.pages,
        "errors": both.errors,
        "items": sum(len(found) for found in both.plain._tables.get("table")["items"].values()),
        "difference": both.difference,
        "patched_s": {items: timing(both.patched, items) for items in (10, 10_000)},
        "plain_s": {items: timing(both.plain, items) for items in (10, 10_000)},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
