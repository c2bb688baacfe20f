"""Atomicity and durability of ministack's DynamoDB against background work and `kill -9`.

Every request and every sweep of expired items runs under one lock. The patch collects the items that a request stores
and removes, and appends them to the journal as one line before the answer. The journal contains items instead of
requests, so replay needs no clock, conditions or randomness. Other changes (tables, TTL settings, tags, backups) are
rare and take a snapshot.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from .journal import Journal

logger = logging.getLogger("baton.tables")

Response = tuple[int, dict[str, str], bytes]

# The state of the module by attribute name, without stream records: each start begins with an empty stream.
STORES = (
    "_tables",
    "_tags",
    "_ttl_settings",
    "_pitr_settings",
    "_kinesis_destinations",
    "_contributor_insights",
    "_backups",
    "_resource_policies",
    "_exports",
    "_imports",
    "_txn_idempotency",
)
ITEM_WRITES = frozenset(
    (
        "PutItem",
        "UpdateItem",
        "DeleteItem",
        "BatchWriteItem",
        "TransactWriteItems",
        "ExecuteStatement",
        "BatchExecuteStatement",
        "ExecuteTransaction",
    )
)
READS = frozenset(
    (
        "GetItem",
        "BatchGetItem",
        "TransactGetItems",
        "Query",
        "Scan",
        "SearchVectors",
        "DescribeTable",
        "ListTables",
        "DescribeTimeToLive",
        "DescribeContinuousBackups",
        "DescribeEndpoints",
        "DescribeLimits",
        "ListTagsOfResource",
    )
)
EXIT_LOST_WRITE = 74  # EX_IOERR


class DurableTables:
    """Patch of the dynamodb module. `journal` None keeps the state in memory only."""

    def __init__(
        self,
        dynamodb: Any,
        journal: Journal | None,
        *,
        stop: Callable[[str], NoReturn] | None = None,
    ) -> None:
        self._dynamodb = dynamodb
        self._journal = journal
        self._stop = stop or stop_at_once
        self._lock = threading.RLock()
        self._effects: list[list[Any]] = []
        self._tokens: list[list[Any]] = []
        self._known: set[str] = set()
        self._needs_snapshot = False
        self._set_item: Callable[..., Any] = dynamodb._set_item
        self._remove_item: Callable[..., Any] = dynamodb._remove_item

    def install(self) -> None:
        """Install the lock and, with a journal, the collecting hooks; restore the state of the journal.

        Raises JournalDamagedError, and RuntimeError if this version of ministack keeps state that STORES lacks.
        """
        module = self._dynamodb
        unsaved = {f"_{name}" for name in module.get_state()} - set(STORES)
        if unsaved:
            raise RuntimeError(f"this version of ministack keeps DynamoDB state that is not journalled: {unsaved}")
        # The sweep of expired items reads the lock by name each time, so the replaced lock excludes requests.
        module._lock = self._lock
        handle_request = module.handle_request

        async def locked_request(
            method: str, path: str, headers: dict[str, str], body: bytes, query_params: dict[str, Any]
        ) -> Response:
            with self._lock:
                action = headers.get("x-amz-target", "").rpartition(".")[2]
                status = 500
                try:
                    response: Response = run_to_completion(handle_request(method, path, headers, body, query_params))
                    status = response[0]
                    return response
                finally:
                    self._save(other_change=status < 300 and action not in ITEM_WRITES | READS)

        module.handle_request = locked_request
        if self._journal is not None:
            self._hook()
            self._restore(self._journal)

    def close(self) -> None:
        """Take the last snapshot; serve no request afterwards."""
        if self._journal is not None:
            with self._lock:
                self._journal.snapshot(self._state())
                self._journal.close()

    def _hook(self) -> None:
        module = self._dynamodb
        items_replaced, token_store, reset = module._items_replaced, module._txn_token_store, module.reset

        def set_item(table: dict[str, Any], pk: str, sk: str, item: dict[str, Any]) -> Any:
            with self._lock:
                self._effects.append([table_identity(table), pk, sk, item])
                return self._set_item(table, pk, sk, item)

        def remove_item(table: dict[str, Any], pk: str, sk: str) -> Any:
            with self._lock:
                self._effects.append([table_identity(table), pk, sk, None])
                return self._remove_item(table, pk, sk)

        def replaced(table: dict[str, Any]) -> None:
            with self._lock:
                self._needs_snapshot = True
                items_replaced(table)

        def store_token(token: str, entry: dict[str, Any]) -> None:
            with self._lock:
                token_store(token, entry)
                scope = module._txn_idempotency._scoped(token)
                self._tokens.append([*scope, entry])

        def reset_all() -> None:
            with self._lock:
                reset()
                self._needs_snapshot = True
                self._save(other_change=False)

        module._set_item, module._remove_item = set_item, remove_item
        module._items_replaced, module._txn_token_store, module.reset = replaced, store_token, reset_all

    def _save(self, *, other_change: bool) -> None:
        """Save the changes since the last call; stop the process if the save fails."""
        if self._journal is None:
            return
        effects, self._effects = self._effects, []
        tokens, self._tokens = self._tokens, []
        # CloudFormation creates tables without a request; such a table must be saved before its items.
        unknown = any(effect[0] not in self._known for effect in effects)
        try:
            if other_change or self._needs_snapshot or unknown:
                self._needs_snapshot = False
                self._snapshot(self._journal)
            elif effects or tokens:
                self._journal.append({"items": effects, "tokens": tokens})
                if self._journal.is_long:
                    self._snapshot(self._journal)
        except (OSError, TypeError, ValueError) as error:
            # The memory is ahead of the disk, so any further answer would acknowledge writes that a restart loses.
            self._stop(f"DynamoDB state could not be saved ({error}); stopping so that nothing acknowledged is lost")

    def _snapshot(self, journal: Journal) -> None:
        journal.snapshot(self._state())
        self._known = {table_identity(table) for table in self._dynamodb._tables.all_values()}

    def _state(self) -> dict[str, list[list[Any]]]:
        state = {name: [[*key, value] for key, value in self._store(name).all_items()] for name in STORES}
        derived = self._dynamodb._INDEX_MEMBERS
        for entry in state["_tables"]:
            entry[3] = {name: value for name, value in entry[3].items() if name != derived}
        return state

    def _restore(self, journal: Journal) -> None:
        recovered = journal.recover()
        for name, entries in (recovered.state or {}).items():
            for account_id, region, key, value in entries:
                self._store(name).set_scoped(account_id, region, key, value)
        # The module converts tables read from JSON into the types that its handlers expect.
        self._dynamodb._restore_state({"tables": {}})
        tables = {table_identity(table): table for table in self._dynamodb._tables.all_values()}
        for record in recovered.records:
            for table_id, pk, sk, item in record["items"]:
                if item is None:
                    self._remove_item(tables[table_id], pk, sk)
                else:
                    self._set_item(tables[table_id], pk, sk, item)
            for account_id, region, token, entry in record["tokens"]:
                self._dynamodb._txn_idempotency.set_scoped(account_id, region, token, entry)
        self._snapshot(journal)

    def _store(self, name: str) -> Any:
        return getattr(self._dynamodb, name)


def table_identity(table: dict[str, Any]) -> str:
    """Return the identity of a table, different from a later table of the same name."""
    return f"{table['TableArn']}#{table.get('TableId', '')}"


def run_to_completion(call: Coroutine[Any, Any, Response]) -> Response:
    """Run a coroutine that never waits. Raises RuntimeError on a wait, at which requests would interleave."""
    try:
        call.send(None)
    except StopIteration as done:
        response: Response = done.value
        return response
    call.close()
    raise RuntimeError("a DynamoDB handler of this ministack waits; its requests are no longer atomic")


def stop_at_once(reason: str) -> NoReturn:
    """End the process without a further save."""
    logger.critical(reason)
    logging.shutdown()
    os._exit(EXIT_LOST_WRITE)
