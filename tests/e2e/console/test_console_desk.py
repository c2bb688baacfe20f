"""The examination of pages itself finds what it must find."""

from __future__ import annotations

from tests.e2e.console.desk import Desk


def test_an_examination_finds_a_button_without_a_name(reader: Desk) -> None:
    page = reader.visit("/no-such-place")
    assert reader.complaints(page) == []
    page.evaluate("document.querySelector('main').append(document.createElement('button'))")
    (found,) = reader.complaints(page)
    assert found.startswith("button-name: ")
    page.reload()
