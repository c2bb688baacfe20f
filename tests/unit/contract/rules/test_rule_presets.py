"""The presets as a document: sound, with names of their own, and switched off by name or all together."""

from __future__ import annotations

import pytest

from baton.contract.rules.document.actions import Alert
from baton.contract.rules.document.loader import load, load_values
from baton.contract.rules.document.presets import DOCUMENT, NAMES


def test_the_presets_are_sound_rules_that_only_tell() -> None:
    loaded = load(DOCUMENT, presets=True)
    assert (loaded.faults, loaded.warnings) == ([], [])
    assert loaded.rules is not None
    assert tuple(rule.name for rule in loaded.rules.rules) == NAMES
    for rule in loaded.rules.rules:
        assert [type(action) for action in rule.actions] == [Alert]
        assert rule.max_fires == 3 and rule.cooldown is not None, "none of them floods a job with events"
        assert rule.mode == "enforce" and not rule.on


@pytest.mark.parametrize(
    ("text", "off"),
    [
        ("rules: []", set()),
        ("presets: on\nrules: []", set()),
        ("presets: off\nrules: []", set(NAMES)),
        ("presets: false\nrules: []", set(NAMES)),
        ('{"presets": "off", "rules": []}', set(NAMES)),
        ("presets: {}\nrules: []", set()),
        ("presets: {preset-stuck: off}\nrules: []", {"preset-stuck"}),
        ("presets: {preset-stuck: off, preset-starved: on}\nrules: []", {"preset-stuck"}),
    ],
)  # fmt: skip
def test_which_are_switched_off(text: str, off: set[str]) -> None:
    loaded = load(text)
    assert loaded.faults == [] and loaded.rules is not None
    assert loaded.rules.presets_off == off


@pytest.mark.parametrize(
    ("text", "field", "code", "said"),
    [
        ("presets: {preset-stuk: off}\nrules: []", "presets.preset-stuk", "unknown_key", "Did you mean preset-stuck?"),
        ("presets: {spike: off}\nrules: []", "presets.spike", "unknown_key", "preset-gpu-idle"),
        ("presets: {preset-stuck: maybe}\nrules: []", "presets.preset-stuck", "invalid_value", "off"),
        ("presets: {preset-stuck: 0}\nrules: []", "presets.preset-stuck", "invalid_value", "off"),
        ("presets: {preset-stuck: [off]}\nrules: []", "presets.preset-stuck", "invalid_value", "off"),
        ("presets: 0\nrules: []", "presets", "invalid_value", "presets: off"),
        ("presets:\nrules: []", "presets", "invalid_value", "presets: off"),
        ("presets: [off]\nrules: []", "presets", "invalid_value", "presets: off"),
        ("presets: off", "", "missing_key", "rules"),
        ("rules: [{name: preset-stuck, when: loss > 1, do: stop}]", "rules.0.name", "duplicate_name", "another name"),
        ("preset: off\nrules: []", "preset", "unknown_key", "Did you mean presets?"),
    ],
)
def test_what_is_wrong_is_told(text: str, field: str, code: str, said: str) -> None:
    loaded = load(text)
    assert loaded.rules is None
    [fault] = loaded.faults
    assert (fault.field, fault.code) == (field, code)
    assert said in fault.remedy and fault.line


def test_a_copy_of_a_preset_needs_another_name() -> None:
    assert {fault.field for fault in load(DOCUMENT).faults} == {f"rules.{number}.name" for number in range(len(NAMES))}
    copied = load(DOCUMENT.replace("preset-", "my-"))
    assert copied.faults == [] and copied.rules is not None


def test_plain_values_switch_as_texts_do() -> None:
    loaded = load_values({"presets": {"preset-starved": False}, "rules": []})
    assert loaded.rules is not None and loaded.rules.presets_off == {"preset-starved"}
