"""Test the storage of one object: after a kill at any step, bytes and description match."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from functions.local.emulated.objects import DurableObjects, finish_intents


class Killed(BaseException):
    """End of the process."""


class StoppedError(Exception):
    pass


def stop(reason: str) -> NoReturn:
    raise StoppedError(reason)


def fake_s3(directory: Path) -> Any:
    def meta(record: dict[str, Any]) -> dict[str, Any]:
        return {"etag": record["etag"]}

    async def handle_request(method: str, path: str, *_: Any, **__: Any) -> Any:
        return (404 if path == "/unknown" else 200), {}, b""

    return SimpleNamespace(
        DATA_DIR=str(directory),
        get_account_id=lambda: "0",
        _object_disk_path=lambda bucket, key: str(directory / bucket / key),
        _object_meta_from_record=meta,
        _key_history_meta=lambda bucket, key: {},
        _other_key_disk_path=lambda base, key, place: None,
        _remove_key_files=lambda path: None,
        get_state=lambda: {"buckets": ["b"]},
        handle_request=handle_request,
    )


def fake_persistence(directory: Path) -> Any:
    return SimpleNamespace(STATE_DIR=str(directory), _state_format_version=lambda service: 2, _json_default=str)


def patched(directory: Path) -> tuple[Any, DurableObjects]:
    s3 = fake_s3(directory / "s3")
    objects = DurableObjects(s3, fake_persistence(directory / "services"), directory / "intents", stop=stop)
    objects.install()
    return s3, objects


def stored(directory: Path) -> tuple[bytes, str] | None:
    """Return the bytes of the object and the ETag of its description; None without an object."""
    place, description = directory / "s3" / "b" / "k", directory / "s3" / "b" / "k.meta.json"
    if not place.exists():
        # Ministack passes over a description without an object.
        return None
    return place.read_bytes(), json.loads(description.read_text())["etag"]


def test_an_object_is_stored_and_leaves_the_memory(tmp_path: Path) -> None:
    _, objects = patched(tmp_path)
    record: dict[str, Any] = {"body": b"bytes", "etag": "e"}
    objects.persist("b", "k", record)
    assert stored(tmp_path) == (b"bytes", "e")
    assert record["body"] is None
    assert list((tmp_path / "intents").iterdir()) == []


def test_a_record_without_a_body_keeps_the_bytes(tmp_path: Path) -> None:
    _, objects = patched(tmp_path)
    objects.persist("b", "k", {"body": b"bytes", "etag": "e"})
    objects.persist("b", "k", {"body": None, "etag": "new"})
    assert stored(tmp_path) == (b"bytes", "new")


def stepped(call: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def dying(*arguments: Any, **named: Any) -> Any:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return call(*arguments, **named)

    return dying


@pytest.mark.parametrize("overwriting", [False, True])
def test_a_kill_at_any_step_leaves_the_old_object_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwriting: bool
) -> None:
    outcomes = set()
    for steps in range(100):
        directory = tmp_path / str(steps)
        _, objects = patched(directory)
        old = None
        if overwriting:
            objects.persist("b", "k", {"body": b"old", "etag": "old"})
            old = (b"old", "old")
        left = [steps]
        finished = False
        with monkeypatch.context() as patch:
            for name in ("write_bytes", "write_text", "replace", "unlink", "mkdir"):
                patch.setattr(Path, name, stepped(getattr(Path, name), left))
            try:
                objects.persist("b", "k", {"body": b"new", "etag": "new"})
                finished = True
            except Killed:
                pass
        finish_intents(directory / "intents")
        assert list((directory / "intents").iterdir()) == []
        assert stored(directory) in (old, (b"new", "new")), f"killed at step {steps}"
        outcomes.add(stored(directory))
        if finished:
            assert stored(directory) == (b"new", "new")
            break
    assert finished
    assert outcomes == {old, (b"new", "new")}


def test_there_may_be_nothing_to_finish(tmp_path: Path) -> None:
    assert finish_intents(tmp_path / "never") == 0


def test_a_refused_write_is_not_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, objects = patched(tmp_path)

    def full(*_: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StoppedError, match="No space left"):
        objects.persist("b", "k", {"body": b"bytes", "etag": "e"})
    assert stored(tmp_path) is None


@pytest.mark.parametrize(
    ("method", "path", "saved"),
    [
        ("PUT", "/b", True),
        ("PUT", "/b/", True),
        ("DELETE", "/b", True),
        ("GET", "/b", False),
        ("PUT", "/b/key", False),
        ("PUT", "/unknown", False),
    ],
)
def test_buckets_are_saved_when_a_request_may_have_changed_one(
    tmp_path: Path, method: str, path: str, saved: bool
) -> None:
    s3, _ = patched(tmp_path)
    asyncio.run(s3.handle_request(method, path, {}, b"", {}))
    place = tmp_path / "services" / "s3.json"
    assert place.exists() is saved
    if saved:
        assert json.loads(place.read_text()) == {"__ministack_format__": 2, "payload": {"buckets": ["b"]}}


def test_buckets_that_cannot_be_saved_are_not_acknowledged(tmp_path: Path) -> None:
    s3, _ = patched(tmp_path)
    (tmp_path / "services").write_text("in the way")
    with pytest.raises(StoppedError, match="buckets could not be saved"):
        asyncio.run(s3.handle_request("PUT", "/b", {}, b"", {}))
