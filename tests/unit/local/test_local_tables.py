"""Test the patch of the DynamoDB module on a fake: a save before the answer, failed saves."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from functions.local.emulated.journal import Journal
from functions.local.emulated.tables import STORES, DurableTables, run_to_completion, table_identity

TABLE = {"TableArn": "arn:aws:dynamodb:us-east-1:0:table/t", "TableId": "1", "_index_members": {"x": "derived"}}


class Store:
    def __init__(self) -> None:
        self.data: dict[tuple[str, str, str], Any] = {}

    def all_items(self) -> list[Any]:
        return list(self.data.items())

    def all_values(self) -> list[Any]:
        return list(self.data.values())

    def set_scoped(self, account: str, region: str, key: str, value: Any) -> None:
        self.data[(account, region, key)] = value

    def _scoped(self, key: str) -> tuple[str, str, str]:
        return ("0", "us-east-1", key)


class FakeDynamo:
    """The part of ministack's module that the patch uses."""

    _INDEX_MEMBERS = "_index_members"

    def __init__(self, *, with_table: bool = True) -> None:
        for name in STORES:
            setattr(self, name, Store())
        if with_table:
            self._tables.set_scoped("0", "us-east-1", "t", {**TABLE, "items": {}})
        self._lock: Any = threading.Lock()
        self.fail = False

    _tables: Store
    _txn_idempotency: Store

    def get_state(self) -> dict[str, Any]:
        return {name.removeprefix("_"): None for name in STORES}

    def _restore_state(self, data: Any) -> None:
        pass

    def _set_item(self, table: Any, pk: str, sk: str, item: Any) -> None:
        table["items"].setdefault(pk, {})[sk] = item

    def _remove_item(self, table: Any, pk: str, sk: str) -> None:
        table["items"].get(pk, {}).pop(sk, None)

    def _items_replaced(self, table: Any) -> None:
        pass

    def _txn_token_store(self, token: str, entry: Any) -> None:
        self._txn_idempotency.set_scoped("0", "us-east-1", token, entry)

    def reset(self) -> None:
        for name in STORES:
            getattr(self, name).data.clear()

    async def handle_request(self, method: str, path: str, headers: Any, body: bytes, query: Any) -> Any:
        (table,) = self._tables.all_values()
        action = headers["x-amz-target"].rpartition(".")[2]
        if action == "PutItem":
            self._set_item(table, "p", "s", {"v": {"S": body.decode()}})
        if action == "DeleteItem":
            self._remove_item(table, "p", "s")
        if action == "TransactWriteItems":
            self._set_item(table, "p", "s", {"v": {"S": body.decode()}})
            self._txn_token_store("token", {"completed_at": 1})
        if self.fail:
            raise KeyError("a defect of the emulator")
        return 200, {}, b"{}"


class StoppedError(Exception):
    pass


def stop(reason: str) -> NoReturn:
    raise StoppedError(reason)


def patched(directory: Path, dynamodb: FakeDynamo | None = None) -> FakeDynamo:
    dynamodb = dynamodb or FakeDynamo()
    DurableTables(dynamodb, Journal(directory), stop=stop).install()
    return dynamodb


def call(dynamodb: FakeDynamo, action: str, body: bytes = b"") -> Any:
    headers = {"x-amz-target": f"DynamoDB_20120810.{action}"}
    return asyncio.run(dynamodb.handle_request("POST", "/", headers, body, {}))


def items(dynamodb: FakeDynamo) -> Any:
    (table,) = dynamodb._tables.all_values()
    return table["items"]


def after_a_kill(directory: Path) -> FakeDynamo:
    return patched(directory, FakeDynamo(with_table=False))


def test_an_answered_write_is_there_after_a_kill(tmp_path: Path) -> None:
    dynamodb = patched(tmp_path)
    assert call(dynamodb, "PutItem", b"one")[0] == 200
    assert call(dynamodb, "PutItem", b"two")[0] == 200
    assert items(after_a_kill(tmp_path)) == {"p": {"s": {"v": {"S": "two"}}}}


