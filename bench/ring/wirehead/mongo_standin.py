"""Stand-in for MongoDB with the commands of Wirehead 0.9: one process, OP_MSG, documents in memory.

It flatters Wirehead: no disk, no journal, no compression, no network, and a rename that takes no time. Runs in
Wirehead's environment (`rival.py`): `python -m bench.ring.wirehead.mongo_standin`; prints its port.
"""

from __future__ import annotations

import itertools
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any

import bson
from bson.int64 import Int64

Pieces = list[bytes | memoryview]
Namespace = tuple[str, str]
_HEADER = struct.Struct("<iiii")
_OP_REPLY, _OP_QUERY, _OP_MSG = 1, 2004, 2013
_MOST_BYTES, _FIRST_BATCH = 16 * 1024 * 1024, 101
_MOST_PIECES = 512
_FIXED = {0x01: 8, 0x07: 12, 0x08: 1, 0x09: 8, 0x0A: 0, 0x10: 4, 0x11: 8, 0x12: 8}
"""Bytes of the values whose length their type tells."""


class RefusedError(Exception):
    """Command that MongoDB would refuse, too."""

    def __init__(self, code: int, name: str, message: str) -> None:
        super().__init__(message)
        self.code, self.name = code, name


class Document:
    """BSON as received, with the offsets of its elements: large values are never copied."""

    def __init__(self, raw: memoryview) -> None:
        self.raw = raw
        self.spans: dict[str, tuple[int, int]] = {}
        self._values: dict[str, Any] = {}
        place = 4
        while raw[place]:
            name_end = place + 1
            while raw[name_end]:
                name_end += 1
            end = name_end + 1 + _length(raw, raw[place], name_end + 1)
            self.spans[bytes(raw[place + 1 : name_end]).decode()] = (place, end)
            place = end

    def value(self, name: str) -> Any:
        """Read the value of a small element; None for a missing one."""
        if name not in self._values:
            span = self.spans.get(name)
            if span is None:
                return None
            element = bytes(self.raw[span[0] : span[1]])
            self._values[name] = bson.decode(struct.pack("<i", len(element) + 5) + element + b"\0")[name]
        return self._values[name]

    def projected(self, fields: dict[str, Any]) -> tuple[int, Pieces]:
        """Encode the requested fields; returns length and pieces."""
        if not fields:
            return len(self.raw), [self.raw]
        found: Pieces = [self.raw[a:b] for name, (a, b) in self.spans.items() if name == "_id" or name in fields]
        length = 5 + sum(map(len, found))
        return length, [struct.pack("<i", length), *found, b"\0"]


def _length(raw: memoryview, kind: int, place: int) -> int:
    if kind in _FIXED:
        return _FIXED[kind]
    (length,) = struct.unpack_from("<i", raw, place)
    if kind == 0x02:
        return 4 + int(length)
    if kind in (0x03, 0x04):
        return int(length)
    if kind == 0x05:
        return 5 + int(length)
    raise ValueError(f"elements of type {kind} are not known")


def matches(document: Document, query: dict[str, Any]) -> bool:
    """Match a document: equality, $in, $gt and $exists."""
    for name, wanted in query.items():
        there = document.value(name)
        conditions = wanted if isinstance(wanted, dict) else {"$in": [wanted]}
        for operator, value in conditions.items():
            if operator == "$in":
                met = there in value
            elif operator == "$gt":
                met = there is not None and there > value
            elif operator == "$exists":
                met = (name in document.spans) == value
            else:
                raise RefusedError(2, "BadValue", f"unknown operator {operator}")
            if not met:
                return False
    return True


def changed(document: dict[str, Any], update: dict[str, Any]) -> Document:
    """Apply $set and $inc."""
    for name, value in update.get("$inc", {}).items():
        document[name] = document.get(name, 0) + value
    document.update(update.get("$set", {}))
    return Document(memoryview(bson.encode(document)))


