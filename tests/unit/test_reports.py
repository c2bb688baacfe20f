"""Test that the reports of a pytest-xdist worker arrive, whatever text a test has logged."""

from __future__ import annotations

import logging

import execnet
import pytest

from tests.kits.runner.reports import without_surrogates


def test_what_is_no_text_is_escaped_wherever_it_lies() -> None:
    report = {
        "sections": [("Captured log call", "a name that is no text: \udcff"), ("Captured stdout call", "ü")],
        "longrepr": {"reprcrash": {"message": "\ud800", "lineno": 7}, "chain": [(None, 1.5, True)], "\udcff": b"x"},
    }
    plain = without_surrogates(report)
    assert plain == {
        "sections": [("Captured log call", "a name that is no text: \\udcff"), ("Captured stdout call", "ü")],
        "longrepr": {"reprcrash": {"message": "\\ud800", "lineno": 7}, "chain": [(None, 1.5, True)], "\\udcff": b"x"},
    }
    assert execnet.loads(execnet.dumps(plain)) == plain


def test_the_hook_is_in_the_way_of_every_report(request: pytest.FixtureRequest) -> None:
    """Regression: one such line ended a worker, and with it the run."""
    report = pytest.TestReport("it", ("it.py", 1, "it"), {}, "passed", None, "call", [("log", "\udcff")])
    sent = request.config.hook.pytest_report_to_serializable(config=request.config, report=report)
    assert sent["sections"] == [("log", "\\udcff")]
    logging.getLogger("baton").warning("a name that is no text: \udcff")  # of this very test, too
