"""Expressions: what they mean, and what is refused and where."""

from __future__ import annotations

import math

import pytest

from baton.contract.rules.language.checker import check_condition
from baton.contract.rules.language.faults import Code
from baton.contract.rules.metrics import MetricCatalog, canonical_name, is_name
from tests.kits.rules.expressions import METRICS, fault_of, value_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3 == 7", True),
        ("(1 + 2) * 3 == 9", True),
        ("10 - 4 - 3 == 3", True),
        ("8 / 4 / 2 == 1", True),
        ("-7 % 3 == 2", True),
        ("1 < 2 < 3", True),
        ("1 < 3 < 2", False),
        ("3 > 2 >= 2 != 1", True),
        ("not 1 > 2 and 2 > 1", True),
        ("not (1 > 2 or 2 > 1)", False),
        ("false or true and false", False),
        ("- -1 == 1", True),
        ("1 / 0 == inf", True),
        ("-1 / 0 == -inf", True),
        ("isnan(0 / 0)", True),
        ("isnan(5 % 0)", True),
        ("isnan(inf % 5)", True),
        ("1e308 * 10 == inf", True),
        ("isnan(inf - inf)", True),
        ("log(0) == -inf", True),
        ("isnan(log(-1))", True),
        ("0 / 0 < 1 or 0 / 0 >= 1", False),
        ("0 / 0 != 0 / 0", True),
        ("clamp(5, 0, 1) == 1", True),
        ("isnan(clamp(0 / 0, 0, 1))", True),
        ("90s == 1.5m", True),
        ("2h / 1m == 120", True),
        ("1GiB > 1GB", True),
        ("missing(loss)", True),
        ("missing(1)", False),
        ("coalesce(loss, 4) == 4", True),
        ("loss > 1", None),
        ("loss > 1 and false", False),
        ("loss > 1 or true", True),
        ("loss > 1 and true", None),
        ("not loss > 1", None),
        ("1 < loss < 0", None),
        ("2 < 1 < loss", False),
        ("1 + loss > 2", None),
        ("missing(1 + loss)", True),
        ("flag", None),
        ("max(loss, eval.loss) > 1", None),
    ],
)
def test_without_any_metric(text: str, expected: bool | None) -> None:
    found = value_of(text)
    assert found is expected


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("text", "metrics", "expected"),
    [
        ("loss < 1", {"loss": NAN}, False),
        ("loss != loss", {"loss": NAN}, True),
        ("not loss < 1", {"loss": NAN}, True),
        ("isnan(loss)", {"loss": NAN}, True),
        ("isfinite(loss)", {"loss": INF}, False),
        ("missing(loss)", {"loss": NAN}, False),
        ("coalesce(loss, 1) == 1", {"loss": NAN}, False),
        ("abs(loss) == 2", {"loss": -2.0}, True),
        ("min(loss, eval.loss) == 1", {"loss": 1.0, "eval__loss": 2.0}, True),
        ("max(loss, eval.loss) == 2", {"loss": 1.0, "eval__loss": 2.0}, True),
        ("isnan(max(loss, eval.loss))", {"loss": 1.0, "eval__loss": NAN}, True),
        ("flag", {"flag": 1.0}, True),
        ("flag", {"flag": NAN}, None),
        ("not flag", {"flag": 0.0}, True),
        ("age(loss) == 0", {"loss": 1.0}, True),
        ("count(loss) == 1", {"loss": 1.0}, True),
        ("changed(loss)", {"loss": 1.0}, None),
        ("loss / 0 == inf", {"loss": 3.0}, True),
    ],
)
def test_with_one_point_of_each(text: str, metrics: dict[str, float], expected: bool | None) -> None:
    assert value_of(text, **metrics) is expected