class Database:
    """Collections and open cursors. One command at a time."""

    def __init__(self) -> None:
        self._collections: dict[Namespace, list[Document]] = {}
        self._cursors: dict[int, tuple[Namespace, list[Document], dict[str, Any]]] = {}
        self._killed: set[int] = set()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def run(self, command: dict[str, Any], sequences: dict[str, list[memoryview]]) -> Pieces:
        """Run a command; returns the reply's document in pieces."""
        name = next(iter(command))
        method: Callable[..., Any] | None = getattr(self, f"_{name.lower()}", None)
        try:
            if method is None:
                raise RefusedError(59, "CommandNotFound", f"no such command: {name}")
            with self._lock:
                found = method((command["$db"], str(command[name])), command, sequences)
        except RefusedError as error:
            return [bson.encode({"ok": 0.0, "errmsg": str(error), "code": error.code, "codeName": error.name})]
        return found if isinstance(found, list) else [bson.encode({**(found or {}), "ok": 1.0})]

    def _hello(self, *_: Any) -> dict[str, Any]:
        return {
            "isWritablePrimary": True,
            "ismaster": True,
            "helloOk": True,
            "maxBsonObjectSize": _MOST_BYTES,
            "maxMessageSizeBytes": 48_000_000,
            "maxWriteBatchSize": 100_000,
            "minWireVersion": 0,
            "maxWireVersion": 21,
            "readOnly": False,
        }

    _ismaster = _hello

    def _nothing(self, *_: Any) -> None:
        """Accept a command without effect."""

    _ping = _endsessions = _createindexes = _nothing

    def _insert(self, space: Namespace, command: dict[str, Any], sequences: dict[str, list[memoryview]]) -> Any:
        raws = sequences.get("documents") or [memoryview(bson.encode(one)) for one in command["documents"]]
        documents = [Document(raw) for raw in raws]
        # Into a collection that is not there: it is made.
        self._collections.setdefault(space, []).extend(documents)
        return {"n": len(documents)}

    def _find(self, space: Namespace, command: dict[str, Any], _: Any) -> Pieces:
        query = command.get("filter", {})
        found = [one for one in self._collections.get(space, []) if matches(one, query)]
        for name, direction in reversed(list(command.get("sort", {}).items())):
            found.sort(key=lambda one, name=name: one.value(name), reverse=direction < 0)  # type: ignore[misc]
        if command.get("limit"):
            found = found[: abs(command["limit"])]
        return self._batch("firstBatch", space, found, command.get("projection", {}), _FIRST_BATCH)

    def _getmore(self, _: Namespace, command: dict[str, Any], __: Any) -> Pieces:
        number = int(command["getMore"])
        if number in self._killed:
            raise RefusedError(175, "QueryPlanKilled", "collection dropped or renamed")
        if number not in self._cursors:
            raise RefusedError(43, "CursorNotFound", f"cursor id {number} not found")
        space, left, fields = self._cursors.pop(number)
        return self._batch("nextBatch", space, left, fields, len(left), number)

    def _batch(
        self, name: str, space: Namespace, found: list[Document], fields: dict[str, Any], most: int, number: int = 0
    ) -> Pieces:
        """Fill one reply; a cursor keeps the rest."""
        made: list[tuple[int, Pieces]] = []
        size_bytes = 0
        for one in found[:most]:
            length, pieces = one.projected(fields)
            if made and size_bytes + length > _MOST_BYTES:
                break
            made.append((length, pieces))
            size_bytes += length
        left = found[len(made) :]
        if left:
            number = number or next(self._numbers)
            self._cursors[number] = (space, left, fields)
        array: Pieces = []
        for place, (_, pieces) in enumerate(made):
            array += [b"\x03" + str(place).encode() + b"\0", *pieces]
        listed = _wrapped(b"\x04" + name.encode() + b"\0", array)
        cursor = bson.encode({"id": Int64(number if left else 0), "ns": ".".join(space)})[4:-1]
        return _document([*_wrapped(b"\x03cursor\0", [*listed, cursor]), bson.encode({"ok": 1.0})[4:-1]])

    def _killcursors(self, _: Namespace, command: dict[str, Any], __: Any) -> None:
        for number in command["cursors"]:
            self._cursors.pop(int(number), None)

    def _findandmodify(self, space: Namespace, command: dict[str, Any], _: Any) -> dict[str, Any]:
        there = self._collections.setdefault(space, []) if command.get("upsert") else self._collections.get(space, [])
        place = next((number for number, one in enumerate(there) if matches(one, command["query"])), None)
        before = bson.decode(bytes(there[place].raw)) if place is not None else None
        if place is None and not command.get("upsert"):
            return {"value": None, "lastErrorObject": {"n": 0, "updatedExisting": False}}
        after = self._written(there, place, command["query"], command["update"])
        wanted = bson.decode(bytes(after.raw)) if command.get("new") else before
        return {"value": wanted, "lastErrorObject": {"n": 1, "updatedExisting": place is not None}}

    def _update(self, space: Namespace, command: dict[str, Any], sequences: dict[str, list[memoryview]]) -> Any:
        raws = [bson.decode(bytes(raw)) for raw in sequences.get("updates", [])] or command["updates"]
        count = 0
        for one in raws:
            there = self._collections.setdefault(space, []) if one.get("upsert") else self._collections.get(space, [])
            places: list[int | None] = [number for number, doc in enumerate(there) if matches(doc, one["q"])]
            for place in places[: None if one.get("multi") else 1] or ([None] if one.get("upsert") else []):
                self._written(there, place, one["q"], one["u"])
                count += 1
        return {"n": count, "nModified": count}

    def _written(
        self, there: list[Document], place: int | None, query: dict[str, Any], update: dict[str, Any]
    ) -> Document:
        if place is not None:
            there[place] = changed(bson.decode(bytes(there[place].raw)), update)
            return there[place]
        fresh = {name: value for name, value in query.items() if not isinstance(value, dict)}
        fresh.setdefault("_id", bson.ObjectId())
        if any(one.value("_id") == fresh["_id"] for one in there):
            raise RefusedError(11000, "DuplicateKey", f"E11000 duplicate key error: {fresh['_id']}")
        there.append(changed(fresh, update))
        return there[-1]

    def _delete(self, space: Namespace, command: dict[str, Any], sequences: dict[str, list[memoryview]]) -> Any:
        raws = [bson.decode(bytes(raw)) for raw in sequences.get("deletes", [])] or command["deletes"]
        before = len(self._collections.get(space, []))
        for one in raws:
            if space in self._collections:
                self._collections[space] = [doc for doc in self._collections[space] if not matches(doc, one["q"])]
        return {"n": before - len(self._collections.get(space, []))}

    def _renamecollection(self, _: Namespace, command: dict[str, Any], __: Any) -> None:
        old, new = (_space(command[name]) for name in ("renameCollection", "to"))
        if old not in self._collections:
            raise RefusedError(26, "NamespaceNotFound", f"Source collection {old} does not exist")
        if new in self._collections and not command.get("dropTarget"):
            raise RefusedError(48, "NamespaceExists", "target namespace exists")
        self._kill_cursors_of(old, new)
        self._collections[new] = self._collections.pop(old)

    def _drop(self, space: Namespace, *_: Any) -> dict[str, Any]:
        if space not in self._collections:
            raise RefusedError(26, "NamespaceNotFound", "ns not found")
        self._kill_cursors_of(space)
        del self._collections[space]
        return {"ns": ".".join(space)}

    def _dropdatabase(self, space: Namespace, *_: Any) -> None:
        for one in [one for one in self._collections if one[0] == space[0]]:
            self._drop(one)

    def _create(self, space: Namespace, *_: Any) -> None:
        if space in self._collections:
            raise RefusedError(48, "NamespaceExists", f"Collection {'.'.join(space)} already exists.")
        self._collections[space] = []

    def _listcollections(self, space: Namespace, command: dict[str, Any], _: Any) -> dict[str, Any]:
        names = [name for database, name in self._collections if database == space[0]]
        wanted = command.get("filter", {}).get("name")
        found = [{"name": name, "type": "collection"} for name in names if wanted is None or name == wanted]
        return {"cursor": {"id": Int64(0), "ns": f"{space[0]}.$cmd.listCollections", "firstBatch": found}}

    def _count(self, space: Namespace, *_: Any) -> dict[str, Any]:
        return {"n": len(self._collections.get(space, []))}

    def _kill_cursors_of(self, *spaces: Namespace) -> None:
        killed = [number for number, (space, _, _) in self._cursors.items() if space in spaces]
        self._killed.update(killed)
        for number in killed:
            del self._cursors[number]


