"""Test the translation of control plane answers, including lost answers and gateways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.contract.objects.rings import RecordsRequest, RemovalAnswer
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.store.control_plane import MAX_CACHED, ControlPlaneStore
from gpu_client.ring.store.uri import ControlPlaneAccess
from gpu_client.transport.errors import NotFound


def not_found(**more: Any) -> NotFound:
    return NotFound(code="ring_not_found", status=404, message="No ring shapes.", **more)


class Calls:
    """Answers one after the other."""

    def __init__(self, *answers: RemovalAnswer | NotFound) -> None:
        self.answers = list(answers)

    def remove_ring(self, ring: str) -> RemovalAnswer:
        answer = self.answers.pop(0)
        if isinstance(answer, NotFound):
            raise answer
        return answer

    def ring_records(self, ring: str, request: RecordsRequest) -> Any:
        self.remove_ring(ring)


def store(monkeypatch: pytest.MonkeyPatch, *answers: RemovalAnswer | NotFound) -> ControlPlaneStore:
    found = ControlPlaneStore("shapes", ControlPlaneAccess("https://api", "key"))
    line = SimpleNamespace(calls=Calls(*answers))
    monkeypatch.setattr(found, "_open_connection", lambda: line)
    return found


PART = RemovalAnswer(removed=5, done=False)


@pytest.mark.parametrize(
    ("answers", "removed"),
    [
        ([PART, RemovalAnswer(removed=2, done=True)], 7),
        ([PART, not_found()], 5),
        ([not_found(after_retry=True)], 0),
    ],
)
def test_a_ring_that_is_gone_is_removed_whoever_has_heard_of_it(
    monkeypatch: pytest.MonkeyPatch, answers: list[RemovalAnswer | NotFound], removed: int
) -> None:
    assert store(monkeypatch, *answers).remove() == removed


def test_a_ring_that_never_was_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RingMismatch, match="No ring shapes"):
        store(monkeypatch, not_found()).remove()


def test_what_something_in_between_says_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No ring shapes"):
        store(monkeypatch, not_found(foreign=True)).record("pointer")
    with pytest.raises(OSError, match="No ring shapes"):
        store(monkeypatch, PART, not_found(foreign=True)).remove()
    with pytest.raises(RingMismatch):
        store(monkeypatch, not_found()).record("pointer")


@pytest.mark.parametrize(("listed", "ahead"), [(100, 99), (MAX_CACHED + 1, 0)])
def test_urls_are_asked_for_ahead_only_where_they_are_kept(
    monkeypatch: pytest.MonkeyPatch, listed: int, ahead: int
) -> None:
    found = store(monkeypatch)
    keys = [f"samples/w/{number}" for number in range(listed)]
    found.expect(keys)
    assert len(found._keys_read_after(keys[0], 256)) == ahead