@pytest.mark.parametrize(
    ("text", "code", "column", "says"),
    [
        ("", Code.SYNTAX, 1, "empty"),
        ("loss >", Code.SYNTAX, 7, "too early"),
        ("loss > 1)", Code.SYNTAX, 9, "')'"),
        ("(loss > 1", Code.SYNTAX, 1, "not closed"),
        ("loss = 1", Code.SYNTAX, 6, "'='"),
        ("loss > 1; loss > 2", Code.SYNTAX, 9, "statements"),
        ("m := true", Code.SYNTAX, 3, "assigned"),
        ("loss ** 2 > 1", Code.SYNTAX, 6, "powers"),
        ("loss[0] > 1", Code.SYNTAX, 5, "indexing"),
        ("'loss' > 1", Code.SYNTAX, 1, "texts"),
        ("loss > 1 if true else false", Code.SYNTAX, 10, "'if'"),
        ("loss > True", Code.SYNTAX, 8, "'True'"),
        ("loss", Code.WRONG_TYPE, 1, "number, not true or false"),
        ("loss > 1 and loss", Code.WRONG_TYPE, 14, "number, not true or false"),
        ("2 + 2", Code.WRONG_TYPE, 1, "number, not true or false"),
        ("(loss > 1) + 1 > 1", Code.WRONG_TYPE, 7, "true or false"),
        ("flag == true", Code.WRONG_TYPE, 1, "true or false"),
        ("wall > 30", Code.WRONG_TYPE, 6, "duration"),
        ("loss > 30s", Code.WRONG_TYPE, 6, "duration"),
        ("wall * wall > 1", Code.WRONG_TYPE, 6, "duration"),
        ("gpu.mem > 10s", Code.WRONG_TYPE, 9, "size"),
        ("log(wall) > 1", Code.WRONG_TYPE, 1, "duration"),
        ("wall > 30sec", Code.UNKNOWN_UNIT, 8, "'sec'"),
        ("mena(loss, 5) > 1", Code.UNKNOWN_FUNCTION, 1, "'mena'"),
        ("loss(5) > 1", Code.UNKNOWN_FUNCTION, 1, "is a metric"),
        ("mean > 1", Code.WRONG_ARITY, 1, "is a function"),
        ("mean(loss) > 1", Code.WRONG_ARITY, 1, "2 arguments"),
        ("abs(loss, 1) > 1", Code.WRONG_ARITY, 1, "1 argument"),
        ("best(eval.f1) > 1", Code.WRONG_ARITY, 1, "better"),
        ("best(loss, most) > 1", Code.WRONG_TYPE, 12, "goal"),
        ("mean(loss, 0) > 1", Code.INVALID_WINDOW, 12, "0 points"),
        ("mean(loss, 1.5) > 1", Code.INVALID_WINDOW, 12, "1.5 points"),
        ("mean(loss, 100001) > 1", Code.INVALID_WINDOW, 12, "100001 points"),
        ("median(loss, 10001) > 1", Code.INVALID_WINDOW, 14, "10001 points"),
        ("std(loss, 1) > 1", Code.INVALID_WINDOW, 11, "1 points"),
        ("mean(loss, step) > 1", Code.INVALID_WINDOW, 12, "no window"),
        ("mean(loss, 10GB) > 1", Code.INVALID_WINDOW, 12, "no window"),
        ("mean(loss, 0s) > 1", Code.INVALID_WINDOW, 12, "0s"),
        ("mean(loss, 500d) > 1", Code.INVALID_WINDOW, 12, "500d"),
        ("lag(loss, 10s) > 1", Code.INVALID_WINDOW, 11, "10s is no window"),
        ("lag(loss) > 1", Code.WRONG_ARITY, 1, "2 arguments"),
        ("lag(loss, 0) > 1", Code.INVALID_WINDOW, 11, "0 points"),
        ("at(epoch) > 1", Code.WRONG_ARITY, 1, "2 arguments"),
        ("at(epoch, 3) > 1", Code.WRONG_TYPE, 11, "only metrics have a history"),
        ("at(flag, loss)", Code.WRONG_TYPE, 1, "takes numbers"),
        ("mean(loss + 1, 5) > 1", Code.WRONG_TYPE, 11, "only metrics have a history"),
        ("mean(flag, 5) > 1", Code.WRONG_TYPE, 1, "takes numbers"),
        ("min(loss * 2, eval.loss, 5) > 1", Code.WRONG_ARITY, 1, "a number"),
        ("min > 1", Code.WRONG_ARITY, 1, "is a function"),
        ("loss.__class__ > 1", Code.SYNTAX, 1, "no metric"),
    ],
)
def test_what_is_refused(text: str, code: Code, column: int, says: str) -> None:
    error = fault_of(text)
    assert (error.code, error.offset + 1) == (code, column)
    assert says in error.reason
    assert error.remedy


def test_all_faults_of_an_expression_are_told_at_once() -> None:
    checked = check_condition("mena(loss, 5) > 1 and wall > 3 and 5parsec > 1", METRICS)
    assert [error.code for error in checked.faults] == [Code.UNKNOWN_FUNCTION, Code.WRONG_TYPE, Code.UNKNOWN_UNIT]


def test_the_nearest_name_is_offered() -> None:
    reported = MetricCatalog(reported=["eval/f1_macro"])
    error = fault_of("eval.f1 > 0.9", reported)
    assert (error.reason, error.remedy) == ("the metric eval.f1 never appears", "Did you mean eval.f1_macro?")
    assert fault_of("losss > 1", reported).remedy == "Did you mean loss?"
    assert fault_of("meen(loss, 5) > 1").remedy == "Did you mean mean?"
    doubts = check_condition("eval.los > 1", MetricCatalog()).doubts
    assert [(doubt.code, doubt.remedy) for doubt in doubts] == [(Code.DOUBTFUL_NAME, "Did you mean eval.loss?")]


def test_names_of_reported_metrics() -> None:
    assert [canonical_name(name) for name in ("train/loss", "f1-macro", "a//b.", "loss")] == [
        "train.loss", "f1_macro", "a.b", "loss",
    ]  # fmt: skip
    assert not any(map(is_name, ("", "1a", "a b", "a.", "inf", "and", "x" * 65, "a-b")))