def _space(text: str) -> Namespace:
    database, _, name = text.partition(".")
    return database, name


def _document(elements: Pieces) -> Pieces:
    return [struct.pack("<i", 5 + sum(map(len, elements))), *elements, b"\0"]


def _wrapped(head: bytes, elements: Pieces) -> Pieces:
    return [head, *_document(elements)]


class Connection(socketserver.BaseRequestHandler):
    """Connection of one client."""

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (header := self._received(_HEADER.size)) is not None:
            length, number, _, operation = _HEADER.unpack(header)
            body = self._received(length - _HEADER.size)
            if body is None:
                return
            database: Database = self.server.database  # type: ignore[attr-defined]
            if operation == _OP_QUERY:
                # The first words of a client, in the language of old.
                reply = database.run({"hello": 1, "$db": "admin"}, {})
                self._send(number, _OP_REPLY, [struct.pack("<iqii", 8, 0, 0, 1), *reply])
            elif operation == _OP_MSG:
                self._send(number, _OP_MSG, [b"\0\0\0\0\0", *database.run(*_sections(memoryview(body)))])
            else:
                raise ValueError(f"operation {operation} is not known")

    def _received(self, length: int) -> bytearray | None:
        buffer = bytearray(length)
        left = memoryview(buffer)
        while left:
            got = self.request.recv_into(left)
            if not got:
                return None
            left = left[got:]
        return buffer

    def _send(self, number: int, operation: int, pieces: Pieces) -> None:
        length = _HEADER.size + sum(map(len, pieces))
        left = [memoryview(_HEADER.pack(length, 0, number, operation)), *map(memoryview, pieces)]
        while left:
            sent = self.request.sendmsg(left[:_MOST_PIECES])
            while left and sent >= len(left[0]):
                sent -= len(left[0])
                del left[0]
            if sent:
                left[0] = left[0][sent:]


def _sections(body: memoryview) -> tuple[dict[str, Any], dict[str, list[memoryview]]]:
    """Parse the command and its sequences of documents."""
    place, command, sequences = 4, {}, {}
    while place < len(body):
        kind, (length,) = body[place], struct.unpack_from("<i", body, place + 1)
        part = body[place + 1 : place + 1 + length]
        if kind == 0:
            command = bson.decode(bytes(part))
        else:
            name = bytes(part[4:64]).split(b"\0")[0].decode()
            sequences[name] = list(_documents(part[5 + len(name) :]))
        place += 1 + length
    return command, sequences


def _documents(part: memoryview) -> Iterable[memoryview]:
    place = 0
    while place < len(part):
        (length,) = struct.unpack_from("<i", part, place)
        yield part[place : place + length]
        place += length


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    database = Database()


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), Connection) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
