"""Limits of documents: hostile texts are refused after a bounded count of nodes and tokens, in YAML as in JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from yaml.composer import Composer
from yaml.scanner import Scanner

from baton.contract.rules.document.loader import load
from baton.contract.rules.language.faults import Code
from baton.contract.yaml_documents import MAX_DEPTH, MAX_DOCUMENT_BYTES, MAX_NODES, read_document

# Flow sequences fetch tokens up to 1,024 characters ahead, since a `:` may still make a key of what was read.
TOKENS_AHEAD = 1_100


def filled(head: str, unit: str, tail: str = "") -> str:
    """The longest allowed text of that shape."""
    return head + unit * ((MAX_DOCUMENT_BYTES - len(head) - len(tail)) // len(unit)) + tail


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the nodes that the YAML library composes and the tokens that it fetches."""
    calls: Counter[str] = Counter()
    compose, fetch = Composer.compose_node, Scanner.fetch_more_tokens

    def composing(self: Any, parent: Any, index: Any) -> Any:
        calls["nodes"] += 1
        return compose(self, parent, index)

    def fetching(self: Any) -> Any:
        calls["tokens"] += 1
        return fetch(self)

    monkeypatch.setattr(Composer, "compose_node", composing)
    monkeypatch.setattr(Scanner, "fetch_more_tokens", fetching)
    return calls


@pytest.mark.parametrize(
    "text",
    [
        filled("[", "a,", "]"),
        filled("[", "{},", "]"),
        filled("", "-\n"),
        filled("", "a:\n"),
        filled("{", "a,", "}"),
        filled("{", "0:,", "}"),
    ],
)
def test_a_text_of_many_nodes_is_refused_before_it_is_read_whole(text: str, counted: Counter[str]) -> None:
    document = read_document(text)
    (fault,) = document.faults
    assert fault.reason == f"the document has more than {MAX_NODES} values" and fault.remedy
    assert document.value is None and document.too_large
    assert counted["nodes"] <= MAX_NODES
    assert counted["tokens"] <= 3 * MAX_NODES + TOKENS_AHEAD


@pytest.mark.parametrize("text", [filled("", "["), filled("", "- "), filled("", "? "), filled("", "{a: ")])
def test_a_deep_text_is_refused_at_the_level_that_is_too_deep(text: str, counted: Counter[str]) -> None:
    document = read_document(text)
    (fault,) = document.faults
    assert (fault.reason, fault.remedy) == ("nested too deeply", f"At most {MAX_DEPTH} levels are allowed.")
    assert fault.line == 1 and fault.column > MAX_DEPTH
    assert document.too_large
    assert counted["nodes"] <= 2 * MAX_DEPTH + 1
    assert counted["tokens"] <= 3 * MAX_DEPTH + TOKENS_AHEAD


def test_the_limits_themselves_are_allowed() -> None:
    assert read_document("[" + "a," * (MAX_NODES - 1) + "]").faults == []
    assert read_document("[" + "a," * MAX_NODES + "]").too_large
    assert read_document("[" * MAX_DEPTH + "a" + "]" * MAX_DEPTH).faults == []
    assert read_document("[" * MAX_DEPTH + "[a]" + "]" * MAX_DEPTH).too_large


@pytest.mark.parametrize(
    "value",
    [
        {"rules": [0] * MAX_NODES},
        {"rules": "a" * MAX_DOCUMENT_BYTES},
        {"rules": json.loads("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))},
    ],
)
def test_json_passes_no_limit_that_yaml_has(value: Any) -> None:
    loaded = load(json.dumps(value))
    assert loaded.rules is None
    assert [fault.code for fault in loaded.faults] == [Code.UNREADABLE]