def test_a_removal_and_a_transaction_token_are_there_after_a_kill(tmp_path: Path) -> None:
    dynamodb = patched(tmp_path)
    call(dynamodb, "TransactWriteItems", b"one")
    call(dynamodb, "DeleteItem")
    restored = after_a_kill(tmp_path)
    assert items(restored) == {"p": {}}
    assert restored._txn_idempotency.data == {("0", "us-east-1", "token"): {"completed_at": 1}}


def test_a_long_journal_is_replaced_by_a_snapshot(tmp_path: Path) -> None:
    dynamodb = FakeDynamo()
    DurableTables(dynamodb, Journal(tmp_path, limit_bytes=2_000), stop=stop).install()
    sizes = []
    for number in range(60):
        call(dynamodb, "PutItem", f"{number}".encode())
        (journal,) = tmp_path.glob("journal.*")
        sizes.append(journal.stat().st_size)
    assert max(sizes) < 2_000
    assert sizes.count(0) >= 2
    assert items(after_a_kill(tmp_path)) == {"p": {"s": {"v": {"S": "59"}}}}


def test_reading_writes_nothing(tmp_path: Path) -> None:
    dynamodb = patched(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    call(dynamodb, "Query")
    call(dynamodb, "DescribeTable")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_no_item_write_takes_a_snapshot_without_derived_data(tmp_path: Path) -> None:
    dynamodb = patched(tmp_path)
    call(dynamodb, "PutItem", b"one")
    call(dynamodb, "UpdateTimeToLive")
    recovered = Journal(tmp_path).recover()
    assert recovered.records == []
    (table,) = [entry[3] for entry in recovered.state["_tables"]]
    expected = {**TABLE, "items": {"p": {"s": {"v": {"S": "one"}}}}}
    del expected["_index_members"]
    assert table == expected


def test_an_item_of_a_table_made_behind_our_back_brings_its_table_along(tmp_path: Path) -> None:
    dynamodb = patched(tmp_path, FakeDynamo(with_table=False))
    dynamodb._tables.set_scoped("0", "us-east-1", "t", {**TABLE, "items": {}})
    call(dynamodb, "PutItem", b"one")
    call(dynamodb, "PutItem", b"two")
    assert items(after_a_kill(tmp_path)) == {"p": {"s": {"v": {"S": "two"}}}}


def test_a_reset_is_remembered(tmp_path: Path) -> None:
    dynamodb = patched(tmp_path)
    call(dynamodb, "PutItem", b"one")
    dynamodb.reset()
    assert after_a_kill(tmp_path)._tables.data == {}


def test_a_handler_that_fails_half_way_leaves_memory_and_disk_alike(tmp_path: Path) -> None:
    dynamodb = patched(tmp_path)
    dynamodb.fail = True
    with pytest.raises(KeyError, match="defect"):
        call(dynamodb, "PutItem", b"one")
    assert items(dynamodb) == items(after_a_kill(tmp_path)) == {"p": {"s": {"v": {"S": "one"}}}}


def test_a_write_that_cannot_be_saved_is_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dynamodb = patched(tmp_path)

    def full(*_: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(StoppedError, match="No space left"):
        call(dynamodb, "PutItem", b"one")
    assert items(after_a_kill(tmp_path)) == {}


def test_state_that_would_not_be_saved_is_noticed_at_the_start(tmp_path: Path) -> None:
    dynamodb = FakeDynamo()
    dynamodb.get_state = lambda: {"tables": None, "global_tables": None}  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="_global_tables"):
        patched(tmp_path, dynamodb)


def test_a_sweep_excludes_requests(tmp_path: Path) -> None:
    dynamodb = patched(tmp_path)
    answered = threading.Event()

    def put() -> None:
        call(dynamodb, "PutItem", b"one")
        answered.set()

    request = threading.Thread(target=put)
    with dynamodb._lock:  # as ministack's own thread takes it
        request.start()
        assert not answered.wait(0.05)
        assert items(dynamodb) == {}
    request.join(60)
    assert answered.is_set()


def test_a_handler_that_waits_is_refused() -> None:
    async def waits() -> Any:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="no longer atomic"):
        run_to_completion(waits())


def test_a_table_of_the_same_name_is_another_table() -> None:
    assert table_identity(TABLE) != table_identity({**TABLE, "TableId": "2"})
