"""URLs are asked for together, ahead of their use, and dropped before they run out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from gpu_client.ring.access import Access, find_access, look_elsewhere
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.presigned import MARGIN_S, Url, Urls, numbered_after

LIFE_S = 600.0


class Asked:
    """Gives URLs, and remembers for what."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.batches: list[list[str]] = []

    def __call__(self, keys: Sequence[str]) -> Mapping[str, Url]:
        self.batches.append(list(keys))
        return {key: Url(f"{key}@{self.now_s:g}", {}, self.now_s + LIFE_S) for key in keys}


def urls(asked: Asked, most_ahead: int = 16) -> Urls:
    return Urls(asked, numbered_after, most_ahead=most_ahead, clock=lambda: asked.now_s)


def test_each_batch_is_twice_the_last_up_to_the_most() -> None:
    asked = Asked()
    kept = urls(asked)
    for number in range(1, 60):
        assert kept.of(f"samples/w/{number:03d}").url == f"samples/w/{number:03d}@0"
    assert [len(batch) for batch in asked.batches] == [5, 9, 17, 17, 17]
    assert [batch[0] for batch in asked.batches][:3] == ["samples/w/001", "samples/w/006", "samples/w/015"]


def test_a_url_is_not_used_shortly_before_it_runs_out() -> None:
    asked = Asked()
    kept = urls(asked)
    kept.of("a1")
    asked.now_s = LIFE_S - MARGIN_S - 1
    assert kept.of("a1").url == "a1@0"
    asked.now_s = LIFE_S - MARGIN_S
    assert kept.of("a1").url == f"a1@{asked.now_s:g}"


def test_what_was_used_or_refused_is_asked_for_again() -> None:
    asked = Asked()
    kept = urls(asked)
    kept.of("a1")
    kept.forget("a1")
    kept.of("a1")
    assert [batch[0] for batch in asked.batches] == ["a1", "a1"]
    assert not set(asked.batches[0][1:]) & set(asked.batches[1][1:]), "the others are at hand"


def test_what_comes_next_is_counted_up_within_its_width() -> None:
    assert numbered_after("samples/w/00000001-0000000009", 2) == [
        "samples/w/00000001-0000000010",
        "samples/w/00000001-0000000011",
    ]
    assert numbered_after("manifests/98", 5) == ["manifests/99"]
    assert numbered_after("manifests/none", 5) == []


def test_access_is_a_token_before_a_key_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_client.ring.access._elsewhere", [])
    both = {"BATON_API_URL": "https://a", "BATON_API_KEY": "key", "BATON_RING_TOKEN": "token"}
    assert find_access(both) == Access("https://a", "token")
    assert find_access({**both, "BATON_RING_TOKEN": ""}) == Access("https://a", "key")
    assert "token" not in repr(find_access(both))
    for missing in ("BATON_API_URL", "BATON_API_KEY"):
        said = {name: value for name, value in both.items() if name not in (missing, "BATON_RING_TOKEN")}
        with pytest.raises(RingMismatch, match="BATON_API_URL and BATON_API_KEY are not both set"):
            find_access(said)
    look_elsewhere(lambda: ("https://profile", "its key"))
    assert find_access({}) == Access("https://profile", "its key")
    assert find_access(both) == Access("https://profile", "its key"), "a profile that was asked for comes first"
    look_elsewhere(lambda: None)
    assert find_access(both) == Access("https://a", "token")
