"""DynamoDB of ministack, made atomic against its own background work and durable against `kill -9`.

Every request and every sweep of expired items runs under one lock. What a request stored or removed is collected as it
happens (the items themselves, not the request: replay needs no clock, no conditions and no randomness) and is in the
journal, as one line, before the request is answered. Whatever is not an item write - tables, TTL settings, tags,
backups - is rare and takes a snapshot instead.
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

# The module's whole memory, by attribute name. Stream records are left out: they begin anew with each start.
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


class Tables:
    """The patched module. `journal` None keeps the state in memory only."""

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
        """Put the lock and, with a journal, the collecting hooks in place, and restore what the journal holds.

        Raises JournalDamagedError, or RuntimeError when this ministack keeps state that we would not save.
        """
        module = self._dynamodb
        unsaved = {f"_{name}" for name in module.get_state()} - set(STORES)
        if unsaved:
            raise RuntimeError(f"this version of ministack keeps DynamoDB state that is not journalled: {unsaved}")
        # The sweep of expired items looks its lock up by name each time, so it now excludes requests.
        module._lock = self._lock
        handle_request = module.handle_request

        async def locked_request(
            method: str, path: str, headers: dict[str, str], body: bytes, query_params: dict[str, Any]
        ) -> Response:
            with self._lock:
                action = headers.get("x-amz-target", "").rpartition(".")[2]
                status = 500
                try:
                    response: Response = finish(handle_request(method, path, headers, body, query_params))
                    status = response[0]
                    return response
                finally:
                    self._save(other_change=status < 300 and action not in ITEM_WRITES | READS)

        module.handle_request = locked_request
        if self._journal is not None:
            self._hook()
            self._restore(self._journal)

    def close(self) -> None:
        """Take the last snapshot. Nothing may be served afterwards."""
        if self._journal is not None:
            with self._lock:
                self._journal.snapshot(self._state())
                self._journal.close()

    def _hook(self) -> None:
        module = self._dynamodb
        items_replaced, token_store, reset = module._items_replaced, module._txn_token_store, module.reset

        def set_item(table: dict[str, Any], pk: str, sk: str, item: dict[str, Any]) -> Any:
            with self._lock:
                self._effects.append([identity(table), pk, sk, item])
                return self._set_item(table, pk, sk, item)

        def remove_item(table: dict[str, Any], pk: str, sk: str) -> Any:
            with self._lock:
                self._effects.append([identity(table), pk, sk, None])
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
        """Write down what has happened since the last call. Stops the process when that is not possible."""
        if self._journal is None:
            return
        effects, self._effects = self._effects, []
        tokens, self._tokens = self._tokens, []
        # A table that came into being behind our back (CloudFormation) must be saved before its items.
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
            # The memory is now ahead of the disk: to go on would acknowledge writes that a restart forgets.
            self._stop(f"DynamoDB state could not be saved ({error}); stopping so that nothing acknowledged is lost")

    def _snapshot(self, journal: Journal) -> None:
        journal.snapshot(self._state())
        self._known = {identity(table) for table in self._dynamodb._tables.all_values()}

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
        # The module's own pass over tables read from JSON: plain dicts become what its handlers expect.
        self._dynamodb._restore_state({"tables": {}})
        tables = {identity(table): table for table in self._dynamodb._tables.all_values()}
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


def identity(table: dict[str, Any]) -> str:
    """What distinguishes a table from every other, one of the same name created later included."""
    return f"{table['TableArn']}#{table.get('TableId', '')}"


def finish(call: Coroutine[Any, Any, Response]) -> Response:
    """Run a coroutine that never waits. Raises RuntimeError if it does: requests would then interleave."""
    try:
        call.send(None)
    except StopIteration as done:
        response: Response = done.value
        return response
    call.close()
    raise RuntimeError("a DynamoDB handler of this ministack waits; its requests are no longer atomic")


def stop_at_once(reason: str) -> NoReturn:
    """End the process without any further save."""
    logger.critical(reason)
    logging.shutdown()
    os._exit(EXIT_LOST_WRITE)
